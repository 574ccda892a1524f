"""`torch.Generator` as a stream of its own.

A draw with a generator takes two 32-bit integers from the generator itself and builds
its key from them. So the generator advances, obeys `manual_seed`, `get_state` and
`set_state`, and leaves the environment's stream alone. A compiled function receives
its integers as an operand: n draws take 2n integers, which torch draws as it would n
times two.
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
"""The key of a draw, of its words (uint32 (2,)) and the name of an implementation."""


def draw_words(generator: torch.Generator, draws: int) -> np.ndarray:
  """Advances the generator by `draws` draws.

  Returns:
    Key material: uint32 of shape (draws, 2).
  """
  with torch_compat.without_modes():
    words = torch.randint(
      0, 1 << 32, (draws, WORDS), generator=generator, dtype=torch.int64, device="cpu"
    )
  return words.numpy().astype(np.uint32)


def words_of_shard(words: jax.Array, index) -> jax.Array:
  """Words for one shard of many; `index` may be traced."""

  def one(pair):
    key = rng_state.key_from_words(pair, rng_state.DEFAULT_IMPL)
    return jax.random.bits(rng_state.shard_key(key, index), (WORDS,))

  return jax.vmap(one)(words)


def in_trace(generator: torch.Generator, name: str):
  """The `GeneratorOperand` of the trace in progress; None on the host.

  Raises:
    TracedDrawError: inside a raw JAX transformation, also with a key in `rng_scope`,
      since nothing carries the generator.
  """
  operands = scope.operands_here()
  if operands is None:
    scope.streams_on().root().check(name)
    return None
  operands.check(name)
  return operands.generator(generator)


def take_words(generator: torch.Generator, draws: int, name: str):
  """Key material for draws, from the generator or, in a trace, from its operand."""
  traced = in_trace(generator, name)
  return draw_words(generator, draws) if traced is None else traced.take(draws)


def position(generator: torch.Generator, name: str) -> tuple[Any, Any]:
  """Position of a generator, itself or in the trace in progress, for `go_to`."""
  traced = in_trace(generator, name)
  return traced, generator.get_state() if traced is None else traced.draws


def go_to(generator: torch.Generator, position: tuple[Any, Any], draws: int = 0):
  """Moves a generator to some draws after a position."""
  traced, before = position
  if traced is not None:
    traced.draws = before + draws
    return
  generator.set_state(before)
  if draws:
    draw_words(generator, draws)


def generator_operands(generator: torch.Generator, name: str) -> DrawOperands:
  """Operands of one draw with `generator=`; the current stream does not advance.

  Raises:
    TypeError: `generator` is none of jax or the CPU.
  """
  if not isinstance(generator, torch.Generator):
    raise TypeError(
      f"generator= expects a torch.Generator, but got {type(generator).__name__}."
    )
  if generator.device.type not in ("jax", "cpu"):
    raise TypeError(
      'A draw on jax takes torch.Generator(device="jax") or one of the CPU (it is the '
      f"source of its keys), but got one on {generator.device}."
    )
  words = take_words(generator, 1, name)
  return key_of(words[0], scope.default_impl()), 0


def record_generator_draw(op, distribution: str, result, arguments, key) -> None:
  """Records a draw with `generator=` in the ledgers that are open."""
  log = scope.current().log
  if ledger.Recording.count or log is not None:
    ledger.record_generator(log, op, distribution, result, arguments, (key, 0))
