"""Key and number of draws of a stream, or of one of its sites.

`stream.py` has a counter per stream, `sites.py` one per site.
"""

import copy
from typing import Any

import jax

from torchax.rng import paths
from torchax.rng import state as rng_state
from torchax.rng.state import RngState

DrawOperands = tuple[jax.Array, Any]
"""Key of a stream and number of a draw; a fused sampler folds the number in."""


class Counter:
  """Key and number of draws made with it.

  On the host it switches to a new key after 2**30 draws.

  Attributes:
    key: typed key.
    base: traced number of draws before the trace; None on the host.
    count: number of draws, a Python int; in a trace, draws since `base`.
    is_operand: key and count are operands of the function being traced. Paths of
      modules then start at the function, and only its caller knows the key.
    replayed: part of a forward pass that is being recomputed; see `paths.replay`.
  """

  __slots__ = ("base", "count", "is_operand", "key", "replayed")
  by_site = False

  def __init__(self, key: jax.Array, count: Any = 0, is_operand: bool = False):
    self.is_operand = is_operand
    self.replayed: paths.Replay | None = None
    if isinstance(count, int):
      self.base = None
      self.key, self.count = rng_state.rekey_if_due(key, count)
    else:
      self.key, self.base, self.count = key, count, 0

  def position(self) -> DrawOperands:
    """Return the key and the number of draws."""
    return self.key, self.count if self.base is None else self.base + self.count

  @property
  def is_traced(self) -> bool:
    """True if the key or the count is traced."""
    return isinstance(self.key, jax.core.Tracer) or self.base is not None

  @property
  def has_counted(self) -> bool:
    """True if there may have been draws."""
    return self.count > 0 or self.base is not None

  def next(self) -> DrawOperands:
    """Return the operands of the next draw; the caller then calls `advance`."""
    return self.position()

  def operands_of(self, index: int, site: str, turn: int | None) -> DrawOperands:
    """Return the operands of a draw, found by its number or by its number at a site."""
    return self.key, index

  @property
  def state(self) -> RngState:
    """State before the next draw."""
    return RngState(*self.position())

  def progress(self, path: str | None = None) -> int:
    """Return the draws since the key was set or became an operand, of all or a site."""
    return self.count

  def site(self) -> tuple[str, int | None]:
    """Return the path of the current draw, and its number there or None."""
    return self.path(), None

  def path(self) -> str:
    """Return the path of the running modules: the prefix of a callee's sites."""
    return paths.path(self.replayed, self.is_operand)

  def advance(self, draws: int) -> None:
    """Count draws made with the operands of `next`."""
    self.count += draws
    if self.count >= rng_state.REKEY_AT and self.base is None:
      self.key, self.count = rng_state.rekey_if_due(self.key, self.count)

  def advance_past(self, draws: int, path: str | None = None) -> None:
    """Count draws of a compiled call; with `path`, those of one site only."""
    if path is None:
      self.advance(draws)

  def copy(self) -> "Counter":
    """Return an independent copy."""
    return copy.copy(self)
