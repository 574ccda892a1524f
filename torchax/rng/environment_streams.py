"""Random streams of one environment: its seed, and a root stream per thread.

The key of a root depends on the seed and the number of its thread: 0 for the thread
that set the seed, then 1, 2, … in the order of their first draw. So a seed also
determines the draws of other threads. Scopes override the roots (`scope.py`).
"""

import dataclasses
import functools
import itertools
import threading
import weakref

import torch

from torchax.compat import jax_compat
from torchax.compat.torch_compat import active_functions
from torchax.rng import state as rng_state
from torchax.rng.state import RngState
from torchax.rng.stream import RngStream

RootSeed = tuple[int, int, str]
"""Start of a root stream: seed in [0, 2**64), number of the thread, implementation.

Seeding and `torch.random.fork_rng` must not initialize JAX's backend, which reserves a
GPU's memory, in code that uses no jax tensor. So the key is computed at the first draw.
"""


def root_state(root_seed: RootSeed) -> RngState:
  """Return the state at the start of a root stream."""
  seed, ordinal, impl = root_seed
  key = rng_state.key_from_seed(seed, impl)
  return RngState(rng_state.thread_key(key, ordinal), 0)


class _Root(threading.local):
  """Root stream of one thread; see `Streams`.

  Attributes:
    stream: the stream; None until the first draw.
    epoch, seeding: epoch and number of seedings of the `Streams` when it was opened.
    ordinal: number of the thread, and the seeding for which it is valid.
    restored: root seed set by `Streams.restore`, and the seeding for which it is valid.
  """

  stream: RngStream | None = None
  epoch = seeding = -1
  ordinal: tuple[int, int] = (-1, -1)
  restored: tuple[RootSeed | None, int] = (None, -1)


_numbers = itertools.count()
# By number. Unlike that of `weakref.WeakSet`, its length costs no call of Python.
_all: "dict[int, weakref.ref[Streams]]" = {}


def all_streams() -> "list[Streams]":
  """Return the streams of all environments."""
  alive = [reference() for reference in list(_all.values())]
  return [owner for owner in alive if owner is not None]


def are_several() -> bool:
  """Return True if this process has more than one environment."""
  return len(_all) > 1


class Streams:
  """Root streams of an environment, on all threads.

  Args:
    seed: an int in [-2**63, 2**64); default: the seed of torch's default generator at
      the first draw.
    impl: PRNG implementation.
    by_site: address draws by the modules that make them.

  Attributes:
    number: unique number in this process.
    impl, by_site: see above.

  Raises:
    SeedError, ValueError: invalid seed or PRNG implementation.
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
    # The root of a thread is stale if its epoch or seeding differs from these.
    self._epoch = self._seedings = 0
    self._ordinals = itertools.count(1)
    self._root = _Root()
    self.by_site = False
    if by_site:
      self.address_by_site(True)
    _all[self.number] = weakref.ref(self, functools.partial(_all.pop, self.number))

  @property
  def seed(self) -> int:
    """Seed; until one is set, the seed of torch's default generator."""
    with self._lock:
      if self._seed is None:
        self._seed = torch.initial_seed()
      return self._seed

  def reseed(self, seed: int, impl: str | None = None) -> None:
    """Re-seed the root streams of all threads; this thread gets number 0.

    Raises:
      SeedError, ValueError: invalid seed or PRNG implementation; nothing is changed.
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
    """Turn addressing by site on or off; roots continue from a fresh key."""
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
    """Return the root stream of this thread."""
    root = self._root
    if root.epoch != self._epoch:
      self._follow(root)
    assert root.stream is not None
    return root.stream

  def _follow(self, root: _Root) -> None:
    """Open this thread's root stream, or update its seed or addressing.

    The root belongs to no trace. So its key is computed outside of traces, even if JAX
    is tracing.
    """
    epoch, seeding = self._epoch, self._seedings
    with jax_compat.outside_of_traces():
      if root.seeding != seeding:
        state = self.with_addressing(root_state(self.root_seed()))
        if root.stream is None:
          root.stream = RngStream(state)
          root.stream.owner = None
        else:
          root.stream.reseed(state)
      elif root.stream is not None and root.stream.by_site != self.by_site:
        root.stream.reseed(self.with_addressing(RngState(root.stream.rebase())))
        active_functions.following.update()
    root.epoch, root.seeding = epoch, seeding

  def is_unopened(self) -> bool:
    """Return True if the root of this thread has no draws since the last seed."""
    return self._root.seeding != self._seedings

  def root_seed(self) -> RootSeed:
    """Return the start of this thread's root stream."""
    restored, seeding = self._root.restored
    if restored is not None and seeding == self._seedings:
      return restored
    return self.seed % (1 << 64), self._ordinal(), self.impl

  def restore(self, root_seed: RootSeed) -> None:
    """Set the start of this thread's root stream."""
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

  def with_addressing(self, state: RngState) -> RngState:
    """Return a new state with this environment's addressing of draws."""
    return dataclasses.replace(state, sites={}) if self.by_site else state
