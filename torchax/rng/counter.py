"""Draws with one key, in order: what every stream is, and every site of one."""

from typing import Any, NamedTuple

import jax

from torchax.rng import state as rng_state


class DrawOperands(NamedTuple):
  """What a fused sampler needs to derive the key of one draw."""

  key: jax.Array
  count: int | jax.Array  # type: ignore[assignment]  # tuples have such a method


class Counter:
  """Counts draws. On the host it goes on with the next key where counts run out.

  Attributes:
    following: the next key, in a trace in which the counts may run out; else None.
  """

  __slots__ = ("_base", "_count", "_key", "following")

  def __init__(self, key: jax.Array, count: Any = 0, following=None):
    self._start(key, count, following)

  def _start(self, key: jax.Array, count: Any, following=None) -> None:
    """A traced count stays apart from the Python counter."""
    self.following = following
    on_host = isinstance(count, int)
    self._key, self._count = rng_state.settled(key, count) if on_host else (key, 0)
    self._base = None if on_host else count

  def next(self) -> DrawOperands:
    """The operands of the next draw."""
    if self._base is None:
      return DrawOperands(self._key, self._count)
    count = self._base + self._count
    if self.following is None:
      return DrawOperands(self._key, count)
    return DrawOperands(*rng_state.selected(self._key, self.following, count))

  def position(self) -> tuple[jax.Array, Any, jax.Array | None]:
    """Key, count, and the next key where the counts may run out in a call."""
    if self._base is not None:
      return self._key, self._base + self._count, self.following
    near_the_end = self._count >= rng_state.NEAR_THE_END
    following = rng_state.rekeyed(self._key) if near_the_end else None
    return self._key, self._count, following

  def step(self, draws: int) -> None:
    """Counts draws."""
    self._count += draws
    if self._count >= rng_state.REKEY_AT and self._base is None:
      self._start(self._key, self._count)
