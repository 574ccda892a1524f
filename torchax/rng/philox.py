"""Philox4x32-10 with torch's keys and numbers: the bits of `torch.func._random`.

A key is four words: two of a seed and two of an offset. Block i of its numbers is the
encryption of the counter `offset + i` by the seed, again four words. Key i of a split
is block i too. `ops/jaten/stateless_random.py` has torch's operations, and
`Configuration(prng_impl="torch_philox")` draws from streams with these keys.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(2011), https://doi.org/10.1145/2063384.2063405, section 3.2.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import random as jax_extend_random

from torchax.compat import jax_compat
from torchax.errors import SeedError

NAME = "torch_philox"
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
# Steps of the key schedule: the golden ratio and the root of three.
_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def block(words, index) -> tuple[jax.Array, ...]:
  """Return block `index` of a key as four arrays of words.

  Args:
    words: the four words of a key, uint32 arrays.
    index: the lower and upper word of the index, uint32 arrays.
  """
  *key, offset, high = words
  low, high = offset + index[0], high + index[1]
  high += (low < offset).astype(jnp.uint32)
  zeros = jnp.zeros_like(low + key[0])
  return encrypt(key, (low + zeros, high + zeros, zeros, zeros))


def encrypt(key, counter) -> tuple[jax.Array, ...]:
  """Encrypt a counter of four words by a key of two; uint32 arrays of one shape."""
  first, second = key
  a, b, c, d = counter
  for _ in range(_ROUNDS):
    (high_a, low_a), (high_c, low_c) = map(_product, (a, c), _MULTIPLIERS)
    a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
    first, second = (
      part + jnp.uint32(step) for part, step in zip((first, second), _STEPS)
    )
  return a, b, c, d


def _product(word: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
  """Return the upper and lower word of a product; XLA cannot partition `lax.mulhi`."""
  with jax_compat.explicit_x64_dtypes("allow"):
    product = word.astype(jnp.uint64) * np.uint64(factor)
    return (product >> np.uint64(32)).astype(jnp.uint32), product.astype(jnp.uint32)


def bits(key: jax.Array, number: int, width: int) -> jax.Array:
  """Return the first random integers of each key.

  Args:
    key: words of the keys, uint32 of shape (*batch, 4).
    number: integers per key.
    width: 8, 16, 32 or 64. Integers below 32 bits are the low bits of a word, and those
      of 64 bits are two words, the upper one first.

  Returns:
    Unsigned integers of `width` bits, of shape (*batch, number).
  """
  words_each = 2 if width == 64 else 1
  blocks = -(-number * words_each // 4)
  parts = [part[..., np.newaxis] for part in jnp.moveaxis(key, -1, 0)]
  index = lax.iota(jnp.uint32, blocks)
  words = jnp.stack(block(parts, (index, jnp.zeros_like(index))), -1)
  if width == 64:
    # The lower half comes first in memory.
    pairs = jnp.flip(words.reshape(*key.shape[:-1], 2 * blocks, 2), -1)
    return jax_compat.join_words(pairs)[..., :number]
  return words.reshape(*key.shape[:-1], 4 * blocks)[..., :number].astype(f"uint{width}")


def fold_in(key: jax.Array, low, high=0) -> jax.Array:
  """Return the words of block `low + 2**32 * high` of each key; see `bits`."""
  index = jnp.asarray(low, jnp.uint32), jnp.asarray(high, jnp.uint32)
  return jnp.stack(block(jnp.moveaxis(key, -1, 0), index), -1)


def split(key: jax.Array, number: int) -> jax.Array:
  """Return the words of `number` keys of each key, of shape (number, *batch, 4)."""
  return jax.vmap(lambda index: fold_in(key, index))(lax.iota(jnp.uint32, number))


def words_of(key: jax.Array) -> jax.Array:
  """Return the words (*batch, 4) of torch's keys, which are uint64 (*batch, 2)."""
  words = lax.bitcast_convert_type(key, jnp.uint32)
  return words.reshape(*key.shape[:-1], 4)


def key_of(words: jax.Array) -> jax.Array:
  """Return torch's keys of these words; inverse of `words_of`."""
  return jax_compat.join_words(words.reshape(*words.shape[:-1], 2, 2))


def typed_key(key) -> jax.Array:
  """Return torch's key, uint64 of shape (2,), as a typed key of `torch_philox`."""
  if isinstance(key, np.ndarray):
    key = jax_compat.with_64_bits(key)
  return jax.random.wrap_key_data(words_of(key), impl=NAME)


def torch_key(key: jax.Array) -> jax.Array:
  """Return typed keys as keys of `torch.func._random`.

  A tensor with such a key is also taken wherever a key is, as in `env.rng_scope(key)`.

  Args:
    key: typed keys of the implementation "torch_philox", of any shape.

  Returns:
    Array of the seed and offset of each key, uint64 of shape (*key.shape, 2).

  Raises:
    SeedError: the keys have another implementation, which torch does not know.

  >>> torch_key(jax.random.key(7, impl="torch_philox"))
  Array([7, 0], dtype=uint64)
  """
  impl = str(jax.random.key_impl(key))
  if impl != NAME:
    raise SeedError(
      f"torch.func._random has keys of {NAME} only, but got a key of {impl}. Make it "
      f'with `jax.random.key(seed, impl="{NAME}")`.'
    )
  return key_of(jax.random.key_data(key))


def _seed(seed) -> jax.Array:
  words = lax.convert_element_type(seed, jnp.uint32)
  return jnp.stack([words, *[jnp.zeros_like(words)] * 3])


def _random_bits(key, bit_width: int, shape) -> jax.Array:
  return bits(key, math.prod(shape), bit_width).reshape(shape)


jax_compat.register_prng(
  jax_extend_random.define_prng_impl(
    key_shape=(4,),
    seed=_seed,
    split=lambda key, shape: split(key, math.prod(shape)).reshape(*shape, 4),
    random_bits=_random_bits,
    fold_in=fold_in,
    name=NAME,
    tag="tpx",
  )
)
