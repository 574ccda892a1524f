"""A stream: the one mutable holder of a random state.

Draws only move a Python counter; keys are derived by `fold_in` where the numbers are
sampled. Where streams live and which one is current is in `scope.py`.
"""

import contextlib
import copy
import dataclasses
import itertools
import threading
import weakref
from collections.abc import Iterator

import jax

from torchax.compat import jax_compat
from torchax.errors import ClosedScopeError, TracedDrawError
from torchax.rng import ledger, running, sites
from torchax.rng import state as rng_state
from torchax.rng.counter import Counter, DrawOperands
from torchax.rng.draw import Draw
from torchax.rng.ledger import Ledger
from torchax.rng.sites import SiteTable
from torchax.rng.state import RngState

_WAYS_OUT = (
  "Carry the key as an operand instead: (1) use the wrapper in torchax.interop "
  "(jax_jit, gradient_checkpoint, scan, cond, …) in place of the raw JAX "
  "transformation; (2) pass the key: "
  "`jax_view(f)(..., rng=key)`, with `key` an argument of the transformed function; "
  "or (3) draw inside `with env.rng_scope(key):`."
)


_marks = itertools.count()
# What no other thread draws from needs no lock.
FREE = contextlib.nullcontext()


class RngStream(Counter):
  """Draws keys from a state, in order.

  A stream belongs to the trace in which it was made: its scope's compiled function,
  or none for a stream on the host. Drawing from it inside another trace raises,
  because the number would be baked into that trace.
  """

  __slots__ = (
    *("_owner", "_closed", "_draws", "_reseeded"),
    *("_places", "_sites", "_site", "_replayed", "log", "label", "environment"),
    "held",
  )

  def __init__(self, state: RngState, label: str = ""):
    self._owner = _weak(jax_compat.draw_owner())
    self._closed = False
    self._draws = 0
    self._places: dict[int, tuple] = {}
    self._replayed: sites.Replay | None = None
    # Where draws are noted while a function is traced; its scope sets this.
    self.log: list | None = None
    self.label = label
    # The number of the environment, where a compiled function carries the stream.
    self.environment: int | None = None
    # Around a draw: threads with a copied context may draw from one scope at once.
    self.held: contextlib.AbstractContextManager = threading.RLock()
    self._set(state)
    self._reseeded = False

  @classmethod
  def root(cls, state: RngState) -> "RngStream":
    """The stream of one thread, which belongs to no trace, also when one goes on."""
    stream = cls(state)
    stream._owner, stream.held = None, FREE
    return stream

  def _set(self, state: RngState) -> None:
    """Starts over at a state."""
    self._start(state.key, state.count)
    self._sites = None if state.sites is None else SiteTable(self._key, state.sites)
    self._site = ""
    self._reseeded = True

  @property
  def state(self) -> RngState:
    """The state before the next draw."""
    counts = None if self._sites is None else self._sites.counts()
    return RngState(*self.next(), counts)

  @property
  def by_site(self) -> bool:
    """True where draws are addressed by the place that makes them."""
    return self._sites is not None

  def progress(self, path: str | None = None) -> int:
    """Draws since the key was set or carried in: in all, or those of a site."""
    if path is None or self._sites is None:
      return self._count
    return self._sites.progress(path)

  @property
  def draws(self) -> int:
    """Draws made since the stream was opened, whatever it was re-seeded to."""
    return self._draws

  def peek(self, name: str = "a draw") -> DrawOperands:
    """The operands of the next draw; `advance(1)` follows when it has succeeded.

    Args:
      name: the operation, for error messages.

    Raises:
      ClosedScopeError: the scope of this stream has ended.
      TracedDrawError: a trace that this stream does not belong to is in progress.
    """
    self.check_now(name)
    if self._sites is not None:
      self._site = self._path()
      return self.site(self._site).next()
    if self._base is None:
      return DrawOperands(self._key, self._count)
    return self.next()

  def _path(self) -> str:
    return sites.path(self._replayed)

  def caller_path(self) -> str:
    """What the sites of a function that is called now are below of."""
    return self._path()

  def site(self, path: str) -> Counter:
    """The draws of a site."""
    assert self._sites is not None, "a stream whose draws are not addressed by site"
    return self._sites[path]

  def operands_of(self, draw: Draw) -> DrawOperands:
    """The operands of a draw by its number, or by its number at its site."""
    if draw.turn is None or self._sites is None:
      return DrawOperands(self._key, draw.index)
    return self._sites.operands(draw.site, draw.turn)

  def next_key(self, name: str = "a draw") -> jax.Array:
    """Advances by one draw and returns its key."""
    with self.held:
      operands = self.peek(name)
      self.draw(name)
    return rng_state.fold_in(operands.key, operands.count)

  def draw(
    self, op, distribution: str = "", result=None, arguments: tuple | None = None
  ) -> None:
    """Advances by the draw that was made with the operands of `peek`.

    Args:
      op: the operation, for ledgers.
      distribution: its parameters.
      result: array or arrays that were drawn.
      arguments: of the operation, as `arguments.noted` gives them.
    """
    if ledger.Recording.count or self.log is not None:
      turn, site = None, self._site
      if self._sites is None:
        site = self._path()
      else:
        turn = self._sites.progress(site)
      where = {"stream": self.label, "turn": turn, "arguments": arguments}
      draw = Draw.of(self._count, op, site, distribution, result, **where)
      draw = dataclasses.replace(draw, environment=self.environment)
      ledger.note(self.log, draw, self._noted_operands(draw))
    self.advance(1)

  def _noted_operands(self, draw: Draw) -> DrawOperands | None:
    """The operands of a draw; None where the caller knows them."""
    return self.operands_of(draw)

  def advance(self, draws: int) -> None:
    """Counts draws that were made with the operands of `peek`."""
    if self._sites is not None:
      self._sites.advance(self._site, draws)
    self.pass_over(draws)

  def pass_over(self, draws: int, path: str | None = None) -> None:
    """Counts draws made elsewhere: all of them, or again those of a site."""
    if path is not None:
      if self._sites is not None:
        self._sites.advance(path, draws)
      return
    self._draws += draws
    if self._sites is None:
      self.step(draws)
    elif draws:  # sites have counts of their own; this one tells that there are any
      self._count = (self._count + draws - 1) % (rng_state.REKEY_AT - 1) + 1

  def _no_sites(self) -> dict | None:
    return None if self._sites is None else {}

  @contextlib.contextmanager
  def record(self) -> Iterator[Ledger]:
    """Notes every draw of this thread or task inside the block, of whatever stream.

    Yields:
      The ledger: a table, rows, a picture, and a search for keys used twice.
    """
    opened = ledger.start()
    try:
      yield opened
    finally:
      ledger.stop(opened)

  def reseed(self, state: RngState) -> None:
    """Starts over at a state, in the trace that this stream belongs to."""
    self.check("a re-seed")
    self._set(state)

  def restart(self, state: RngState) -> None:
    """`reseed` of a stream on the host, whatever is being traced meanwhile."""
    self._set(state)

  def rebase(self) -> jax.Array:
    """A key that stands for the rest of the stream, which goes on from it.

    Without draws since the last key this is the key itself.
    """
    self.check("reading the key")
    return self._rebased()

  def _rebased(self) -> jax.Array:
    if self._count or self._base is not None:
      current = self.state
      key = rng_state.rebased_key(current.key, current.count)
      self._set(RngState(key, 0, self._no_sites()))
    return self._key

  def address_by_site(self, on: bool) -> None:
    """Addresses draws by site or by order, from a fresh key on: no number repeats."""
    if on != self.by_site:
      # Also in a trace that the stream has no part in: only the key is made anew.
      self._rebased()
      self._sites = SiteTable(self._key, {}) if on else None
      running.following.settle()

  def fork(self, name: str) -> "RngStream":
    """An independent stream named after its purpose; this one does not advance."""
    self.check("a fork")
    return RngStream(self.state.fork(name))

  @property
  def reseeded(self) -> bool:
    """True when the key is another than the one the stream was opened with."""
    return self._reseeded

  @property
  def is_traced(self) -> bool:
    """True where key or count have no value yet."""
    return isinstance(self._key, jax.core.Tracer) or self._base is not None

  def mark(self) -> int:
    """Remembers where the stream stands; the number is for `return_to`.

    For traced streams, whose state cannot be written down. After a return it is as if
    the draws in between had not been made: a recomputation repeats them.
    """
    self.check("saving the random state")
    table = None if self._sites is None else self._sites.copy()
    numbers = (self._key, self._count, self._base, self._draws)
    place = (*numbers, self._reseeded, table)
    mark = next(_marks)
    self._places[mark] = (place, sites.here())
    return mark

  def return_to(self, mark: int) -> None:
    """Goes on from where `mark` was called.

    Raises:
      ValueError: the mark is another stream's.
    """
    self.check("restoring the random state")
    place = self._places.get(mark)
    if place is None:
      raise ValueError(
        "This random state was saved inside a compiled function, where it has no "
        "value, and is restored outside of it. Save and restore on the same side."
      )
    (*numbers, table), modules = place
    self._replayed = sites.replay(modules)
    self._key, self._count, self._base, self._draws = numbers[:-1]
    self._reseeded = numbers[-1]
    self._sites = None if table is None else table.copy()

  def return_below(self, modules: tuple | None) -> None:
    """Sites are below these modules again, as when the state was saved."""
    self._replayed = sites.replay(modules)

  def pass_over_farthest(self, branches: "list[RngStream]") -> None:
    """Counts the draws of branches of which one is run: of the one that draws most.

    Args:
      branches: this stream as it was left in each branch, `nested`.
    """
    before = {} if self._sites is None else dict(self._sites.draws)
    farthest: dict[str, int] = {}
    for branch in branches:
      for path, n in ({} if branch._sites is None else branch._sites.draws).items():
        farthest[path] = max(n - before.get(path, 0), farthest.get(path, 0))
    for path, n in farthest.items():
      self.pass_over(n, path)
    self.pass_over(max(branch._draws for branch in branches) - self._draws)

  def nested(self) -> "RngStream":
    """This stream for a trace inside its own; it knows the places marked so far."""
    inner = copy.copy(self)
    inner._owner = _weak(jax_compat.draw_owner())
    inner._places, inner.held = dict(self._places), FREE
    if self._sites is not None:
      inner._sites = self._sites.copy()
    return inner

  def belong_with(self, other: "RngStream") -> None:
    """Belongs to the trace of another stream."""
    self._owner = other._owner

  def close(self) -> None:
    """Ends the stream: any further draw raises ClosedScopeError."""
    self._closed = True

  def __repr__(self):
    status = ", closed" if self._closed else ""
    return f"RngStream({self.state!r}{status})"

  def check_now(self, name: str) -> None:
    """`check`, quick where no function is being traced."""
    if self._closed or self._owner is not None or not jax_compat.is_top_level():
      self.check(name)

  def check(self, name: str) -> None:
    """Raises unless `name` may use this stream in the trace in progress."""
    if self._closed:
      raise ClosedScopeError(
        f"{name} used a random stream after its scope had closed. Draw inside the "
        "`with env.rng_scope(...)` block, or take `env.rng` anew for the current "
        "stream."
      )
    trace = jax_compat.draw_owner()
    if trace is (None if self._owner is None else self._owner()):
      return
    if trace is None:  # a traced stream outside of its trace: its scope has leaked
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
      "key into the traced function and repeat the same numbers. " + _WAYS_OUT
    )


def _weak(trace):
  return None if trace is None else weakref.ref(trace)
