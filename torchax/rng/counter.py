"""Draws with one key, in order: each stream has a counter, and each site of one."""

import copy
from typing import Any

import jax

from torchax.rng import paths
from torchax.rng import state as rng_state
from torchax.rng.state import RngState

DrawOperands = tuple[jax.Array, Any]
"""Key of a stream and number of a draw; a fused sampler folds one into the other."""


class Counter:
  """A key and the number of draws made with it.

  On the host it takes a new key after 2**30 draws.

  Attributes:
    key: typed key.
    base: traced number of draws before the trace; None on the host.
    count: draws, a Python int; in a trace those since `base`.
    is_operand: key and count are operands of the function being traced. Its caller
      knows the key, and paths of modules start at the function.
    replayed: the part of a forward pass that runs again; see `paths.replay`.
  """

  __slots__ = ("base", "count", "is_operand", "key", "replayed")
  by_site = False

  def __init__(self, key: jax.Array, count: Any = 0, is_operand: bool = False):
    self.is_operand = is_operand
    self.replayed: paths.Replay | None = None
    if isinstance(count, int):
      self.base = None
      self.key, self.count = rng_state.resolved(key, count)
    else:
      self.key, self.base, self.count = key, count, 0

  def position(self) -> DrawOperands:
    """The key and the number of draws."""
    return self.key, self.count if self.base is None else self.base + self.count

  @property
  def is_traced(self) -> bool:
    """True if key or count have no value yet."""
    return isinstance(self.key, jax.core.Tracer) or self.base is not None

  @property
  def has_counted(self) -> bool:
    """True if there may have been draws."""
    return self.count > 0 or self.base is not None

  def next(self) -> DrawOperands:
    """The operands of the next draw; `advance` follows."""
    return self.key, self.count if self.base is None else self.base + self.count

  def operands_of(self, index: int, site: str, turn: int | None) -> DrawOperands:
    """The operands of a draw by its number, or by its number at its site."""
    return self.key, index

  @property
  def state(self) -> RngState:
    """The state before the next draw."""
    return RngState(*self.position())

  def progress(self, path: str | None = None) -> int:
    """Draws since the key was set or became an operand: in all, or those of a site."""
    return self.count

  def site(self) -> tuple[str, int | None]:
    """Path of the draw that is made now, and its number there where sites count."""
    return self.path(), None

  def path(self) -> str:
    """Path of the modules that are running; prefix of the sites of a callee."""
    return paths.path(self.replayed, self.is_operand)

  def advance(self, draws: int) -> None:
    """Counts draws made with the operands of `next`."""
    self.count += draws
    if self.count >= rng_state.REKEY_AT and self.base is None:
      self.key, self.count = rng_state.resolved(self.key, self.count)

  def advance_past(self, draws: int, path: str | None = None) -> None:
    """Counts draws of a compiled call; with `path`, those of one site only."""
    if path is None:
      self.advance(draws)

  def copy(self) -> "Counter":
    """A counter that goes on by itself."""
    return copy.copy(self)
