"""`torch.Generator` as a random stream.

A draw with a generator takes two 32-bit integers from it and builds its key from them.
So the generator advances and obeys `manual_seed`, `get_state` and `set_state`, and the
environment's stream does not move. A compiled function receives the integers as an
operand: n draws take 2n integers, the same as n times two from torch.
"""

from typing import Any

import jax
import numpy as np
import torch

from torchax.compat import torch_compat
from torchax.rng import ledger, scope
from torchax.rng import state as rng_state
from torchax.rng.counter import DrawOperands

WORDS = 2

key_of = jax.jit(rng_state.key_from_words, static_argnums=1)
"""Compute the key of a draw from its words, uint32 (2,), and a PRNG implementation."""


def draw_words(generator: torch.Generator, draws: int) -> np.ndarray:
  """Advance the generator by `draws` draws.

  Returns:
    Key material: uint32 of shape (draws, 2).
  """
  with torch_compat.without_modes():
    words = torch.randint(
      0, 1 << 32, (draws, WORDS), generator=generator, dtype=torch.int64, device="cpu"
    )
  return words.numpy().astype(np.uint32)


def words_of_shard(words: jax.Array, index) -> jax.Array:
  """Derive the words of one shard; `index` may be traced."""

  def one(pair):
    key = rng_state.key_from_words(pair, rng_state.DEFAULT_IMPL)
    return jax.random.bits(rng_state.shard_key(key, index), (WORDS,))

  return jax.vmap(one)(words)


def in_trace(generator: torch.Generator, name: str):
  """Return the `GeneratorOperand` of the current trace; None on the host.

  Raises:
    TracedDrawError: inside a raw JAX transformation, even with a key in `rng_scope`,
      because the generator is no operand there.
  """
  operands = scope.operands_here()
  if operands is None:
    scope.streams_on().root().check(name)
    return None
  operands.check(name)
  return operands.generator(generator)


def take_words(generator: torch.Generator, draws: int, name: str):
  """Take key material for draws from the generator or, in a trace, its operand."""
  traced = in_trace(generator, name)
  return draw_words(generator, draws) if traced is None else traced.take(draws)


def position(generator: torch.Generator, name: str) -> tuple[Any, Any]:
  """Return the position of a generator, on the host or in the trace, for `go_to`."""
  traced = in_trace(generator, name)
  return traced, generator.get_state() if traced is None else traced.draws


def go_to(generator: torch.Generator, position: tuple[Any, Any], draws: int = 0):
  """Set a generator to `draws` draws after a position."""
  traced, before = position
  if traced is not None:
    traced.draws = before + draws
    return
  generator.set_state(before)
  if draws:
    draw_words(generator, draws)


def generator_operands(generator: torch.Generator, name: str) -> DrawOperands:
  """Return the operands of one draw with `generator=`; advance the generator.

  Raises:
    TypeError: `generator` is no generator on jax or the CPU.
  """
  if not isinstance(generator, torch.Generator):
    raise TypeError(
      f"generator= expects a torch.Generator, but got {type(generator).__name__}."
    )
  if generator.device.type not in ("jax", "cpu"):
    raise TypeError(
      'A draw on jax expects torch.Generator(device="jax") or one of the CPU (it is '
      f"the source of its keys), but got one on {generator.device}."
    )
  words = take_words(generator, 1, name)
  return key_of(words[0], scope.default_impl()), 0


def record_generator_draw(op, distribution: str, result, arguments, key) -> None:
  """Record a draw with `generator=` in the open ledgers."""
  log = scope.current().log
  if ledger.Recording.count or log is not None:
    ledger.record_generator(log, op, distribution, result, arguments, (key, 0))
