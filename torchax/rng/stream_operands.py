"""Random streams as operands of a compiled function, and the draws it reports back.

  pure(values, *args) -> (out, advance)

`values` has one value per stream: (key, count) with key `key<fry>[]` and count `u32[]`,
followed by an empty dict if draws are addressed by site; or (words, used) for a
`torch.Generator`. It is None for a stream that the caller does not have. `Advance` has
the number of draws per stream. `keyed_function.py` makes the calls.
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
from torchax.rng.counter import SiteCounter
from torchax.rng.environment_streams import Streams
from torchax.rng.ledger import Repeated
from torchax.rng.state import RngState, is_typed_key
from torchax.rng.stream import FREE, RngStream

Values = tuple[tuple | None, ...]
"""Values of the operands of a function, one per stream."""


# Values -------------------------------------------------------------------------------


def counts_of(values: Values) -> list:
  """Return the counts among the values, for the carry of a loop."""
  counts = [0 if v is None or v[1] is None else v[1] for v in values]
  return [jnp.asarray(count, jnp.uint32) for count in counts]


def counts_after(counts: Sequence, draws: Sequence) -> list:
  """Return the counts after `draws` of each stream; missing entries count as 0."""
  none = [0] * (len(counts) - len(draws))
  return [
    count if isinstance(n, int) and not n else count + n
    for count, n in zip(counts, (*draws, *none))
  ]


def with_counts(values: Values, counts: Sequence) -> Values:
  """Return the values with other counts."""
  return tuple([v and (v[0], count, *v[2:]) for v, count in zip(values, counts)])


def advance_counts(values: Values, draws: Sequence) -> Values:
  """Return the values after `draws` of each stream; the numbers may be traced."""
  return with_counts(values, counts_after(counts_of(values), draws))


def values_of_shard(values: Values, index) -> Values:
  """Return the values for one shard; its index may be traced."""

  def derive(source):
    if is_typed_key(source):
      return rng_state.shard_key(source, index)
    return generators.words_of_shard(source, index)

  return tuple([v and (derive(v[0]), *v[1:]) for v in values])


def _value(key: jax.Array, count, *by_site) -> tuple:
  return (key, np.uint32(count) if type(count) is int else count, *by_site)


# Operands -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class EnvironmentOperand:
  """Current stream of an environment; without `owner`, of the active one."""

  owner: Streams | None = None

  def read(self, times: int, name: str) -> tuple:
    """Return the position of the caller's stream, for `times` runs of `name`."""
    stream = scope.current(self.owner)
    return _value(*stream.counter.position(), *([{}] if stream.by_site else []))

  def advance(self, draws: int) -> None:
    """Advance the caller's stream past a call."""
    scope.current(self.owner).advance_past(draws)

  def child(self, value: tuple, keys: dict) -> tuple:
    """Return the initial value of a child stream; `keys` has its key by owner."""
    return (keys.get(self.owner, value[0]), jnp.uint32(0), *value[2:])


@dataclasses.dataclass(frozen=True)
class SiteOperand:
  """Site of an environment's current stream; `path` is below the caller's path."""

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
  """Operand of a `torch.Generator`; equal for the same generator.

  Args:
    generator: the generator itself.
    limit: largest number of draws of a call, known from traces.
    words: in a trace, uint32 (n, 2); None if the generator is no operand yet.
    used: number of words used by earlier iterations of a loop; None outside of loops.

  Attributes:
    draws: draws made in the trace.
    asked: largest value that `draws` has had; `go_to` may have reduced `draws`.
  """

  owner = None

  def __init__(self, generator: torch.Generator, limit=0, words=None, used=None):
    self.generator, self.limit = generator, limit
    self.words, self.used = words, used
    self.draws = self.asked = 0
    self._before = generator.get_state()

  def __eq__(self, other):
    # torch may create several Python objects for one generator.
    is_one = isinstance(other, GeneratorOperand)
    return is_one and self.generator._cdata == other.generator._cdata

  def __hash__(self):
    return hash(self.generator._cdata)

  def read(self, times: int, name: str) -> tuple:
    return generators.take_words(self.generator, self.limit * times, name), None

  def advance(self, draws: int) -> None:
    """Do nothing: `read` has advanced the generator."""

  def child(self, value: tuple, keys: dict) -> tuple:
    return value

  def take(self, draws: int):
    """Return the words of the next draws in a trace; zeros if there are too few."""
    start = self.draws
    self.draws += draws
    self.asked = max(self.asked, self.draws)
    if self.is_short or not draws or not len(self.words):  # a loop of no iterations
      return np.zeros((draws, generators.WORDS), np.uint32)
    if self.used is None:
      return self.words[start : self.draws]
    return jax.lax.dynamic_slice_in_dim(self.words, self.used + np.uint32(start), draws)

  @property
  def is_short(self) -> bool:
    """True if the trace needs more words than its operand has."""
    return self.asked > self.limit

  def require_untouched(self, name: str) -> None:
    """Raise RngError if the generator itself was changed during the trace."""
    if not torch.equal(self.generator.get_state(), self._before):
      self.restore()
      raise RngError(
        f"{name} seeds a torch.Generator, or draws from it on the CPU. That would "
        "happen while it is compiled and never again. Do it before the call."
      )

  def restore(self) -> None:
    """Restore the generator itself to its state before the trace."""
    self.generator.set_state(self._before)


Operand = EnvironmentOperand | SiteOperand | GeneratorOperand


# In the trace -------------------------------------------------------------------------


class StreamOperands:
  """Streams of a function in its trace; `scope.drawing_from` makes them current.

  Args:
    operands: streams that are operands.
    values: their values.

  Attributes:
    missing: streams that the trace used and that are no operands yet.
    log: records of the draws, for ledgers.
    generators: the generator operands; each is its own key, to find it by equality.
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
    # An earlier call may have added the active environment by its name as well.
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
    """Return the stream of an environment; register it if it is no operand yet."""
    if owner in self._streams:
      return self._streams[owner][1]
    operand = EnvironmentOperand(owner)
    self.missing.append(operand)
    placeholder = (rng_state.key_from_seed(0, owner.impl), np.uint32(0))
    is_by_site = scope.current_of(owner, self._around).by_site
    stream = self._add(operand, *placeholder, *([{}] if is_by_site else []))
    # It belongs to this trace, even if a nested one uses it first.
    stream.owner = self._first().owner
    return stream

  def _first(self) -> RngStream:
    return next(iter(self._streams.values()))[1]

  def generator(self, generator: torch.Generator) -> GeneratorOperand:
    """Return the operand of a generator; register it if it is new."""
    operand = GeneratorOperand(generator)
    first = self.generators.setdefault(operand, operand)
    if first is operand:
      self.missing.append(operand)
    return first

  @property
  def owners(self) -> list[Streams]:
    """Environments whose streams were used."""
    return list(self._streams)

  @property
  def draws(self) -> int:
    """Number of draws from the environments' streams."""
    return sum(stream.draws for _, stream in self._streams.values())

  def check(self, name: str) -> None:
    """Raise unless `name` may use these streams in the current trace."""
    self._first().check(name)

  def nest(self) -> "StreamOperands":
    """Return a copy for a trace nested in this one; see `RngStream.nest`."""
    inner = copy.copy(self)
    inner._streams = {
      owner: (operand, stream.nest())
      for owner, (operand, stream) in self._streams.items()
    }
    return inner

  def advance(self) -> "Advance | None":
    """Return the function's effect on its caller's streams; None if it has none."""
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
    """Return the stream opened for an operand of an environment, or None."""
    entry = self._streams.get(operand.owner or self._on)
    return entry[1] if entry is not None and entry[0] == operand else None

  def _move(self, operand: Operand) -> tuple[int | None, str | None, int]:
    if isinstance(operand, GeneratorOperand):
      traced = self.generators.get(operand)
      return (None, None, traced.draws if traced else 0)
    number = (operand.owner or self._on).number
    stream = self._stream_of(EnvironmentOperand(operand.owner))
    if isinstance(operand, EnvironmentOperand):
      return (number, None, stream.draws if stream else 0)
    counter = stream.counter if stream else None
    # Sites of a re-seeded stream are unrelated to the caller's.
    if isinstance(counter, SiteCounter) and counter.is_operand:
      return (number, operand.path, counter.draws.get(operand.path, 0))
    return (number, operand.path, 0)

  def close(self) -> None:
    """Close the streams."""
    for _, stream in self._streams.values():
      stream.close()


# Result -------------------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Advance:
  """Effect of a traced function on its streams; static except for the keys of re-seeds.

  Attributes:
    moves: per operand: number of its environment (None for a generator), path of a site
      or None, and number of draws.
    log: records of the draws, for ledgers.
    seedings: per re-seeded stream: its index, the draws since, and the draws since per
      path of a site, or None.
    keys: keys of the re-seeded streams; the only leaves of this pytree.
  """

  moves: tuple[tuple[int | None, str | None, int], ...] = ()
  log: tuple = ()
  seedings: tuple[tuple[int, int, tuple | None], ...] = ()
  keys: tuple[jax.Array, ...] = ()

  @property
  def draws(self) -> tuple[int, ...]:
    """Number of draws per stream."""
    return tuple([draws for _, _, draws in self.moves])

  @property
  def total(self) -> int:
    """Draws of all streams; the draws of a site count in its environment."""
    return sum(draws for _, path, draws in self.moves if path is None)

  @property
  def is_nothing(self) -> bool:
    """True if there was no draw and no re-seed."""
    return not (self.log or self.seedings or any(self.draws))

  def or_none(self) -> "Advance | None":
    """Return self, or None if it has no effect: None costs nothing to pass on."""
    return None if self.is_nothing else self

  def without_log(self) -> "Advance":
    """Return a copy without the log."""
    return dataclasses.replace(self, log=())

  def repeat(self, times: int, label: str) -> "Advance | None":
    """Return the advance of a loop of `times` iterations; None if it has no effect."""
    if self.is_nothing or not times:
      return None
    moves = tuple([(number, path, n * times) for number, path, n in self.moves])
    return Advance(moves, (Repeated(self.log, times, self.moves, label),))

  def log_only(self, label: str) -> "Advance | None":
    """Return the advance of a function that draws from child streams of its own."""
    return Advance((), ledger.as_child_draws(self.log, label)).or_none()

  @classmethod
  def of_branches(cls, advances: "list[Advance]") -> "Advance | None":
    """Return the advance of a choice of branches: per stream, the largest of all."""
    streams = itertools.zip_longest(*[advance.moves for advance in advances])
    moves = [max(filter(None, each), key=lambda move: move[2]) for each in streams]
    logs = [
      ledger.as_child_draws(advance.log, f"branch {number}")
      for number, advance in enumerate(advances)
    ]
    return cls(tuple(moves), tuple(itertools.chain.from_iterable(logs))).or_none()

  def tree_flatten(self):
    return self.keys, dataclasses.replace(self, keys=()) if self.keys else self

  @classmethod
  def tree_unflatten(cls, static, children):
    # Without keys every call returns the same object.
    return dataclasses.replace(static, keys=tuple(children)) if children else static
