"""Draws with one key, in order: what every stream is, and every site of one."""

from typing import Any, NamedTuple

import jax

from torchax.rng import state as rng_state


class DrawOperands(NamedTuple):
  """What a fused sampler needs to derive the key of one draw."""

  key: jax.Array
  count: int | jax.Array  # type: ignore[assignment]  # tuples have such a method


class Counter:
  """Counts draws. On the host it takes a new key after 2**30 of them."""

  __slots__ = ("_base", "_count", "_key")

  def __init__(self, key: jax.Array, count: Any = 0):
    self._start(key, count)

  def _start(self, key: jax.Array, count: Any) -> None:
    """A traced count stays apart from the Python counter."""
    on_host = isinstance(count, int)
    self._key, self._count = rng_state.settled(key, count) if on_host else (key, 0)
    self._base = None if on_host else count

  def next(self) -> DrawOperands:
    """The operands of the next draw."""
    if self._base is None:
      return DrawOperands(self._key, self._count)
    return DrawOperands(self._key, self._base + self._count)

  def step(self, draws: int) -> None:
    """Counts draws."""
    self._count += draws
    if self._count >= rng_state.REKEY_AT and self._base is None:
      self._start(self._key, self._count)
