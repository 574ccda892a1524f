"""Current stream: the one of the innermost scope, else the root stream of the thread.

Scopes are in a context variable, so each thread and each task has its own. `rng_scope`
opens one; every boundary is built on it. A scope belongs to an environment, which has a
root stream per thread (`environment_streams.py`). Without an `owner`, functions here
use the active environment.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from torchax.compat.torch_compat import active_functions
from torchax.errors import RngError, SeedError
from torchax.rng import environment_streams
from torchax.rng import state as rng_state
from torchax.rng.environment_streams import Streams
from torchax.rng.state import RngState
from torchax.rng.stream import RngStream

# A scope: its environment's streams and its stream; or None and the `StreamOperands` of
# a function being traced, which have a stream for every environment.
_Scope = tuple[Streams | None, Any]
_scopes: ContextVar[tuple[_Scope, ...]] = ContextVar("scopes", default=())

default_streams = Streams()
"""Streams of the default environment."""


class _Environments:
  streams_on: Callable[[], Streams] = staticmethod(lambda: default_streams)


def find_streams_by(streams_on: Callable[[], Streams]) -> None:
  """Set the function that returns the streams of the active environment."""
  _Environments.streams_on = staticmethod(streams_on)


def streams_on() -> Streams:
  """Return the streams of the active environment."""
  return _Environments.streams_on()


def current(owner: Streams | None = None) -> RngStream:
  """Return the stream that operations of an environment now draw from.

  Args:
    owner: streams of the environment; default: those of the active one.

  Returns:
    The stream of the innermost scope, else the root stream of the thread.

  >>> with rng_scope(0):
  ...   current().state
  RngState(threefry2x32, key=0:0, count=0)
  """
  owner = owner or _Environments.streams_on()
  scopes = _scopes.get()
  return current_of(owner, scopes) if scopes else owner.root()


def current_of(owner: Streams, scopes: "tuple[_Scope, ...]") -> RngStream:
  """Return the stream that an environment draws from inside these scopes."""
  for scope_owner, stream in reversed(scopes):
    if scope_owner is owner:
      return stream
    if scope_owner is None:
      return stream.stream(owner)
  return owner.root()


def all_here() -> "tuple[_Scope, ...]":
  """Return the scopes of this thread or task, outermost first."""
  return _scopes.get()


def operands_here():
  """Return the `StreamOperands` of the function being traced; None on the host."""
  return next((s for owner, s in reversed(_scopes.get()) if owner is None), None)


def owners_here() -> list[Streams]:
  """Return the environments that `snapshot` and `restore` cover here."""
  operands = operands_here()
  return environment_streams.all_streams() if operands is None else operands.owners


def has_scope(owner: Streams) -> bool:
  """Return True if the current stream of an environment is not its root stream."""
  return any(scope_owner in (owner, None) for scope_owner, _ in _scopes.get())


@contextlib.contextmanager
def drawing_from(operands) -> Iterator[None]:
  """Draw from these `StreamOperands` in the block, and close them at its end."""
  scope = (None, operands)
  _scopes.set((*_scopes.get(), scope))
  try:
    yield
  finally:
    _leave(scope)
    operands.close()


def address_by(mode: str) -> None:
  """Set the addressing of draws, in all environments and threads.

  "order", the default: a draw's numbers depend on the number of draws before it.
  "site": they depend on the path of the modules that draw ("encoder.layers.3.dropout")
  and on the number of earlier draws there. So adding or exchanging dropout layers
  changes no other layer's numbers. A path costs some microseconds per draw. Streams
  continue with a fresh key, so no number repeats.

  A saved state keeps its mode. Draws outside of modules share one site. Calls of
  modules are followed from now on, so call this before the model runs. For methods
  called by their own name see `inside`.

  Args:
    mode: "order" or "site".

  Raises:
    ValueError: any other mode.

  >>> address_by("order")  # the default
  >>> addressed_by()
  'order'
  """
  by_site = is_by_site(mode)
  for owner in environment_streams.all_streams():
    owner.address_by_site(by_site)


def is_by_site(mode: str) -> bool:
  """Return True for "site", False for "order"; raise ValueError for any other mode."""
  if mode not in ("order", "site"):
    raise ValueError(f'address_by expects "order" or "site", but got {mode!r}.')
  return mode == "site"


def addressed_by() -> str:
  """Return the addressing of draws: "order" or "site".

  >>> addressed_by()
  'order'
  """
  return "site" if streams_on().by_site else "order"


@contextlib.contextmanager
def rng_scope(value: Any, owner: Streams | None = None) -> Iterator[RngStream]:
  """Draw from `value` inside the block; the outer stream resumes after it.

  The scope belongs to its thread and task. A task that starts inside it draws from it
  too, and so does a thread with a copied context (`asyncio.to_thread`).

  Args:
    value: an `RngState`, a typed key, raw key data, a seed, or an `RngStream` (for
      example a fork), which then advances. Or a `StatefulPRNG` of JAX or an
      `nnx.Rngs`, which gives one key.
    owner: the environment whose draws; default: the active one.

  Yields:
    The stream of the block.

  Raises:
    SeedError: `value` has another type; the outer stream stays current.
    RngError: at the end of the block an inner scope is still open, for example in
      interleaved generators. Draws since came from the wrong stream.

  >>> with rng_scope(7) as stream:
  ...   x = torch.rand(3, device="jax")
  >>> stream.draws
  1
  >>> with rng_scope(7):
  ...   torch.equal(torch.rand(3, device="jax"), x)
  True
  """
  owner = owner or streams_on()
  outer = current(owner)
  owned = not isinstance(value, RngStream)
  if owned and not isinstance(value, RngState):
    value = owner.with_addressing(rng_state.as_state(value, owner.impl))
  stream = RngStream(value, "scope") if owned else value
  if stream.log is None:
    stream.log = outer.log
  # Outside of the scope calls of modules are not followed, so paths start at it.
  begins = stream.by_site and not (outer.by_site or owner.by_site)
  scope = (owner, stream)
  _scopes.set((*_scopes.get(), scope))
  try:
    with active_functions.outside_modules() if begins else contextlib.nullcontext():
      yield stream
  except BaseException:
    _leave(scope)
    raise
  else:
    if not _leave(scope):
      raise RngError(
        "A random scope ends while another one that began inside of it is still open, "
        "as where generators that hold scopes take turns. What was drawn since came "
        "from the inner one. Close the generator first, or give each draw its stream: "
        "`stream = env.rng.fork(name)`, and `with env.rng_scope(stream):` around the "
        "draws alone, without a `yield` inside."
      )
  finally:
    if owned:
      stream.close()


def _leave(scope: _Scope) -> bool:
  """Remove a scope; return False if an inner one of its environment is still open.

  A scope may end late, in another task or after an outer scope has removed it.
  """
  scopes = _scopes.get()
  index = next((n for n, other in enumerate(scopes) if other is scope), None)
  if index is None:
    return True
  _scopes.set(scopes[:index])
  return not any(owner is scope[0] for owner, _ in scopes[index + 1 :])


@contextlib.contextmanager
def using_enclosing() -> Iterator[None]:
  """Use the traced streams in a trace nested in theirs.

  For a backward pass that is traced apart from its forward pass. It may recompute a
  part of the forward pass, with a state saved there.

  Raises:
    RngError: the block has advanced a stream; the caller could not learn of it.
  """
  outer = _scopes.get()
  inner = tuple([(owner, s.nest() if s.is_traced else s) for owner, s in outer])
  token = _scopes.set(inner)
  try:
    yield
  finally:
    _scopes.reset(token)
  if [s.draws for _, s in outer if s.is_traced] != [
    s.draws for _, s in inner if s.is_traced
  ]:
    raise RngError(
      "The backward pass of a compiled function draws numbers of its own. Draw them in "
      "the forward pass, or differentiate inside of the compiled function."
    )


def manual_seed(
  seed: Any, impl: str | None = None, owner: Streams | None = None
) -> None:
  """Re-seed the root streams of all threads, or the stream of the current scope.

  Inside a scope or a compiled function only the current stream is re-seeded. A
  compiled function returns the new state to its caller.

  Args:
    seed: an int in [-2**63, 2**64), a 0-d integer tensor, or a typed key.
    impl: PRNG implementation; default: the current one.
    owner: the environment; default: all environments, or in a scope those that have a
      scope.

  Raises:
    SeedError: any other type of seed; nothing is changed.

  >>> with rng_scope(0):
  ...   manual_seed(1)
  ...   current().state
  RngState(threefry2x32, key=0:1, count=0)
  """
  if isinstance(seed, bool | float):
    raise SeedError(
      f"Expected an integer seed, but got {type(seed).__name__}: {seed!r}."
    )
  if owner is None:
    inside = [owner for owner, _ in _scopes.get() if owner is not None]
    owners = inside or [streams_on(), *environment_streams.all_streams()]
  else:
    owners = [owner]
  for each in dict.fromkeys(owners):
    if _is_integer(seed) and not has_scope(each):
      each.reseed(int(seed), impl)
    else:
      stream = current(each)
      key = rng_state.as_key(seed, impl or each.impl)
      stream.reseed(RngState(key, 0, {} if stream.by_site else None))


def _is_integer(seed) -> bool:
  """Return True for an int and for a 0-d integer tensor."""
  if isinstance(seed, torch.Tensor):
    whole = not (seed.is_floating_point() or seed.is_complex())
    return whole and not seed.dim() and seed.dtype is not torch.bool
  return isinstance(seed, int | np.integer)


def initial_seed() -> int:
  """Return the seed of the root streams, an int in [-2**63, 2**64).

  >>> manual_seed(7)
  >>> initial_seed()
  7
  """
  return streams_on().seed


def default_impl() -> str:
  """Return the PRNG implementation of the root streams.

  >>> default_impl()
  'threefry2x32'
  """
  return streams_on().impl
