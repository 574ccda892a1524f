"""The random streams of one environment: its seed, and a root stream on each thread.

A root is derived from the seed and from the number of its thread: 0 for the thread that
has seeded, then 1, 2, … in the order in which threads draw first. So a seed decides
what the threads after it draw. Scopes lie on top of the roots (`scope.py`).
"""

import dataclasses
import itertools
import threading
import weakref

import torch

from torchax.compat import jax_compat
from torchax.compat.torch_compat import active_functions
from torchax.rng import state as rng_state
from torchax.rng.state import RngState
from torchax.rng.stream import FREE, RngStream

RootSeed = tuple[int, int, str]
"""Start of a root stream: seed in [0, 2**64), number of the thread, implementation.

Seeding and `torch.random.fork_rng` must not start JAX's backend, which takes a GPU's
memory, in code that never uses a jax tensor. So the key is computed at the first draw.
"""


def root_state(root_seed: RootSeed) -> RngState:
  """The state at the start of a root stream."""
  seed, ordinal, impl = root_seed
  key = rng_state.key_from_seed(seed, impl)
  return RngState(rng_state.thread_key(key, ordinal), 0)


class _Root(threading.local):
  """The root stream of one thread; see `Streams`.

  Attributes:
    stream: None until something is drawn.
    epoch, seeding: those of the streams when it was opened.
    ordinal: the number of the thread, and the seeding since which it counts.
    restored: replacement of the seed by `Streams.restore`, and its seeding.
  """

  stream: RngStream | None = None
  epoch = seeding = -1
  ordinal: tuple[int, int] = (-1, -1)
  restored: tuple[RootSeed | None, int] = (None, -1)


_numbers = itertools.count()
_all: "weakref.WeakSet[Streams]" = weakref.WeakSet()


def every() -> "list[Streams]":
  """The streams of all environments."""
  return sorted(_all, key=lambda owner: owner.number)


def are_several() -> bool:
  """Whether this process has more than one environment."""
  return len(_all) > 1


class Streams:
  """The root streams of an environment, on all threads.

  Args:
    seed: in [-2**63, 2**64); by default that of torch's own generator, as it is at the
      first draw.
    impl: PRNG implementation.
    by_site: draws are addressed by the modules that make them.

  Attributes:
    number: tells it from others in this process.
    impl, by_site: see above.

  Raises:
    SeedError, ValueError: not a seed, or not an implementation.
  """

  def __init__(
    self,
    seed: int | None = None,
    impl: str = rng_state.DEFAULT_IMPL,
    by_site: bool = False,
  ):
    self.impl = rng_state.check_impl(impl)
    self._seed = None if seed is None else rng_state.check_seed(seed)
    self.number = next(_numbers)
    self._lock = threading.Lock()
    # Threads compare their epoch with this one, and their seeding.
    self._epoch = self._seedings = 0
    self._ordinals = itertools.count(1)
    self._root = _Root()
    self.by_site = False
    if by_site:
      self.address_by_site(True)
    _all.add(self)

  @property
  def seed(self) -> int:
    """The seed; until one is set, that of torch's own default generator."""
    with self._lock:
      if self._seed is None:
        self._seed = torch.initial_seed()
      return self._seed

  def reseed(self, seed: int, impl: str | None = None) -> None:
    """Starts the streams of all threads over; this thread is number 0.

    Raises:
      SeedError, ValueError: not a seed, or not an implementation; nothing is changed.
    """
    if impl is not None:
      rng_state.check_impl(impl)
    rng_state.check_seed(seed)
    with self._lock:
      self._seed = int(seed)
      self.impl = impl or self.impl
      self._seedings += 1
      self._epoch += 1
      self._ordinals = itertools.count(1)
      self._root.ordinal = (0, self._seedings)

  def address_by_site(self, on: bool) -> None:
    """Sets how draws are addressed; roots go on from a fresh key."""
    with self._lock:
      if on == self.by_site:
        return
      self.by_site = on
      self._epoch += 1
      if on:
        active_functions.following.hold_for(self)
      else:
        active_functions.following.release(self)

  def root(self) -> RngStream:
    """The root stream of this thread."""
    root = self._root
    if root.epoch != self._epoch:
      self._follow(root)
    assert root.stream is not None
    return root.stream

  def _follow(self, root: _Root) -> None:
    """Opens, re-seeds or re-addresses the root stream of this thread.

    May run while JAX is tracing: the root belongs to no trace, so its key must be
    computed outside of any.
    """
    epoch, seeding = self._epoch, self._seedings
    with jax_compat.outside_of_traces():
      if root.seeding != seeding:
        state = self.addressed(root_state(self.root_seed()))
        if root.stream is None:
          root.stream = RngStream(state)
          root.stream.owner, root.stream.lock = None, FREE
        else:
          root.stream.reseed(state)
      elif root.stream is not None and root.stream.by_site != self.by_site:
        root.stream.reseed(self.addressed(RngState(root.stream.rebase())))
        active_functions.following.update()
    root.epoch, root.seeding = epoch, seeding

  def is_unopened(self) -> bool:
    """True if the root of this thread is only a seed so far."""
    return self._root.seeding != self._seedings

  def root_seed(self) -> RootSeed:
    """The start of the root of this thread."""
    restored, seeding = self._root.restored
    if restored is not None and seeding == self._seedings:
      return restored
    return self.seed % (1 << 64), self._ordinal(), self.impl

  def restore(self, root_seed: RootSeed) -> None:
    """Makes the root of this thread start from a given seed."""
    root = self._root
    root.restored = (root_seed, self._seedings)
    root.epoch = root.seeding = -1

  def _ordinal(self) -> int:
    root = self._root
    with self._lock:
      if root.ordinal[1] != self._seedings:
        is_main = threading.current_thread() is threading.main_thread()
        is_first = is_main and not self._seedings
        root.ordinal = (0 if is_first else next(self._ordinals), self._seedings)
      return root.ordinal[0]

  def addressed(self, state: RngState) -> RngState:
    """A new state, addressed as this environment addresses draws."""
    return dataclasses.replace(state, sites={}) if self.by_site else state
