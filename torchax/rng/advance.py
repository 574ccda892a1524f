"""What a traced function did to its streams: static, so that it costs no operand."""

import dataclasses
import itertools
from typing import NamedTuple

import jax

from torchax.rng import ledger
from torchax.rng.draw import Repeated


class Move(NamedTuple):
  """How far a function moves one of its streams.

  Attributes:
    environment: number of the environment; None for a generator.
    path: of the site, for the stream of a site; else None.
    draws: how many draws.
  """

  environment: int | None
  path: str | None
  draws: int


class Seeding(NamedTuple):
  """A stream that a function has seeded.

  Attributes:
    place: of the stream in the bundle.
    count: draws since.
    sites: paths and their draws since, where draws are addressed by site.
  """

  place: int
  count: int
  sites: tuple[tuple[str, int], ...] | None


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Advance:
  """What a traced function did to the streams of its bundle.

  Attributes:
    moves: one for each stream, in the order of the names; static.
    log: the draws, for ledgers; static.
    seedings: of the streams that were seeded; static.
    keys: the keys that they were seeded with; the only leaves.
  """

  moves: tuple[Move, ...] = ()
  log: tuple = ()
  seedings: tuple[Seeding, ...] = ()
  keys: tuple[jax.Array, ...] = ()

  @property
  def draws(self) -> tuple[int, ...]:
    """Draws of each stream."""
    return tuple([move.draws for move in self.moves])

  @property
  def total(self) -> int:
    """Draws of all streams; those of sites are draws of their environment."""
    return sum(move.draws for move in self.moves if move.path is None)

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
    """What many turns do that each do this; None for nothing."""
    if self.is_nothing or not times:
      return None
    moves = tuple([move._replace(draws=move.draws * times) for move in self.moves])
    return Advance(moves, (Repeated(self.log, times, self.moves, label),))

  def of_child(self, label: str) -> "Advance | None":
    """What the streams of a child do to its parent: nothing but to be noted."""
    return Advance((), ledger.adopted(self.log, label)).or_none()

  @classmethod
  def farthest(cls, advances: "list[Advance]") -> "Advance | None":
    """What a choice between branches does: as much as the one that does most."""
    streams = itertools.zip_longest(*[advance.moves for advance in advances])
    moves = [max(filter(None, found), key=lambda move: move.draws) for found in streams]
    logs = [ledger.adopted(a.log, f"branch {n}") for n, a in enumerate(advances)]
    return cls(tuple(moves), tuple(itertools.chain.from_iterable(logs))).or_none()

  def tree_flatten(self):
    return self.keys, dataclasses.replace(self, keys=()) if self.keys else self

  @classmethod
  def tree_unflatten(cls, static, children):
    # Without a key the static part is the whole, the same object on every call.
    return dataclasses.replace(static, keys=tuple(children)) if children else static
