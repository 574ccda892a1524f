"""The streams of a compiled function: a bundle, by names, which every boundary carries.

A stream is that of an environment, that of a site in it (where draws are addressed by
site), or a `torch.Generator`. A name says whose it is. On the host it finds the
caller's stream, and says where that stands; in the trace it is the place of the stream
among the operands. `Carried` (`carry.py`) puts the two together.
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from torchax.rng import ledger, scope, sites
from torchax.rng import state as rng_state
from torchax.rng.advance import Advance, Move, Seeding
from torchax.rng.counter import Counter, DrawOperands
from torchax.rng.draw import Draw
from torchax.rng.generator import words_of_shard
from torchax.rng.generator_draws import GeneratorSlot, take_words
from torchax.rng.state import RngState
from torchax.rng.stream import FREE, RngStream
from torchax.rng.streams import Streams

# Operands -----------------------------------------------------------------------------


class Position(NamedTuple):
  """Where a stream stands, as operands.

  Attributes:
    source: its key; of a generator, uint32 (draws, 2), the words of its next draws.
    count: draws made so far; of a generator, words that are used up.
  """

  source: jax.Array
  count: Any = None  # type: ignore[assignment]  # tuples have such a method

  def shard(self, index) -> "Position":
    """The position of one shard of many, whose number may be traced."""
    return self._replace(source=rng_state.shard_key(self.source, index))

  def start(self, key: jax.Array) -> "Position":
    """The first position with a key."""
    return type(self)(key, jax.numpy.uint32(0))


class SitedPosition(Position):
  """The position of an environment's stream whose draws are addressed by site."""

  __slots__ = ()


class Words(Position):
  """The position of a generator."""

  __slots__ = ()

  def shard(self, index) -> "Words":
    return self._replace(source=words_of_shard(self.source, index))


# The operands of a function, in the order of its names. A stream of which the caller
# has none has no position.
Operands = tuple[Position | tuple | None, ...]


def moved(rng: Operands, draws: Sequence) -> Operands:
  """Operands after draws of each stream, which may be traced numbers."""
  return at(rng, counts_after(counts_of(rng), draws))


def counts_of(rng: Operands) -> list:
  """The counts of the operands, as they are carried through a loop."""
  counts = [0 if p is None or p[1] is None else p[1] for p in rng]
  return [jax.numpy.asarray(count, jax.numpy.uint32) for count in counts]


def counts_after(counts: Sequence, draws: Sequence) -> list:
  """The counts after draws of each stream; a stream without any stays where it is."""
  none = [0] * (len(counts) - len(draws))
  return [
    count if isinstance(n, int) and not n else count + n
    for count, n in zip(counts, (*draws, *none))
  ]


def at(rng: Operands, counts: Sequence) -> Operands:
  """Operands of the same streams at other counts."""
  return tuple([p and as_position(p)._replace(count=n) for p, n in zip(rng, counts)])


def shard(rng: Operands, index) -> Operands:
  """The operands of one shard of many."""
  return tuple([position and as_position(position).shard(index) for position in rng])


def children(names: "Sequence[Name]", rng: Operands, keys: dict) -> Operands:
  """Operands of streams that start with keys of their own.

  Args:
    names: of the streams.
    rng: their operands.
    keys: of the environments' children, by the owner in the name; those of which
      nothing is drawn have none.
  """
  return tuple(
    [
      position and name.child(as_position(position), keys)
      for name, position in zip(names, rng)
    ]
  )


def as_position(position: Position | tuple) -> Position:
  """A position that came as a plain tuple, which a call takes in quicker."""
  return position if isinstance(position, Position) else Position(*position)


# Names --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OfEnvironment:
  """The current stream of an environment; without owner, of the one that is on."""

  owner: Streams | None = None

  def position(self, draws: int, asker: str) -> Position:
    """Where the caller's stream stands."""
    stream = scope.current(self.owner)
    key, count = stream.next()
    kind = SitedPosition if stream.by_site else Position
    return kind(key, _as_operand(count))

  def advance(self, draws: int) -> None:
    """Moves the caller's stream."""
    scope.current(self.owner).pass_over(draws)

  def child(self, position: Position, keys: dict) -> Position:
    """The first position of a stream with the key that its environment has."""
    return position.start(keys.get(self.owner, position.source))


@dataclasses.dataclass(frozen=True)
class OfSite:
  """A site in the current stream of an environment; below the caller's own site."""

  owner: Streams | None
  path: str

  def _find(self) -> tuple[RngStream, str]:
    stream = scope.current(self.owner)
    return stream, ledger.join(stream.caller_path(), self.path)

  def position(self, draws: int, asker: str) -> Position | None:
    stream, path = self._find()
    if not stream.by_site:
      return None
    key, count = stream.site(path).next()
    return Position(key, _as_operand(count))

  def advance(self, draws: int) -> None:
    stream, path = self._find()
    stream.pass_over(draws, path)

  def child(self, position: Position, keys: dict) -> Position:
    key = keys.get(self.owner)
    named = position.source if key is None else rng_state.named_key(key, self.path)
    return position.start(named)


class OfGenerator:
  """A `torch.Generator`, also where torch has wrapped it anew."""

  owner = None

  def __init__(self, generator: torch.Generator):
    self.generator = generator

  def __eq__(self, other):
    if not isinstance(other, OfGenerator):
      return False
    first, second = self.generator, other.generator
    return first is second or first._cdata == second._cdata

  def __hash__(self):
    return hash(self.generator._cdata)

  def position(self, draws: int, asker: str) -> Words:
    return Words(take_words(self.generator, draws, asker))

  def advance(self, draws: int) -> None:
    """It has advanced when its words were taken."""

  def child(self, position: Position, keys: dict) -> Position:
    return position


Name = OfEnvironment | OfSite | OfGenerator


def _as_operand(count):
  return np.uint32(count) if type(count) is int else count


# In the trace -------------------------------------------------------------------------


class CarriedStream(RngStream):
  """The stream of an environment in a traced function."""

  __slots__ = ("_bundle", "name")

  def __init__(self, bundle: "Bundle", name: OfEnvironment, position: Position):
    is_by_site = isinstance(position, SitedPosition)
    counts: dict | None = {} if is_by_site else None
    super().__init__(RngState(position.source, position.count, counts))
    self.log, self.held = bundle.log, FREE
    self.environment = (name.owner or scope.streams_on()).number
    self._bundle, self.name = bundle, name

  def _path(self) -> str:
    # After a re-seed nothing is left of the caller's stream, and no operand is needed.
    return sites.path(self._replayed, from_boundary=not self._reseeded)

  def site(self, path: str) -> Counter:
    assert self._sites is not None
    if not self._reseeded and path not in self._sites:
      key = rng_state.named_key(self._key, path)
      self._sites.add(path, Counter(key, np.uint32(0)))  # stands in for it
      self._bundle.missing.append(OfSite(self.name.owner, path))
    return self._sites[path]

  def add_site(self, path: str, position: Position) -> None:
    """A site that has operands."""
    assert self._sites is not None
    self._sites.add(path, Counter(*position))

  def site_draws(self, path: str) -> int:
    """Draws of a site of the caller's."""
    if self._reseeded or self._sites is None:
      return 0
    return self._sites.draws.get(path, 0)

  def _noted_operands(self, draw: Draw) -> DrawOperands | None:
    # The caller knows the key, unless it was set here.
    return super()._noted_operands(draw) if self._reseeded else None


class Bundle:
  """The streams of a function in its trace; `scope.carrying` makes them current.

  Args:
    names: of the streams that are operands.
    rng: their operands.
    limits: how many draws of each generator are for this call.

  Attributes:
    missing: names of streams that were met and are no operands yet.
    log: the draws, for ledgers.
    slots: the generators.
  """

  def __init__(self, names: Sequence[Name], rng: Operands, limits: Mapping[Name, int]):
    self.missing: list[Name] = []
    self.log: list = []
    self.slots: dict[Name, GeneratorSlot] = {}
    self._names = tuple(names)
    self._streams: dict[Streams, CarriedStream] = {}
    self._on = scope.streams_on()
    self._around = scope.all_here()
    for name, position in zip(names, rng):
      if position is not None:
        self._open(name, as_position(position), limits.get(name, 0))

  def _open(self, name: Name, position: Position, limit: int) -> None:
    if isinstance(name, OfGenerator):
      words, used = position
      self.slots[name] = GeneratorSlot(name.generator, words, used, limit)
      return
    owner = name.owner or self._on
    if isinstance(name, OfEnvironment):
      # The environment that is on may have a name of its own, from another call.
      if owner not in self._streams:
        self._streams[owner] = CarriedStream(self, name, position)
    elif self._streams[owner].name.owner is name.owner:
      self._streams[owner].add_site(name.path, position)

  def stream(self, owner: Streams) -> CarriedStream:
    """The stream of an environment, known or new."""
    found = self._streams.get(owner)
    if found is None:
      name = OfEnvironment(owner)
      self.missing.append(name)
      found = self._streams[owner] = CarriedStream(self, name, self._stand_in(owner))
      # It is this trace's, also where a nested one asks for it first.
      found.belong_with(next(iter(self._streams.values())))
    return found

  def _stand_in(self, owner: Streams) -> Position:
    outer = scope.current_of(owner, self._around)
    kind = SitedPosition if outer.by_site else Position
    return kind(rng_state.key_from_seed(0, owner.impl), np.uint32(0))

  def slot(self, generator: torch.Generator) -> GeneratorSlot:
    """The slot of a generator, known or new."""
    name = OfGenerator(generator)
    found = self.slots.get(name)
    if found is None:
      self.missing.append(name)
      found = self.slots[name] = GeneratorSlot(generator)
    return found

  @property
  def owners(self) -> list[Streams]:
    """The environments whose streams have been met."""
    return list(self._streams)

  @property
  def is_traced(self) -> bool:
    """Always: a bundle is that of a trace."""
    return True

  @property
  def draws(self) -> int:
    """Draws made from the environments' streams."""
    return sum(stream.draws for stream in self._streams.values())

  def check(self, name: str) -> None:
    """Raises unless `name` may use these streams in the trace in progress."""
    next(iter(self._streams.values())).check(name)

  def nested(self) -> "Bundle":
    """This bundle for a trace inside its own; see `RngStream.nested`."""
    inner = copy.copy(self)
    inner._streams = {owner: s.nested() for owner, s in self._streams.items()}
    return inner

  def advance(self) -> Advance | None:
    """What the function has done to the streams of its caller; None for nothing."""
    names = (*self._names, *dict.fromkeys(self.missing))
    moves = tuple(map(self._move, names))
    seedings, keys = [], []
    for place, name in enumerate(names):
      stream = self._own_stream(name)
      if stream is not None and stream.reseeded:
        if not isinstance(stream.state.count, int):
          stream.rebase()
        state = stream.state
        by_site = None if state.sites is None else tuple(state.sites.items())
        seedings.append(Seeding(place, state.count, by_site))
        keys.append(state.key)
    return Advance(moves, tuple(self.log), tuple(seedings), tuple(keys)).or_none()

  def _own_stream(self, name: Name) -> CarriedStream | None:
    """The stream whose name this is."""
    if not isinstance(name, OfEnvironment):
      return None
    stream = self._streams.get(name.owner or self._on)
    return stream if stream is not None and stream.name == name else None

  def _move(self, name: Name) -> Move:
    if isinstance(name, OfGenerator):
      return Move(None, None, self.slots[name].draws if name in self.slots else 0)
    owner = name.owner or self._on
    stream = self._own_stream(OfEnvironment(name.owner))
    if isinstance(name, OfSite):
      return Move(
        owner.number, name.path, stream.site_draws(name.path) if stream else 0
      )
    return Move(owner.number, None, stream.draws if stream else 0)

  def close(self) -> None:
    """Ends the streams."""
    for stream in self._streams.values():
      stream.close()
