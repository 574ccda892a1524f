"""`torch.Generator` as a stream of its own.

A draw with a generator takes two 32-bit integers from the generator itself and builds
its key from them. So the generator advances, obeys `manual_seed`, `get_state` and
`set_state`, and leaves the environment's stream alone. A compiled function receives
its integers as an operand: n draws take 2n integers, which torch draws as it would n
times two.
"""

import jax
import numpy as np
import torch

from torchax.compat import torch_compat
from torchax.rng import state as rng_state

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


def check_generator(generator) -> None:
  """Raises TypeError unless `generator` is one of jax or the CPU."""
  if not isinstance(generator, torch.Generator):
    raise TypeError(
      f"generator= expects a torch.Generator, but got {type(generator).__name__}."
    )
  if generator.device.type not in ("jax", "cpu"):
    raise TypeError(
      'A draw on jax takes torch.Generator(device="jax") or one of the CPU (it is the '
      f"source of its keys), but got one on {generator.device}."
    )
