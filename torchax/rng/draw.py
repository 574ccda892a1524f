"""A draw as a ledger notes it."""

import dataclasses

import jax
import numpy as np

from torchax.core import user_code
from torchax.errors import RngError
from torchax.rng import state as rng_state


@dataclasses.dataclass(frozen=True)
class Draw:
  """One draw.

  Attributes:
    index: number of the draw in its stream, from 0.
    op: the operation.
    site: path of the module that drew; empty outside of modules.
    distribution: the operation's parameters, as far as they are numbers.
    shape: of the first result.
    dtype: of the first result, its name.
    stream: which stream it was: empty for the current one of the thread.
    line: file and line of the code that drew; empty where it is not known.
    key: tells the key from those of other draws: implementation, words, and the
      number that is folded in; or "traced" and what tells traced keys apart; None for
      that of the carried stream at `index`, which the caller knows.
    turn: number of the draw at its site, where draws are addressed by site.
    environment: number of the environment whose stream it was, in what a function
      notes while it is traced; else None.
    arguments: of the operation, as plain data (`arguments.py`); None where a key was
      taken and nothing was drawn.
  """

  index: int
  op: str
  site: str
  distribution: str
  shape: tuple[int, ...]
  dtype: str
  stream: str = ""
  line: str = ""
  key: tuple | None = None
  turn: int | None = None
  arguments: tuple | None = None
  environment: int | None = None

  @classmethod
  def of(cls, index: int, op, site: str, distribution: str, result, **where) -> "Draw":
    """The draw that gave `result`, arrays, to the code that is running."""
    leaf = next(iter(jax.tree.leaves(result)), None)
    shape, dtype = ((), "") if leaf is None else (leaf.shape, str(leaf.dtype))
    place = user_code.line()
    line = "" if place is None else "{}:{}".format(*place)
    return cls(index, str(op), site, distribution, shape, dtype, line=line, **where)

  def operands(self) -> tuple[jax.Array, int]:
    """The key of the stream and the number that is folded in; see `prng_key`."""
    if self.key is None or self.key[0] == "traced":
      raise RngError(
        f"Draw {self.index} ({self.op}) took its key from a scope inside a compiled "
        "function, where the key has no value. Record the function as it runs eagerly."
      )
    impl, *words, count = self.key
    data = np.asarray(words, np.uint32).reshape(rng_state.key_data_shape(impl))
    return jax.random.wrap_key_data(data, impl=impl), count

  @property
  def prng_key(self) -> jax.Array:
    """The typed key of the draw.

    Raises:
      RngError: the draw was made in a scope inside a compiled function.
    """
    return rng_state.fold_in(*self.operands())


@dataclasses.dataclass(frozen=True)
class Repeated:
  """Draws that are made again and again: by a loop, by the rows of a batch.

  Attributes:
    entries: the draws of one turn.
    times: number of turns.
    moves: how far one turn moves each stream: the number of its environment, the path
      of a site or None, and draws.
    label: what repeats.
  """

  entries: tuple
  times: int
  moves: tuple[tuple[int | None, str | None, int], ...]
  label: str
