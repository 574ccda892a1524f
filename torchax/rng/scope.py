"""Which stream is current: a stack of scopes on each thread.

The bottom of a stack is the thread's root stream, derived from the process-wide seed
and the thread's ordinal. `rng_scope` is the primitive on which every boundary is built.
"""

import contextlib
import dataclasses
import itertools
import struct
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import torch

from torchax.errors import RngError, SeedError
from torchax.rng import running, sites
from torchax.rng import state as rng_state
from torchax.rng.root_seed import RootSeed
from torchax.rng.state import RngState
from torchax.rng.stream import RngStream


class _Root:
  """What the roots of all threads start from.

  Attributes:
    epoch: grows with every change, so that the threads notice it.
    seedings: grows with every new seed.
    impl: PRNG implementation.
    by_site: whether draws are addressed by the place that makes them.
  """

  def __init__(self):
    self.lock = threading.Lock()
    self.epoch = 0
    self.seedings = 0
    self.impl = rng_state.DEFAULT_IMPL
    self.by_site = False
    self._seed = None
    self._ordinals = itertools.count(1)

  @property
  def seed(self) -> int:
    """The seed; until one is set here, that of torch's own default generator."""
    with self.lock:
      if self._seed is None:
        self._seed = torch.initial_seed()
      return self._seed

  def reseed(self, seed: int, impl: str | None) -> None:
    if impl is not None:
      rng_state.check_impl(impl)
    rng_state.check_seed(seed)
    with self.lock:
      self._seed = int(seed)
      self.impl = impl or self.impl
      self.seedings += 1
      self.epoch += 1

  def address_by_site(self, on: bool) -> None:
    with self.lock:
      if on != self.by_site:
        follow = running.following
        (follow.hold if on else follow.release)()
      self.by_site = on
      self.epoch += 1

  def ordinal(self) -> int:
    """0 for the main thread; the others count from 1 in the order of first use."""
    if threading.current_thread() is threading.main_thread():
      return 0
    with self.lock:
      return next(self._ordinals)


_root = _Root()


class _Local(threading.local):
  """The streams of one thread, and the epoch for which its root was seeded."""

  def __init__(self):
    self.ordinal = _root.ordinal()
    self.epoch = self.seeding = -1
    self.stack: list[RngStream] = []
    # What `restore` put in place of the process-wide seed, and after which seeding.
    self.restored: RootSeed | None = None
    self.restored_seeding = -1


_local = _Local()


def current() -> RngStream:
  """The stream that operations on this thread draw from."""
  stack = _local.stack
  if len(stack) > 1:
    return stack[-1]
  if _local.epoch != _root.epoch:
    _follow_root()
  return _local.stack[0]


def stack() -> list[RngStream]:
  """This thread's streams, from the root to the current one."""
  current()
  return _local.stack


def _follow_root() -> None:
  """Opens, re-seeds or re-addresses the root stream of this thread.

  May run while JAX is tracing: the root belongs to no trace, so its key must be
  computed outside of any.
  """
  epoch, seeding = _root.epoch, _root.seedings
  with jax.ensure_compile_time_eval():
    if _local.seeding != seeding or not _local.stack:
      state = _by_site(_root_seed().state())
      if _local.stack:
        _local.stack[0].restart(state)
      else:
        _local.stack.append(RngStream.on_host(state))
    else:
      _local.stack[0].address_by_site(_root.by_site)
  _local.epoch, _local.seeding = epoch, seeding


def _root_seed() -> RootSeed:
  if _local.restored is not None and _local.restored_seeding == _root.seedings:
    return _local.restored
  return RootSeed(_root.seed, _local.ordinal, _root.impl)


def _by_site(state: RngState) -> RngState:
  """A new state, addressed as this process addresses draws."""
  return dataclasses.replace(state, sites={}) if _root.by_site else state


def address_by(mode: str) -> None:
  """Says what decides which number a draw gets, for all threads.

  "order", the default: the number of draws before it. "site": the path of the modules
  that make the draw ("encoder.layers.3.dropout") and the number of draws made there
  before. Then putting in another dropout layer, or exchanging two of them, changes no
  other layer's numbers. Both obey the same laws; a path costs some microseconds a
  draw. Streams go on from a fresh key, so that no number repeats.

  A state that was saved keeps its mode. Draws outside of modules share one site. Calls
  of modules are followed from now on, so say it before the model runs; for methods that
  are called by their own name see `inside`.

  Raises:
    ValueError: another mode.
  """
  if mode not in ("order", "site"):
    raise ValueError(f'Draws are addressed by "order" or by "site", but got {mode!r}.')
  if (mode == "site") != _root.by_site:
    _root.address_by_site(mode == "site")


def addressed_by() -> str:
  """How draws are addressed: "order" or "site"."""
  return "site" if _root.by_site else "order"


# A traced state has no value; what stands for it is good in its compiled function only.
_TICKET = b"torchax-mark-1\0"
_TICKET_BODY = struct.Struct("<Q")


def _is_unopened() -> bool:
  """True where the current stream is a root that is only a seed so far."""
  return len(_local.stack) <= 1 and _local.seeding != _root.seedings


def snapshot() -> torch.Tensor:
  """The state of the current stream as a uint8 tensor, for `restore`.

  A root stream that was not drawn from stays unopened: no JAX backend is started.
  Inside a compiled function the tensor is a mark that `restore` knows there alone.
  """
  if _is_unopened() and not _root.by_site:
    return _root_seed().to_tensor()
  stream = current()
  if stream.is_traced:
    ticket = _TICKET + _TICKET_BODY.pack(stream.mark())
    return torch.frombuffer(bytearray(ticket), dtype=torch.uint8)
  tensor = stream.state.to_tensor()
  if stream.by_site:
    _saved_in.keep(tensor, sites.here())
  return tensor


class _SavedIn:
  """Which modules ran when a state was saved, as long as its tensor is there."""

  def __init__(self):
    self._modules: dict[int, tuple] = {}

  def keep(self, state: torch.Tensor, modules: tuple) -> None:
    """Remembers the modules for a state; None among them is a boundary."""
    place = id(state)
    reference = weakref.ref(state, lambda _: self._modules.pop(place, None))
    references = [
      module if module is None else weakref.ref(module) for module in modules
    ]
    self._modules[place] = (reference, references)

  def find(self, state: torch.Tensor) -> tuple | None:
    """The modules; None if they are not known or not there any more."""
    reference, references = self._modules.get(id(state), (None, ()))
    if reference is None or reference() is not state:
      return None
    modules = [None if module is None else module() for module in references]
    return tuple(modules) if modules.count(None) == references.count(None) else None


_saved_in = _SavedIn()


def restore(tensor: torch.Tensor) -> None:
  """Makes the current stream go on where `snapshot` was called.

  Raises:
    SeedError: not a uint8 tensor.
    ValueError: not a state, a damaged one, or one from inside another compiled
      function. The stream stays as it was.
  """
  root_seed = RootSeed.from_tensor(tensor)
  mark = _marked(tensor)
  if root_seed is not None:
    _require_impl(root_seed.impl)
  if mark is not None:
    current().return_to(mark)
  elif root_seed is None:
    state = RngState.from_tensor(tensor)
    stream = current()
    _require_impl(state.impl)
    stream.reseed(state)
    if state.sites is not None:
      stream.return_below(_saved_in.find(tensor))
  elif len(_local.stack) > 1:
    current().reseed(_by_site(root_seed.state()))
  else:
    _local.restored, _local.restored_seeding = root_seed, _root.seedings
    _local.epoch = _local.seeding = -1


def _require_impl(impl: str) -> None:
  """Raises ValueError unless it is the PRNG implementation of the current stream."""
  ours = _root.impl if _is_unopened() else current().state.impl
  if impl != ours:
    raise ValueError(
      f"The state was saved from a stream of {impl}, but the current one uses {ours}. "
      f"Make the environment with `Configuration(prng_impl={impl!r})`, or draw inside "
      "`with env.rng_scope(RngState.from_tensor(state)):`."
    )


def _marked(tensor: torch.Tensor) -> int | None:
  """The mark that a tensor stands for; None for other tensors."""
  if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.uint8:
    return None
  payload = bytes(tensor.tolist())
  if not payload.startswith(_TICKET):
    return None
  return _TICKET_BODY.unpack(payload[len(_TICKET) :])[0]


@contextlib.contextmanager
def rng_scope(value: Any) -> Iterator[RngStream]:
  """Draws from `value` inside the block; the outer stream resumes after it.

  Args:
    value: an `RngState`, a typed key, raw key data, a seed, or an `RngStream` (a
      fork, for example), which then advances.

  Yields:
    The stream of the block.

  Raises:
    SeedError: `value` is none of these; the outer stream stays current.
  """
  current()  # the root must be below
  owned = not isinstance(value, RngStream)
  stack = _local.stack
  stream = RngStream(_new_state(value), "scope") if owned else value
  if stream.log is None:
    stream.log = stack[-1].log
  # Where draws are numbered in their order, nobody knows what runs around the scope.
  begins = stream.by_site and not (stack[-1].by_site or _root.by_site)
  depth = len(stack)
  stack.append(stream)
  try:
    with running.alone() if begins else contextlib.nullcontext():
      yield stream
  finally:
    # A scope that was left open may end late, when others stand in its place.
    if len(stack) > depth and stack[depth] is stream:
      del stack[depth:]
    if owned:
      stream.close()


@contextlib.contextmanager
def continued() -> Iterator[None]:
  """Draws inside the block go on in a trace that is nested in the current one's.

  For a backward pass that is traced apart from its forward pass: a part of the forward
  pass may be run again in it, with the state that was saved before.

  Raises:
    RngError: the block has moved the stream, which nothing would bring back.
  """
  stream = current()
  if not stream.is_traced:
    yield
    return
  inner = stream.nested()
  with rng_scope(inner):
    yield
  if inner.draws != stream.draws:
    raise RngError(
      "The backward pass of a compiled function draws numbers of its own. Draw them in "
      "the forward pass, or differentiate inside of the compiled function."
    )


def _new_state(value) -> RngState:
  """A state for a scope: a given one as it is, one made of a key as the others are."""
  if isinstance(value, RngState):
    return value
  return _by_site(rng_state.as_state(value, _root.impl))


def manual_seed(seed, impl: str | None = None) -> None:
  """Re-seeds every thread's root stream, or the stream of the current scope.

  Inside a scope or a compiled function only the current stream is re-seeded; a
  compiled function hands the new state to its caller when it returns.

  Args:
    seed: an int in [-2**63, 2**64), a 0-d integer tensor, or a typed key.
    impl: PRNG implementation; by default the one in use.

  Raises:
    SeedError: any other type; nothing is changed.
  """
  if isinstance(seed, bool | float):
    raise SeedError(f"A seed is an integer, but got {type(seed).__name__}: {seed!r}.")
  if len(_local.stack) <= 1 and _is_integer(seed):
    _root.reseed(int(seed), impl)
  else:
    stream = current()
    state = RngState(rng_state.as_key(seed, impl or _root.impl), 0)
    stream.reseed(dataclasses.replace(state, sites={}) if stream.by_site else state)


def _is_integer(seed) -> bool:
  """True for an int and for a 0-d tensor or array of integers."""
  if isinstance(seed, torch.Tensor):
    whole = not (seed.is_floating_point() or seed.is_complex())
    return whole and not seed.dim() and seed.dtype is not torch.bool
  return isinstance(seed, int | np.integer)


def initial_seed() -> int:
  """The seed of the root streams."""
  return _root.seed


def default_impl() -> str:
  """The PRNG implementation of the root streams."""
  return _root.impl
