"""Random words of single elements of a draw, with each counter-based generator.

Element i of `jax.random.bits` depends only on the key and i. So attention in blocks
computes the part of its dropout mask that belongs to a block.
"""

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from torchax.rng import philox, threefry

# Any, because JAX's annotations lack its flags.
_config: Any = jax.config


def _xor(words) -> jax.Array:
  return functools.reduce(operator.xor, words)


def _of_torch(key, indices) -> jax.Array:
  """Return word i % 4 of block i // 4."""
  words = philox.block(key, (indices >> 2, jnp.zeros_like(indices)))
  which = indices & 3
  return jnp.select([which == number for number in range(3)], words[:3], words[3])


def _counter(indices) -> tuple[jax.Array, ...]:
  zeros = jnp.zeros_like(indices)
  return zeros, indices, zeros, zeros


# Implementation -> function of the words of a key and indices, uint32; it returns the
# elements of `jax.random.bits`.
_FIRST_WORD = {
  "threefry4x32": lambda key, i: _xor(threefry.encrypt_4x32(key, _counter(i))),
  "philox4x32": lambda key, i: _xor(philox.encrypt(key, _counter(i))),
  philox.NAME: _of_torch,
}


def is_addressable(key: jax.Array, shape: tuple[int, ...]) -> bool:
  """Return True if `words_at` computes the elements of a draw of this shape."""
  impl = str(jax.random.key_impl(key))
  if impl == threefry.NAME:
    return threefry.is_addressable(key, shape)
  return impl in _FIRST_WORD and math.prod(shape) < 2**32


def words_at(impl: str, key_data, indices) -> tuple[jax.Array, jax.Array]:
  """Compute the `threefry.two_words` of the elements at flat `indices`.

  Args:
    impl: name of the key's implementation; see `is_addressable`.
    key_data: `jax.random.key_data(key)`.
    indices: indices into the flattened shape, uint32.
  """
  if impl == threefry.NAME:
    return threefry.words_at(key_data, indices)
  key = threefry.key_of_second_words(jax.random.wrap_key_data(key_data, impl=impl))
  first_word = _FIRST_WORD[impl]
  return first_word(key_data, indices), first_word(jax.random.key_data(key), indices)
