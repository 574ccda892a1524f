"""A stream: the one mutable holder of a random state.

Draws only advance a counter in Python; samplers derive keys from it by `fold_in`.
`scope.py` knows which stream is current, `sites.py` addresses draws by site.
"""

import contextlib
import copy
import threading

import jax

from torchax.compat import jax_compat
from torchax.rng import ledger, ownership, sites
from torchax.rng import state as rng_state
from torchax.rng.counter import Counter, DrawOperands
from torchax.rng.state import RngState

FREE = contextlib.nullcontext()
"""Lock of a stream that no other thread draws from."""


class RngStream:
  """Draws keys from a state, in order.

  A stream belongs to the trace in which it was made: its scope's compiled function,
  or none on the host. Drawing from it inside another trace raises, because the number
  would be baked into that trace.

  Attributes:
    counter: key and number of draws.
    draws: draws since the stream was opened, whatever it was re-seeded to.
    reseeded: whether the key is another than the one the stream was opened with.
    label: name in ledgers.
    log: records of the function being traced; None on the host.
    environment: number of the environment, if a compiled function carries the stream.
    owner: trace that the stream belongs to; None on the host.
    lock: held during a draw. Threads with a copied context share a scope's stream.
    marks: positions saved in a trace; see `snapshots.py`.
  """

  def __init__(self, state: RngState, label: str = ""):
    self.counter: Counter = sites.counter_of(state)
    self.draws = 0
    self.reseeded = False
    self.label = label
    self.log: list | None = None
    self.environment: int | None = None
    self.owner = ownership.owner_here()
    self.lock: contextlib.AbstractContextManager = threading.RLock()
    self.marks: dict[int, tuple] = {}
    self._is_closed = False

  @property
  def state(self) -> RngState:
    """The state before the next draw."""
    return self.counter.state

  @property
  def by_site(self) -> bool:
    """True if draws are addressed by the modules that make them."""
    return self.counter.by_site

  @property
  def is_traced(self) -> bool:
    """True if key or count have no value yet."""
    return self.counter.is_traced

  def peek(self, name: str = "a draw") -> DrawOperands:
    """Key and number of the next draw; `advance(1)` follows when it has succeeded.

    Args:
      name: the operation, for error messages.

    Raises:
      ClosedScopeError: the scope of this stream has ended.
      TracedDrawError: a trace that this stream does not belong to is in progress.
    """
    self.check(name)
    return self.counter.next()

  def advance(self, draws: int) -> None:
    """Counts draws that were made with the operands of `peek`."""
    self.draws += draws
    self.counter.advance(draws)

  def advance_past(self, draws: int, path: str | None = None) -> None:
    """Advances past the draws of a compiled call; with `path`, of one site only."""
    self.draws += draws if path is None else 0
    self.counter.advance_past(draws, path)

  def draw(self, op, distribution="", result=None, arguments=None) -> None:
    """Advances by one draw; `ledger.record` describes the arguments."""
    if ledger.Recording.count or self.log is not None:
      ledger.record(self, op, distribution, result, arguments)
    self.advance(1)

  def next_key(self, name: str = "a draw") -> jax.Array:
    """Advances by one draw and returns its key."""
    with self.lock:
      key, count = self.peek(name)
      self.draw(name)
    return rng_state.fold_in(key, count)

  def record(self) -> contextlib.AbstractContextManager[ledger.Ledger]:
    """Context with a `Ledger` of all draws of this thread or task, of any stream."""
    return ledger.recording()

  def fork(self, name: str) -> "RngStream":
    """An independent stream named after its purpose; this one does not advance."""
    self.check("a fork")
    return RngStream(self.state.fork(name))

  def reseed(self, state: RngState) -> None:
    """Starts over at a state."""
    self.check("a re-seed")
    counter = sites.counter_of(state)
    counter.replayed, self.counter = self.counter.replayed, counter
    self.reseeded = True

  def rebase(self) -> jax.Array:
    """A key for the rest of the stream, which goes on from it.

    Without draws since the last key this is the key itself.
    """
    self.check("reading the key")
    key, count = self.counter.position()
    if self.counter.has_counted:
      key = rng_state.rebased_key(key, count)
      self.reseed(RngState(key, 0, {} if self.by_site else None))
    return key

  def nested(self) -> "RngStream":
    """This stream for a trace inside its own; it knows the marks made so far."""
    inner = copy.copy(self)
    inner.counter, inner.marks = self.counter.copy(), dict(self.marks)
    inner.owner, inner.lock = ownership.owner_here(), FREE
    return inner

  def close(self) -> None:
    """Ends the stream: any further draw raises ClosedScopeError."""
    self._is_closed = True

  def check(self, name: str) -> None:
    """Raises unless `name` may use this stream in the trace in progress."""
    if self._is_closed or self.owner is not None or not jax_compat.is_top_level():
      ownership.require(self.owner, self._is_closed, name)

  def __repr__(self):
    return f"RngStream({self.state!r}{', closed' if self._is_closed else ''})"
