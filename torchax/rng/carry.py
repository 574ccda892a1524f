"""The one mechanism that takes a stream across a compiled boundary.

  pure = Carried(fn)            # pure(rng, *args, **kwargs) -> (out, advance)
  out = pure.run(jax.jit(pure), *args)

`rng` holds the key (`key<fry>[]`) and the count (`u32[]`) of the caller's stream as
operands, and integers for each `torch.Generator` the function draws with. `advance` is
how far the stream moved: static for a trace, so it has no output array and comes back
with every cached call without a device sync; a re-seed inside comes back as a leaf.

A generator is only met while tracing. The trace then finishes, is thrown away, and is
made anew with an operand for it (`NewOperands`).
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from torchax import _jax_compat
from torchax.errors import RngError, TracedDrawError
from torchax.rng import generator as generators
from torchax.rng import ledger, running, scope, sites
from torchax.rng import state as rng_state
from torchax.rng.draw import Draw, Repeated
from torchax.rng.sites import SiteTable
from torchax.rng.state import RngState
from torchax.rng.stream import DrawOperands, RngStream

_key_from_words = jax.jit(rng_state.key_from_words, static_argnums=1)


def _words_of_shard(words, index):
  def one(pair):
    key = rng_state.key_from_words(pair, rng_state.DEFAULT_IMPL)
    return jax.random.bits(rng_state.shard_key(key, index), (generators.WORDS,))

  return jax.vmap(one)(words)


class NewOperands(BaseException):
  """Ends a trace that met something it has no operand for yet; it is made anew.

  A BaseException, so that no `except Exception` of traced code keeps it.
  """


class RngOperands(NamedTuple):
  """The random part of a compiled function's arguments.

  Attributes:
    key: of the stream.
    count: draws made so far.
    words: uint32 (draws, 2) for each generator.
    sites: key and count of each site, where draws are addressed by site; else None.
    following: the key after this one, where the counts may run out; else None.
  """

  key: jax.Array
  count: Any
  words: tuple = ()
  sites: tuple | None = None
  following: jax.Array | None = None

  def moved(self, draws, by_site: tuple = ()) -> "RngOperands":
    """The operands after draws, which may be traced numbers."""
    places = self.sites
    if places is not None:
      places = tuple([(key, count + n) for (key, count), n in zip(places, by_site)])
    return self._replace(count=self.count + draws, sites=places)

  def at(self, count, sites) -> "RngOperands":
    """The operands of the same stream at other counts."""
    return self._replace(count=count, sites=sites)

  def child(self, key: jax.Array, paths: tuple[str, ...]) -> "RngOperands":
    """The operands of a stream that starts with a key of its own."""
    sites, zero = None, jax.numpy.uint32(0)
    if self.sites is not None:
      sites = tuple([(rng_state.named_key(key, path), zero) for path in paths])
    return RngOperands(key, zero, (), sites)

  def shard(self, index) -> "RngOperands":
    """The operands of one shard of many, whose number may be traced."""
    sites = self.sites
    if sites is not None:
      sites = tuple([(rng_state.shard_key(key, index), n) for key, n in sites])
    words = tuple([_words_of_shard(words, index) for words in self.words])
    key, following = rng_state.shard_key(self.key, index), self.following
    if following is not None:
      following = rng_state.rekeyed(key)
    return RngOperands(key, self.count, words, sites, following)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Advance:
  """What a traced function did to its stream.

  Attributes:
    draws: how many draws it made; static.
    count: draws since the re-seed, if there was one; static.
    words: draws with each generator, in the order of the operands; static.
    sites: paths and their draws; since the re-seed, if there was one; static.
    log: the draws, for ledgers; static.
    key: the key it was re-seeded with, else None; the only leaf.
  """

  draws: int
  count: int = 0
  words: tuple[int, ...] = ()
  sites: tuple[tuple[str, int], ...] | None = None
  log: tuple = ()
  key: jax.Array | None = None

  @classmethod
  def of(cls, stream: "CarriedStream") -> "Advance | None":
    """What happened to a stream since it was opened; None for nothing."""
    words = tuple(slot.draws for slot in stream.slots)
    log = tuple(stream.log)
    if not stream.reseeded:
      if not (stream.draws or words or log):
        return None
      by_site = tuple(stream.progress()[1].items()) if stream.by_site else None
      return cls(stream.draws, 0, words, by_site, log)
    if not isinstance(stream.state.count, int):
      stream.rebase()
    state = stream.state
    by_site = None if state.sites is None else tuple(state.sites.items())
    return cls(stream.draws, state.count, words, by_site, log, state.key)

  @property
  def moves(self) -> bool:
    """Whether anything was drawn."""
    return bool(self.draws or self.log or any(self.words))

  def repeated(self, times: int, label: str) -> "Advance | None":
    """What many turns do that each do this; None for nothing."""
    if not (self.moves and times):
      return None
    by_site = None
    if self.sites is not None:
      by_site = tuple([(path, n * times) for path, n in self.sites])
    log = (Repeated(self.log, times, self.draws, self.sites or (), label),)
    words = tuple([n * times for n in self.words])
    return Advance(self.draws * times, 0, words, by_site, log)

  def of_child(self, label: str) -> "Advance | None":
    """What the stream of a child does to its parent: nothing but to be noted."""
    if not (self.draws or self.log):
      return None
    return Advance(0, log=ledger.adopted(self.log, label))

  @classmethod
  def farthest(cls, advances: "list[Advance]") -> "Advance | None":
    """What a choice between branches does: as much as the one that does most."""
    if not any(advance.moves for advance in advances):
      return None
    by_site: dict[str, int] = {}
    for advance in advances:
      for path, n in advance.sites or ():
        by_site[path] = max(n, by_site.get(path, 0))
    n_words = max(len(a.words) for a in advances)
    words = [a.words + (0,) * (n_words - len(a.words)) for a in advances]
    log = [ledger.adopted(a.log, f"branch {n}") for n, a in enumerate(advances)]
    return cls(
      max(a.draws for a in advances),
      0,
      tuple(map(max, zip(*words))),
      None if all(a.sites is None for a in advances) else tuple(by_site.items()),
      tuple([entry for entries in log for entry in entries]),
    )

  def by_site(self, prefix: str = "") -> dict[str, int]:
    """Draws at each site, as the caller names them."""
    return {ledger.join(prefix, path): n for path, n in self.sites or ()}

  def tree_flatten(self):
    if self.key is None:
      return (), self
    return (self.key,), dataclasses.replace(self, key=None)

  @classmethod
  def tree_unflatten(cls, static, children):
    # Without a key the static part is the whole, the same object on every call.
    return dataclasses.replace(static, key=children[0]) if children else static


class GeneratorSlot:
  """A generator inside a trace: hands out traced words.

  Attributes:
    draws: how many draws were made.
    asked: for how many draws words were asked; more, if some were given back.
  """

  __slots__ = ("generator", "words", "draws", "asked", "_before")

  def __init__(self, generator: torch.Generator, words):
    self.generator = generator
    self.words = words
    self.draws = 0
    self.asked = 0
    self._before = generator.get_state()

  def take(self, draws: int):
    """Words of the generator's next draws; a stand-in while there are not enough."""
    start = self.draws
    self.draws += draws
    self.asked = max(self.asked, self.draws)
    if self.is_short or not draws:
      return np.zeros((draws, generators.WORDS), np.uint32)
    return self.words[start : self.draws]

  @property
  def is_short(self) -> bool:
    """True when words were asked for that are no operands yet."""
    return self.asked > (0 if self.words is None else self.words.shape[0])

  def require_untouched(self, name: str) -> None:
    """Raises RngError if the generator itself was changed during the trace."""
    if not torch.equal(self.generator.get_state(), self._before):
      self.restore()
      raise RngError(
        f"{name} seeds a torch.Generator, or draws from it on the CPU. That would "
        "happen while it is compiled and never again. Do it before the call."
      )

  def restore(self) -> None:
    """Puts the generator itself back to where it was when the slot was made."""
    self.generator.set_state(self._before)


class CarriedStream(RngStream):
  """The stream of a traced function; it also holds the function's generators."""

  __slots__ = ("slots", "_first_sites")

  def __init__(
    self,
    rng: RngOperands,
    paths: tuple[str, ...] = (),
    slots: tuple[GeneratorSlot, ...] = (),
  ):
    places = None if rng.sites is None else dict(zip(paths, rng.sites))
    counts = None if places is None else {p: n for p, (_, n) in places.items()}
    super().__init__(RngState(rng.key, rng.count, counts))
    self.following = rng.following
    if places is not None:
      self._sites = SiteTable(counts, {p: key for p, (key, _) in places.items()})
    # A re-seed replaces the table, and what the first one missed is still missing.
    self._first_sites = self._sites
    self.slots = list(slots)
    self.log = []

  def _path(self) -> str:
    # After a re-seed nothing is left of the caller's stream, and no operand is needed.
    return sites.path(self._replayed, from_boundary=not self._reseeded)

  def site_operands(self, path: str) -> DrawOperands:
    table = self._sites
    if not self._reseeded and path not in table.bases:
      table.missing.append(path)
      table.bases[path] = np.uint32(0)
      return DrawOperands(self.site_key(path), table.bases[path])
    return super().site_operands(path)

  def _noted_key(self):
    # The caller knows the key, unless it was set here.
    return super()._noted_key() if self._reseeded else None

  def slot(self, generator: torch.Generator) -> GeneratorSlot:
    """The slot of a generator, known or new."""
    for slot in self.slots:
      if same_generator(slot.generator, generator):
        return slot
    self.slots.append(GeneratorSlot(generator, None))
    return self.slots[-1]


def same_generator(first: torch.Generator, second: torch.Generator) -> bool:
  """True for the same generator, also where torch has wrapped it anew."""
  return first is second or first._cdata == second._cdata


class _Attempt(threading.local):
  """How this thread is tracing a function.

  Attributes:
    deferred: a trace that misses an operand is finished before it is made anew.
    asked: to be made anew.
  """

  deferred = False
  asked = False


def _once() -> int:
  return 1


class Carried:
  """A function whose random state is an operand; `pure` for any JAX transformation."""

  def __init__(self, function: Callable):
    self.function = function
    self.generators: list[tuple[torch.Generator, int]] = []
    # Places of the function that draw, where draws are addressed by site.
    self.sites: tuple[str, ...] = ()
    self._just_met: list[GeneratorSlot] = []
    self._attempt = _Attempt()
    # Key and count of the last call, and the operands made of them.
    self._last: tuple = (None, None, None)
    self.__name__ = getattr(function, "__name__", type(function).__name__)

  def __call__(self, rng: RngOperands, *args, **kwargs):
    """The pure function: `(rng, *args, **kwargs) -> (out, Advance or None)`."""
    rng = RngOperands(*rng)
    slots = tuple(
      GeneratorSlot(generator, words)
      for (generator, _), words in zip(self.generators, rng.words)
    )
    stream = CarriedStream(rng, self.sites, slots)
    with scope.rng_scope(stream), running.followed(), running.boundary():
      try:
        out = self.function(*args, **kwargs)
        advance = Advance.of(stream)
      finally:
        stream.close()
    self._require_sites(stream)
    self._require_words(stream.slots)
    for slot in stream.slots:
      slot.require_untouched(self.__name__)
    return out, advance

  def _require_sites(self, stream: CarriedStream) -> None:
    met = [] if stream._first_sites is None else stream._first_sites.missing
    if met:
      self.sites = tuple(dict.fromkeys((*self.sites, *met)))
      for slot in stream.slots:  # the function runs again, from the start
        slot.restore()
      self.retrace()

  def retrace(self) -> None:
    """Has the trace in progress made anew, since it lacks an operand.

    Raises:
      NewOperands: now, or where `deferring` ends.
    """
    if not self._attempt.deferred:
      raise NewOperands
    self._attempt.asked = True

  @contextlib.contextmanager
  def deferring(self) -> Iterator[None]:
    """Finishes traces inside the block that miss an operand.

    JAX keeps a trace that an exception leaves, if it has read an outer one's values.
    """
    attempt = self._attempt
    before = (attempt.deferred, attempt.asked)
    attempt.deferred, attempt.asked = True, False
    try:
      yield
      if attempt.asked:
        raise NewOperands
    finally:
      attempt.deferred, attempt.asked = before

  def _require_words(self, slots: list[GeneratorSlot]) -> None:
    if any(slot.is_short for slot in slots):
      self._require_old_generators(slots)
      known = [draws for _, draws in self.generators] + [0] * len(slots)
      self.generators = [
        (slot.generator, max(slot.asked, draws)) for slot, draws in zip(slots, known)
      ]
      for slot in slots:  # the function runs again, from the start
        slot.restore()
      self.retrace()
    else:
      self._just_met = []

  def _require_old_generators(self, slots: list[GeneratorSlot]) -> None:
    """Raises RngError if each trace meets other generators: it would never end."""
    met = [slot for slot in slots if slot.words is None]
    missed = [
      slot
      for slot in slots
      for earlier in self._just_met
      if same_generator(slot.generator, earlier.generator) and not slot.asked
    ]
    self._just_met = met
    if met and missed:
      gone = {id(slot.generator) for slot in missed}
      self.generators = [pair for pair in self.generators if id(pair[0]) not in gone]
      raise RngError(
        f"{self.__name__} makes a torch.Generator while it is compiled, which would be "
        "one generator for ever. Make it outside of the function."
      )

  def operands(self, times: int = 1) -> RngOperands | tuple:
    """The operands of the next call, taken from the current stream.

    Inside a raw JAX transformation they are good for a function that draws nothing
    only; `commit` raises for another.

    Args:
      times: how often the function is going to be run; generators give as many words.
    """
    stream = scope.current()
    try:
      stream.check_now(self.__name__)
    except TracedDrawError:
      if self.generators:
        raise
    key, count = stream.position()
    following = stream.following
    if type(count) is int and count >= rng_state.NEAR_THE_END:
      following = rng_state.rekeyed(key)
    if not self.generators and not stream.by_site and following is None:
      return self._plain_operands(key, count)
    if type(count) is int:
      count = np.uint32(count)
    words = tuple(
      [
        take_words(generator, n * times, self.__name__)
        for generator, n in self.generators
      ]
    )
    return RngOperands(key, count, words, self._site_operands(stream), following)

  def _site_operands(self, stream: RngStream) -> tuple | None:
    if not stream.by_site:
      return None
    prefix = stream.caller_path()
    found = [stream.site_operands(ledger.join(prefix, path)) for path in self.sites]
    return tuple([(key, np.uint32(n) if type(n) is int else n) for key, n in found])

  def _plain_operands(self, key, count) -> tuple:
    """Key and count as a plain tuple, which a call takes in quicker.

    A function that draws nothing is called again at the same place of the stream; it
    gets the same operands, with the count on the device.
    """
    if type(count) is not int:
      return (key, count)
    last_key, last_count, operands = self._last
    if last_key is not key or last_count != count:
      operands = (key, np.uint32(count))
    elif type(operands[1]) is np.uint32 and _jax_compat.is_top_level():
      operands = (key, jax.numpy.asarray(operands[1]))
    self._last = (key, count, operands)
    return operands

  def commit(self, advance: Advance | None) -> None:
    """Moves the current stream as far as the function did.

    Raises:
      TracedDrawError: the function drew inside a raw JAX transformation.
    """
    if advance is None:
      return
    stream = scope.current()
    if advance.draws and not _jax_compat.is_top_level():
      stream.check(self.__name__)
    if advance.log and (ledger.Recording.count or stream.log is not None):
      ledger.commit(stream.log, advance.log, stream)
    if advance.key is not None:
      by_site = None if advance.sites is None else advance.by_site()
      stream.reseed(RngState(advance.key, advance.count, by_site))
    elif advance.draws:
      stream.advance(
        advance.draws,
        advance.by_site(stream.caller_path()) if stream.by_site else None,
      )

  def run(
    self, transformed: Callable[[RngOperands], Any], times: Callable[[], int] = _once
  ):
    """Calls a transformed function with this thread's stream as its operands.

    Args:
      transformed: `RngOperands -> (out, Advance)`; called again where the trace met
        something that it has no operand for yet.
      times: tells how often it runs the function.

    Returns:
      `out`; the stream stands where the function left it, or, after an exception,
      where it stood before.
    """
    while True:
      places = [_Place(generator, self.__name__) for generator, _ in self.generators]
      try:
        out, advance = transformed(self.operands(times()))
        self.commit(advance)
      except BaseException as error:
        for place in places:
          place.restore()
        if isinstance(error, NewOperands):
          continue
        raise
      drawn = advance.words if advance is not None else ()
      for place, (_, n), used in zip(places, self.generators, drawn):
        if used < n * times():
          place.restore()
          place.skip(used)
      return out

  def try_abstractly(self, transformed: Callable[[RngOperands], Any]):
    """Like `run` for something that only traces: no stream, no generator advances."""
    while True:
      places = [_Place(generator, self.__name__) for generator, _ in self.generators]
      try:
        return transformed(self.operands())
      except NewOperands:
        continue
      finally:
        for place in places:
          place.restore()


def take_words(generator: torch.Generator, draws: int, name: str):
  """Key material for draws, from the generator or, in a trace, from its operand."""
  slot = _slot(generator, name)
  if slot is None:
    return generators.draw_words(generator, draws)
  return slot.take(draws)


def note_generator_draw(op, distribution: str, result, arguments, key) -> None:
  """Notes a draw with `generator=` in the ledgers that are open."""
  stream = scope.current()
  if not ledger.Recording.count and stream.log is None:
    return
  site = sites.path(from_boundary=stream.log is not None)
  where = {"stream": "generator", "arguments": arguments}
  draw = Draw.of(0, op, site, distribution, result, **where)
  ledger.note(stream.log, draw, key)


class _Place:
  """Where a generator stands, itself or in the trace in progress; to go back there."""

  __slots__ = ("generator", "slot", "before")

  def __init__(self, generator: torch.Generator, name: str):
    self.generator = generator
    self.slot = _slot(generator, name)
    self.before = generator.get_state() if self.slot is None else self.slot.draws

  def restore(self) -> None:
    """Leaves the generator as if nothing had been drawn since."""
    if self.slot is None:
      self.generator.set_state(self.before)
    else:
      self.slot.draws = self.before

  def skip(self, draws: int) -> None:
    """Advances the generator by some draws."""
    if self.slot is None:
      generators.draw_words(self.generator, draws)
    else:
      self.slot.draws += draws


def _slot(generator: torch.Generator, name: str) -> GeneratorSlot | None:
  """Where a generator's words come from in the trace in progress; None on the host.

  Raises:
    TracedDrawError: inside a raw JAX transformation, also with a key in `rng_scope`,
      since nothing carries the generator.
  """
  for stream in scope.streams_here():
    if isinstance(stream, CarriedStream):
      stream.check(name)
      return stream.slot(generator)
  scope.streams_on().root().check(name)
  return None


def generator_operands(generator: torch.Generator, name: str) -> DrawOperands:
  """Operands of one draw with `generator=`; the current stream does not advance."""
  generators.check_generator(generator)
  words = take_words(generator, 1, name)
  return DrawOperands(_key_from_words(words[0], scope.default_impl()), 0)
