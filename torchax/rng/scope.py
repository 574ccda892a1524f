"""Which stream is current: a stack of scopes on each thread.

The bottom of a stack is the thread's root stream, derived from the process-wide seed
and the thread's ordinal. `rng_scope` is the primitive on which every boundary is built.
"""

import contextlib
import itertools
import struct
import threading
from collections.abc import Iterator

import jax
import numpy as np
import torch

from torchax.errors import SeedError
from torchax.rng import state as rng_state
from torchax.rng.root_seed import RootSeed
from torchax.rng.state import RngState
from torchax.rng.stream import RngStream


class _Root:
  """The process-wide seed. `epoch` tells the threads that it has changed."""

  def __init__(self):
    self.lock = threading.Lock()
    self.epoch = 0
    self.impl = rng_state.DEFAULT_IMPL
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
    self.epoch = -1
    self.stack: list[RngStream] = []
    # What `restore` put in place of the process-wide seed, and for which epoch.
    self.restored: RootSeed | None = None
    self.restored_epoch = -1


_local = _Local()


def current() -> RngStream:
  """The stream that operations on this thread draw from."""
  stack = _local.stack
  if len(stack) > 1:
    return stack[-1]
  if _local.epoch != _root.epoch:
    _seed_root()
  return _local.stack[0]


def stack() -> list[RngStream]:
  """This thread's streams, from the root to the current one."""
  current()
  return _local.stack


def _seed_root() -> None:
  """Opens or re-seeds the root stream of this thread.

  May run while JAX is tracing: the root belongs to no trace, so its key must be
  computed outside of any.
  """
  epoch = _root.epoch
  with jax.ensure_compile_time_eval():
    state = _root_seed().state()
  if _local.stack:
    _local.stack[0].restart(state)
  else:
    _local.stack.append(RngStream.on_host(state))
  _local.epoch = epoch


def _root_seed() -> RootSeed:
  if _local.restored is not None and _local.restored_epoch == _root.epoch:
    return _local.restored
  return RootSeed(_root.seed, _local.ordinal, _root.impl)


# A traced state has no value; what stands for it is good in its compiled function only.
_TICKET = b"torchax-mark-1\0"
_TICKET_BODY = struct.Struct("<Q")


def snapshot() -> torch.Tensor:
  """The state of the current stream as a uint8 tensor, for `restore`.

  A root stream that was not drawn from stays unopened: no JAX backend is started.
  Inside a compiled function the tensor is a mark that `restore` knows there alone.
  """
  if len(_local.stack) <= 1 and _local.epoch != _root.epoch:
    return _root_seed().to_tensor()
  stream = current()
  if stream.is_traced:
    ticket = _TICKET + _TICKET_BODY.pack(stream.mark())
    return torch.frombuffer(bytearray(ticket), dtype=torch.uint8)
  return stream.state.to_tensor()


def restore(tensor: torch.Tensor) -> None:
  """Makes the current stream go on where `snapshot` was called.

  Raises:
    SeedError: not a uint8 tensor.
    ValueError: not a state, a damaged one, or one from inside another compiled
      function. The stream stays as it was.
  """
  root_seed = RootSeed.from_tensor(tensor)
  mark = _marked(tensor)
  if mark is not None:
    current().return_to(mark)
  elif root_seed is None:
    current().reseed(RngState.from_tensor(tensor))
  elif len(_local.stack) > 1:
    current().reseed(root_seed.state())
  else:
    _local.restored, _local.restored_epoch = root_seed, _root.epoch
    _local.epoch = -1


def _marked(tensor: torch.Tensor) -> int | None:
  """The mark that a tensor stands for; None for other tensors."""
  if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.uint8:
    return None
  payload = bytes(tensor.tolist())
  if not payload.startswith(_TICKET):
    return None
  return _TICKET_BODY.unpack(payload[len(_TICKET) :])[0]


@contextlib.contextmanager
def rng_scope(value) -> Iterator[RngStream]:
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
  stream = RngStream(rng_state.as_state(value, _root.impl)) if owned else value
  stack = _local.stack
  depth = len(stack)
  stack.append(stream)
  try:
    yield stream
  finally:
    # A scope that was left open may end late, when others stand in its place.
    if len(stack) > depth and stack[depth] is stream:
      del stack[depth:]
    if owned:
      stream.close()


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
    current().reseed(RngState(rng_state.as_key(seed, impl or _root.impl), 0))


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
