"""threefry2x32 on the CPU with unrolled rounds: JAX's bits in a tenth of the time.

For XLA:CPU JAX lowers its generator as a loop over rounds. That takes up to fifteen
times as long as one loop over the elements. With `jax_threefry_partitionable`, element
i of an array is the xor of the two words of the encrypted counter i. We compute the
same bits. `uniform.py` and the samplers use them.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(2011), https://doi.org/10.1145/2063384.2063405, section 3.3.
"""

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import random as jax_extend_random

NAME = "threefry2x32"
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_ROTATIONS_4X32 = (
  *((10, 26), (11, 21), (13, 27), (23, 5)),
  *((6, 20), (17, 11), (25, 10), (18, 20)),
)
# Parity constant of the key schedule of Threefish (Skein 1.3).
_PARITY = 0x1BD11BDA
# Number that `second_words` folds into the key. It serves PRNG implementations that
# compute one word per element.
_SECOND_WORDS = 0xFFFFFFFF
# Any, because JAX's annotations lack its flags.
_config: Any = jax.config


def with_unrolled_key(sampler):
  """Wrap a sampler `(key, …) -> array` to unroll its key; the numbers are the same."""

  @functools.wraps(sampler)
  def draw(key, *args, **kwargs):
    return sampler(unrolled_key(key), *args, **kwargs)

  return draw


def unrolled_key(key: jax.Array) -> jax.Array:
  """Return the key with this file's PRNG implementation; unchanged if unsupported.

  `jax.random` draws the same numbers with both. The result stays inside samplers; keys
  that users see have JAX's own implementation.
  """
  if _can_unroll(key):
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=_IMPL)
  return key


def _can_unroll(key) -> bool:
  """Return True for a threefry2x32 key on the CPU whose implementation may change."""
  return (
    str(jax.random.key_impl(key)) == NAME
    and _config.jax_threefry_partitionable
    # The key-reuse checker can follow only JAX's own keys.
    and not _config.jax_debug_key_reuse
    and jax.default_backend() == "cpu"
  )


def _random_bits(key_data, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
  """Compute `jax.random.bits` of `bit_width` bits."""
  if not _has_short_counter(shape):
    return jax.random.bits(_jax_key(key_data), shape, f"uint{bit_width}")
  left, right = _encrypt_indices(key_data, shape)
  if bit_width == 64:
    return (left.astype(jnp.uint64) << 32) | right.astype(jnp.uint64)
  return (left ^ right).astype(f"uint{bit_width}")


def two_words(key: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
  """Return two independent random words per element, uint32.

  The first is the word of `jax.random.bits`. In threefry2x32 it is the xor of two words
  that the cipher returns, so the second word costs almost nothing.
  """
  impl = str(jax.random.key_impl(key))
  is_threefry = impl in (NAME, _IMPL_TAG) and _config.jax_threefry_partitionable
  if not (is_threefry and _has_short_counter(shape)):
    return jax.random.bits(key, shape), second_words(key, shape)
  left, right = _encrypt_indices(jax.random.key_data(key), shape)
  if _config.jax_debug_key_reuse:  # the checker must see the use of the key
    return jax.random.bits(key, shape), right
  return left ^ right, right


def words_at(key_data, indices) -> tuple[jax.Array, jax.Array]:
  """Compute the `two_words` of the elements at flat `indices`, uint32."""
  left, right = _encrypt(key_data, jnp.zeros_like(indices), indices)
  return left ^ right, right


def bits_at(key: jax.Array, indices, bit_width: int) -> jax.Array | None:
  """Return the `jax.random.bits` at flat `indices` of a draw; None if unsupported.

  Args:
    key: scalar typed key.
    indices: indices into the flattened draw, uint32.
    bit_width: 8, 16, 32 or 64.
  """
  impl = str(jax.random.key_impl(key))
  if (
    key.ndim or impl not in (NAME, _IMPL_TAG) or not _config.jax_threefry_partitionable
  ):
    return None
  bits, right = words_at(jax.random.key_data(key), indices)
  if bit_width == 64:
    return ((bits ^ right).astype(jnp.uint64) << 32) | right.astype(jnp.uint64)
  return bits.astype(f"uint{bit_width}")


def is_addressable(key: jax.Array, shape: tuple[int, ...]) -> bool:
  """Return True if each element of a draw can be computed from its index.

  With threefry2x32 element i depends only on the key and i. `positions.py` has other
  implementations. `shape` is the shape of the whole draw.
  """
  return (
    str(jax.random.key_impl(key)) == NAME
    and bool(_config.jax_threefry_partitionable)
    and math.prod(shape) < 2**32
  )


def second_words(key: jax.Array, shape: tuple[int, ...], dtype="uint32") -> jax.Array:
  """Return random words independent of `jax.random.bits(key, shape, dtype)`."""
  return jax.random.bits(key_of_second_words(key), shape, dtype)


def key_of_second_words(key: jax.Array) -> jax.Array:
  """Return the key of `second_words`."""
  return jax.random.fold_in(key, _SECOND_WORDS)


def _has_short_counter(shape) -> bool:
  """Return True if a uint32 can count the elements; symbolic sizes are ignored."""
  sizes = [size for size in shape if isinstance(size, int)]
  return math.prod(sizes) < 2**32


def _encrypt_indices(key_data, shape):
  """Encrypt the index of each element; return the two words."""
  counter = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
  return _encrypt(key_data, jnp.zeros(shape, jnp.uint32), counter)


def _jax_key(key_data) -> jax.Array:
  return jax.random.wrap_key_data(key_data, impl=NAME)


_IMPL_TAG = "unrolled"
# Keys are derived by JAX's own code: XLA:CPU would fuse a dozen unrolled derivations
# into one kernel, which takes minutes to compile.
_IMPL = jax_extend_random.define_prng_impl(
  key_shape=(2,),
  seed=lambda seed: jax.random.key_data(jax.random.key(seed, impl=NAME)),
  split=lambda key_data, shape: jax.random.key_data(
    jax.random.split(_jax_key(key_data), shape)
  ),
  random_bits=_random_bits,
  fold_in=lambda key_data, data: jax.random.key_data(
    jax.random.fold_in(_jax_key(key_data), data)
  ),
  name=f"{NAME}_unrolled",
  tag=_IMPL_TAG,
)


def _encrypt(key_data, left, right):
  """Run twenty rounds on the words (left, right); add part of the key every four."""
  # Operations of lax, because those of jnp take three times as long to trace.
  first, second = key_data
  schedule = (first, second, first ^ second ^ jnp.uint32(_PARITY))
  left, right = lax.add(left, schedule[0]), lax.add(right, schedule[1])
  for group in range(5):
    for rotation in _ROTATIONS[group % 2]:
      left = lax.add(left, right)
      right = lax.bitwise_xor(left, _rotate(right, rotation))
    left = lax.add(left, schedule[(group + 1) % 3])
    right = lax.add(right, schedule[(group + 2) % 3])
    right = lax.add(right, np.uint32(group + 1))
  return left, right


def encrypt_4x32(key_data, counter) -> tuple[jax.Array, ...]:
  """Encrypt a counter of four words by Threefry4x32-20; uint32 arrays of one shape."""
  schedule = [*key_data]
  schedule.append(functools.reduce(operator.xor, schedule, jnp.uint32(_PARITY)))
  a, b, c, d = (word + key for word, key in zip(counter, schedule))
  for number in range(20):
    first, second = _ROTATIONS_4X32[number % 8]
    a, c = lax.add(a, b), lax.add(c, d)
    # The words that were mixed with `a` and `c` change places.
    b, d = (
      lax.bitwise_xor(c, _rotate(d, second)),
      lax.bitwise_xor(a, _rotate(b, first)),
    )
    if number % 4 == 3:
      group = number // 4 + 1
      a, b, c, d = (
        lax.add(word, schedule[(group + index) % 5])
        for index, word in enumerate((a, b, c, d))
      )
      d = lax.add(d, np.uint32(group))
  return a, b, c, d


def _rotate(word, bits: int):
  high = lax.shift_left(word, np.uint32(bits))
  return lax.bitwise_or(high, lax.shift_right_logical(word, np.uint32(32 - bits)))
