"""Stream of draws: the only mutable holder of a random state.

A draw advances a counter in Python; samplers derive its key by `fold_in`. `scope.py`
returns the current stream; `counter.py` addresses draws by site.
"""

import contextlib
import copy
import threading
import weakref

import jax

from torchax.compat import jax_compat
from torchax.errors import ClosedScopeError, TracedDrawError
from torchax.rng import ledger
from torchax.rng import state as rng_state
from torchax.rng.counter import Counter, DrawOperands, counter_of
from torchax.rng.state import RngState

FREE = contextlib.nullcontext()
"""Lock of a stream that only one thread draws from."""


def _owner_here() -> weakref.ref | None:
  """Return a weak reference to the current trace; None on the host."""
  trace = jax_compat.draw_owner()
  return None if trace is None else weakref.ref(trace)


class RngStream:
  """Source of keys from a state, in order.

  A stream belongs to the trace in which it was created, or to none on the host. Drawing
  from it inside another trace raises, because the number would become a constant of
  that trace.

  Args:
    state: start of the stream.
    label: name in ledgers.

  Attributes:
    counter: key and number of draws.
    draws: draws since the stream was opened, including those before a re-seed.
    reseeded: True if the key has changed since the stream was opened.
    label: name in ledgers.
    log: log of the function being traced; None on the host.
    environment: number of the environment, if the stream is an operand.
    owner: weak reference to the trace that the stream belongs to; None on the host.
    lock: lock to take for a draw. Threads with a copied context share a scope's stream.
    marks: positions saved in a trace; see `snapshots.py`.

  >>> stream = RngStream(RngState.from_seed(7))
  >>> with torchax.rng_scope(stream):
  ...   x = torch.rand(3, device="jax") + torch.rand(3, device="jax")
  >>> stream.draws
  2
  """

  def __init__(self, state: RngState, label: str = ""):
    self.counter: Counter = counter_of(state)
    self.draws = 0
    self.reseeded = False
    self.label = label
    self.log: list | None = None
    self.environment: int | None = None
    self.owner = _owner_here()
    self.lock: contextlib.AbstractContextManager = threading.RLock()
    self.marks: dict[int, tuple] = {}
    self._is_closed = False

  @property
  def state(self) -> RngState:
    """State before the next draw.

    >>> RngStream(RngState.from_seed(7)).state
    RngState(threefry2x32, key=0:7, count=0)
    """
    return self.counter.state

  @property
  def by_site(self) -> bool:
    """True if draws are addressed by the modules that make them."""
    return self.counter.by_site

  @property
  def is_traced(self) -> bool:
    """True if the key or the count is traced."""
    return self.counter.is_traced

  def peek(self, name: str = "a draw") -> DrawOperands:
    """Return key and number of operation `name`'s draw; then call `advance(1)`.

    Raises:
      ClosedScopeError: the scope of this stream has ended.
      TracedDrawError: the stream does not belong to the current trace.
    """
    self.check(name)
    return self.counter.next()

  def advance(self, draws: int) -> None:
    """Count draws made with the operands of `peek`."""
    self.draws += draws
    self.counter.advance(draws)

  def advance_past(self, draws: int, path: str | None = None) -> None:
    """Advance past draws of a compiled call; with `path`, those of one site only."""
    self.draws += draws if path is None else 0
    self.counter.advance_past(draws, path)

  def record_draw(self, op, distribution="", result=None, arguments=None) -> None:
    """Record one draw and advance; `ledger.record` describes the arguments."""
    if ledger.Recording.count or self.log is not None:
      ledger.record(self, op, distribution, result, arguments)
    self.advance(1)

  def next_key(self, name: str = "a draw") -> jax.Array:
    """Advance by one draw and return its key.

    Args:
      name: name of the draw in ledgers and errors.

    Returns:
      A typed key.

    Raises:
      ClosedScopeError: the scope of this stream has ended.
      TracedDrawError: the stream does not belong to the current trace.

    >>> stream = RngStream(RngState.from_seed(7))
    >>> bool(stream.next_key() == stream.next_key()), stream.state.count
    (False, 2)
    """
    with self.lock:
      key, count = self.peek(name)
      self.record_draw(name)
    return rng_state.fold_in(key, count)

  def record(self) -> contextlib.AbstractContextManager[ledger.Ledger]:
    """Return a context with a `Ledger` of this thread's or task's draws, any stream.

    >>> stream = RngStream(RngState.from_seed(7))
    >>> with stream.record() as ledger:
    ...   key = stream.next_key("a key for flax")
    >>> ledger[0].op, ledger[0].index
    ('a key for flax', 0)
    """
    return ledger.recording()

  def fork(self, name: str) -> "RngStream":
    """Return an independent stream, named after its purpose; do not advance.

    Args:
      name: purpose of the new stream; streams with one name have the same numbers.

    >>> stream = RngStream(RngState.from_seed(7))
    >>> with torchax.rng_scope(stream.fork("augmentation")):
    ...   noise = torch.rand(3, device="jax")
    >>> stream.state.count
    0
    """
    self.check("a fork")
    return RngStream(self.state.fork(name))

  def reseed(self, state: RngState) -> None:
    """Continue from another state.

    Args:
      state: the new state; draws of the stream start over from it.

    Raises:
      ClosedScopeError: the scope of this stream has ended.
      TracedDrawError: the stream does not belong to the current trace.

    >>> stream = RngStream(RngState.from_seed(7))
    >>> stream.reseed(RngState.from_seed(8))
    >>> stream.state
    RngState(threefry2x32, key=0:8, count=0)
    """
    self.check("a re-seed")
    counter = counter_of(state)
    counter.replayed, self.counter = self.counter.replayed, counter
    self.reseeded = True

  def rebase(self) -> jax.Array:
    """Return a fresh key and continue the stream with it.

    Without draws since the last key, return that key.
    """
    self.check("reading the key")
    key, count = self.counter.position()
    if self.counter.has_counted:
      key = rng_state.rebase_key(key, count)
      self.reseed(RngState(key, 0, {} if self.by_site else None))
    return key

  def nest(self) -> "RngStream":
    """Return a copy for a trace nested in the owner, with the marks made so far."""
    inner = copy.copy(self)
    inner.counter, inner.marks = self.counter.copy(), dict(self.marks)
    inner.owner, inner.lock = _owner_here(), FREE
    return inner

  def close(self) -> None:
    """End the stream: any further draw raises ClosedScopeError."""
    self._is_closed = True

  def check(self, name: str) -> None:
    """Raise unless `name` may use this stream in the current trace."""
    if self._is_closed or self.owner is not None or not jax_compat.is_top_level():
      _require_owner(self.owner, self._is_closed, name)

  def __repr__(self):
    return f"RngStream({self.state!r}{', closed' if self._is_closed else ''})"


def _require_owner(owner: weakref.ref | None, is_closed: bool, name: str) -> None:
  """Raise unless operation `name` may use a stream of `owner` in the current trace."""
  if is_closed:
    raise ClosedScopeError(
      f"{name} used a random stream after its scope had closed. Draw inside the "
      "`with env.rng_scope(...)` block, or take `env.rng` anew for the current "
      "stream."
    )
  trace = jax_compat.draw_owner()
  if trace is (None if owner is None else owner()):
    return
  if trace is None:
    raise ClosedScopeError(
      f"{name} used the stream of a compiled function outside of that function."
    )
  if jax_compat.is_batching(trace):
    raise TracedDrawError(
      f"{name} inside a raw `jax.vmap` would give every row the same numbers. Say "
      'what rows draw: `torchax.interop.jax_vmap(f, randomness="different")` or '
      '"same"; or give each row its key: `jax.vmap(lambda key, x: jax_view(f)(x, '
      "rng=key))(keys, x)`, with `keys = jax.random.split(key, rows)`."
    )
  raise TracedDrawError(
    f"{name} inside a raw JAX transformation ({type(trace).__name__}) would bake its "
    "key into the traced function and repeat the same numbers. Carry the key as an "
    "operand instead: (1) use the wrapper in torchax.interop (jax_jit, "
    "gradient_checkpoint, scan, cond, …) in place of the raw JAX transformation; "
    "(2) pass the key: `jax_view(f)(..., rng=key)`, with `key` an argument of the "
    "transformed function; or (3) draw inside `with env.rng_scope(key):`."
  )
