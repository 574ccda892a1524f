"""Random streams as operands of a compiled function, and what comes back of them.

  pure(values, *args) -> (out, advance)

`values` has one value for each stream: (key, count), key `key<fry>[]` and count
`u32[]`, with an empty dict behind them where draws are addressed by site; or (words,
used) of a `torch.Generator`. A stream that the caller does not have is None. `Advance`
says how far the function moved the streams. `keyed_function.py` makes the calls.
"""

import copy
import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax.errors import RngError
from torchax.rng import generator as generators
from torchax.rng import ledger, scope
from torchax.rng import state as rng_state
from torchax.rng.ledger import Repeated
from torchax.rng.sites import SiteCounter
from torchax.rng.state import RngState, is_typed_key
from torchax.rng.stream import FREE, RngStream
from torchax.rng.streams import Streams

Values = tuple[tuple | None, ...]
"""Values of the operands of a function, one for each stream."""


# Values -------------------------------------------------------------------------------


def counts_of(values: Values) -> list:
  """The counts among the values, as a loop carries them."""
  counts = [0 if v is None or v[1] is None else v[1] for v in values]
  return [jnp.asarray(count, jnp.uint32) for count in counts]


def counts_after(counts: Sequence, draws: Sequence) -> list:
  """The counts after draws of each stream; those of streams without draws are kept."""
  none = [0] * (len(counts) - len(draws))
  return [
    count if isinstance(n, int) and not n else count + n
    for count, n in zip(counts, (*draws, *none))
  ]


def with_counts(values: Values, counts: Sequence) -> Values:
  """Values of the same streams at other counts."""
  return tuple([v and (v[0], count, *v[2:]) for v, count in zip(values, counts)])


def advanced(values: Values, draws: Sequence) -> Values:
  """Values after draws of each stream, which may be traced numbers."""
  return with_counts(values, counts_after(counts_of(values), draws))


def of_shard(values: Values, index) -> Values:
  """Values for one shard of many, whose number may be traced."""
  return tuple([v and (_source_of_shard(v[0], index), *v[1:]) for v in values])


def _source_of_shard(source: jax.Array, index) -> jax.Array:
  if is_typed_key(source):
    return rng_state.shard_key(source, index)
  return generators.words_of_shard(source, index)


def _value(key: jax.Array, count, *by_site) -> tuple:
  return (key, np.uint32(count) if type(count) is int else count, *by_site)


# Operands -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class EnvironmentOperand:
  """Current stream of an environment; without owner, of the one that is on."""

  owner: Streams | None = None

  def read(self, times: int, name: str) -> tuple:
    """The value for the next call: where the caller's stream stands.

    Args:
      times: how often the call runs the function.
      name: of the function, for error messages.
    """
    stream = scope.current(self.owner)
    return _value(*stream.counter.position(), *([{}] if stream.by_site else []))

  def advance(self, draws: int) -> None:
    """Advances the caller's stream past a call."""
    scope.current(self.owner).advance_past(draws)

  def child(self, value: tuple, keys: dict) -> tuple:
    """The first value of a child stream; `keys` has those of environments that draw."""
    return (keys.get(self.owner, value[0]), jnp.uint32(0), *value[2:])


@dataclasses.dataclass(frozen=True)
class SiteOperand:
  """A site of an environment's current stream; its path is below the caller's."""

  owner: Streams | None
  path: str

  def _find(self) -> tuple[RngStream, str]:
    stream = scope.current(self.owner)
    return stream, ledger.join(stream.counter.path(), self.path)

  def read(self, times: int, name: str) -> tuple | None:
    stream, path = self._find()
    counter = stream.counter
    if not isinstance(counter, SiteCounter):
      return None
    return _value(*counter.at(path).position())

  def advance(self, draws: int) -> None:
    stream, path = self._find()
    stream.advance_past(draws, path)

  def child(self, value: tuple, keys: dict) -> tuple:
    key = keys.get(self.owner)
    key = value[0] if key is None else rng_state.named_key(key, self.path)
    return (key, jnp.uint32(0))


class GeneratorOperand:
  """A `torch.Generator`; equal to another one that is of the same generator.

  Args:
    generator: the generator itself.
    limit: how many draws a call makes, at most; known from traces.
    words: in a trace, uint32 (n, 2); None if the trace meets the generator first.
    used: how many of them earlier turns of a loop have used; None for none.

  Attributes:
    draws: draws made in the trace.
    asked: draws for which words were asked; more, if some were given back.
  """

  owner = None

  def __init__(self, generator: torch.Generator, limit=0, words=None, used=None):
    self.generator, self.limit = generator, limit
    self.words, self.used = words, used
    self.draws = self.asked = 0
    self._before = generator.get_state()

  def __eq__(self, other):
    # torch may have wrapped the generator again.
    is_one = isinstance(other, GeneratorOperand)
    return is_one and self.generator._cdata == other.generator._cdata

  def __hash__(self):
    return hash(self.generator._cdata)

  def read(self, times: int, name: str) -> tuple:
    return generators.take_words(self.generator, self.limit * times, name), None

  def advance(self, draws: int) -> None:
    """Nothing: the generator has advanced when its words were taken."""

  def child(self, value: tuple, keys: dict) -> tuple:
    return value

  def take(self, draws: int):
    """Words of the next draws in a trace; a placeholder while there are too few."""
    start = self.draws
    self.draws += draws
    self.asked = max(self.asked, self.draws)
    if self.is_short or not draws or not len(self.words):  # of a loop without turns
      return np.zeros((draws, generators.WORDS), np.uint32)
    if self.used is None:
      return self.words[start : self.draws]
    return jax.lax.dynamic_slice_in_dim(self.words, self.used + np.uint32(start), draws)

  @property
  def is_short(self) -> bool:
    """True if words were asked for that are no operands yet."""
    return self.asked > self.limit

  def require_untouched(self, name: str) -> None:
    """Raises RngError if the generator itself was changed during the trace."""
    if not torch.equal(self.generator.get_state(), self._before):
      self.restore()
      raise RngError(
        f"{name} seeds a torch.Generator, or draws from it on the CPU. That would "
        "happen while it is compiled and never again. Do it before the call."
      )

  def restore(self) -> None:
    """Puts the generator itself back to where it was before the trace."""
    self.generator.set_state(self._before)


Operand = EnvironmentOperand | SiteOperand | GeneratorOperand


# In the trace -------------------------------------------------------------------------


class StreamOperands:
  """The streams of a function in its trace; `scope.carrying` makes them current.

  Args:
    operands: streams that are operands.
    values: their values.

  Attributes:
    missing: streams that were met and are no operands yet.
    log: records of the draws, for ledgers.
    generators: the generators, by themselves.
  """

  is_traced = True

  def __init__(self, operands: Sequence[Operand], values: Values):
    self.missing: list[Operand] = []
    self.log: list = []
    self.generators: dict[GeneratorOperand, GeneratorOperand] = {}
    self._operands = tuple(operands)
    self._streams: dict[Streams, tuple[EnvironmentOperand, RngStream]] = {}
    self._on = scope.streams_on()
    self._around = scope.all_here()
    for operand, value in zip(operands, values):
      if value is not None:
        self._open(operand, value)

  def _open(self, operand: Operand, value: tuple) -> None:
    if isinstance(operand, GeneratorOperand):
      traced = GeneratorOperand(operand.generator, operand.limit, *value)
      self.generators[traced] = traced
      return
    owner = operand.owner or self._on
    # The environment that is on may be an operand by name too, from another call.
    if isinstance(operand, EnvironmentOperand):
      if owner not in self._streams:
        self._add(operand, *value)
    elif self._streams[owner][0].owner is operand.owner:
      counter = self._streams[owner][1].counter
      assert isinstance(counter, SiteCounter)
      counter.add(operand.path, *value)

  def _add(self, operand: EnvironmentOperand, key, count, *by_site) -> RngStream:
    owner = operand.owner or self._on
    stream = RngStream(RngState(key, count, {} if by_site else None))
    stream.log, stream.lock, stream.environment = self.log, FREE, owner.number
    stream.counter.is_operand = True
    if isinstance(stream.counter, SiteCounter):
      meet = lambda path: self.missing.append(SiteOperand(operand.owner, path))  # noqa: E731
      stream.counter.meet = meet
    self._streams[owner] = (operand, stream)
    return stream

  def stream(self, owner: Streams) -> RngStream:
    """The stream of an environment, known or new."""
    if owner in self._streams:
      return self._streams[owner][1]
    operand = EnvironmentOperand(owner)
    self.missing.append(operand)
    placeholder = (rng_state.key_from_seed(0, owner.impl), np.uint32(0))
    is_by_site = scope.current_of(owner, self._around).by_site
    stream = self._add(operand, *placeholder, *([{}] if is_by_site else []))
    # It is this trace's, also where a nested one asks for it first.
    stream.owner = self._first().owner
    return stream

  def _first(self) -> RngStream:
    return next(iter(self._streams.values()))[1]

  def generator(self, generator: torch.Generator) -> GeneratorOperand:
    """The operand of a generator, known or new."""
    operand = GeneratorOperand(generator)
    found = self.generators.setdefault(operand, operand)
    if found is operand:
      self.missing.append(operand)
    return found

  @property
  def owners(self) -> list[Streams]:
    """The environments whose streams have been met."""
    return list(self._streams)

  @property
  def draws(self) -> int:
    """Draws made from the environments' streams."""
    return sum(stream.draws for _, stream in self._streams.values())

  def check(self, name: str) -> None:
    """Raises unless `name` may use these streams in the trace in progress."""
    self._first().check(name)

  def nested(self) -> "StreamOperands":
    """These streams for a trace inside their own; see `RngStream.nested`."""
    inner = copy.copy(self)
    inner._streams = {
      owner: (operand, stream.nested())
      for owner, (operand, stream) in self._streams.items()
    }
    return inner

  def advance(self) -> "Advance | None":
    """The function's effect on the streams of its caller; None for nothing."""
    operands = (*self._operands, *dict.fromkeys(self.missing))
    moves = tuple(map(self._move, operands))
    seedings, keys = [], []
    for index, operand in enumerate(operands):
      stream = self._stream_of(operand)
      if stream is not None and stream.reseeded:
        if not isinstance(stream.state.count, int):
          stream.rebase()
        state = stream.state
        by_site = None if state.sites is None else tuple(state.sites.items())
        seedings.append((index, state.count, by_site))
        keys.append(state.key)
    return Advance(moves, tuple(self.log), tuple(seedings), tuple(keys)).or_none()

  def _stream_of(self, operand: Operand) -> RngStream | None:
    """The stream that an operand of an environment has opened."""
    found = self._streams.get(operand.owner or self._on)
    return found[1] if found is not None and found[0] == operand else None

  def _move(self, operand: Operand) -> tuple[int | None, str | None, int]:
    if isinstance(operand, GeneratorOperand):
      traced = self.generators.get(operand)
      return (None, None, traced.draws if traced else 0)
    number = (operand.owner or self._on).number
    stream = self._stream_of(EnvironmentOperand(operand.owner))
    if isinstance(operand, EnvironmentOperand):
      return (number, None, stream.draws if stream else 0)
    counter = stream.counter if stream else None
    # A stream that was re-seeded has left the sites of its caller.
    if isinstance(counter, SiteCounter) and counter.is_operand:
      return (number, operand.path, counter.draws.get(operand.path, 0))
    return (number, operand.path, 0)

  def close(self) -> None:
    """Ends the streams."""
    for _, stream in self._streams.values():
      stream.close()


# What comes back ----------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Advance:
  """How far a traced function moved its streams; static, so it costs no operand.

  Attributes:
    moves: for each operand the number of its environment (None for a generator), the
      path of a site or None, and the number of draws.
    log: records of the draws, for ledgers.
    seedings: for each stream that was re-seeded its index, the draws since, and paths
      of sites with their draws since, or None.
    keys: the keys that these were re-seeded with; the only leaves.
  """

  moves: tuple[tuple[int | None, str | None, int], ...] = ()
  log: tuple = ()
  seedings: tuple[tuple[int, int, tuple | None], ...] = ()
  keys: tuple[jax.Array, ...] = ()

  @property
  def draws(self) -> tuple[int, ...]:
    """Draws of each stream."""
    return tuple([draws for _, _, draws in self.moves])

  @property
  def total(self) -> int:
    """Draws of all streams; those of sites are draws of their environment."""
    return sum(draws for _, path, draws in self.moves if path is None)

  @property
  def is_nothing(self) -> bool:
    """True where nothing was drawn and nothing was seeded."""
    return not (self.log or self.seedings or any(self.draws))

  def or_none(self) -> "Advance | None":
    """This, or None for nothing, which costs nothing."""
    return None if self.is_nothing else self

  def without_log(self) -> "Advance":
    """How far the streams move."""
    return dataclasses.replace(self, log=())

  def repeated(self, times: int, label: str) -> "Advance | None":
    """The advance of a loop whose turns each do this; None for nothing."""
    if self.is_nothing or not times:
      return None
    moves = tuple([(number, path, n * times) for number, path, n in self.moves])
    return Advance(moves, (Repeated(self.log, times, self.moves, label),))

  def log_only(self, label: str) -> "Advance | None":
    """The advance of a function that draws from child streams of its own."""
    return Advance((), ledger.of_derived_stream(self.log, label)).or_none()

  @classmethod
  def of_branches(cls, advances: "list[Advance]") -> "Advance | None":
    """The advance of a choice between branches: as far as the one that draws most."""
    streams = itertools.zip_longest(*[advance.moves for advance in advances])
    moves = [max(filter(None, found), key=lambda move: move[2]) for found in streams]
    logs = [
      ledger.of_derived_stream(advance.log, f"branch {number}")
      for number, advance in enumerate(advances)
    ]
    return cls(tuple(moves), tuple(itertools.chain.from_iterable(logs))).or_none()

  def tree_flatten(self):
    return self.keys, dataclasses.replace(self, keys=()) if self.keys else self

  @classmethod
  def tree_unflatten(cls, static, children):
    # Without a key the static part is the whole, the same object on every call.
    return dataclasses.replace(static, keys=tuple(children)) if children else static
