"""The bits of threefry2x32 on the CPU, as one loop over the elements.

JAX lowers its generator for XLA:CPU as a loop over rounds, which is ten times slower to
compile and to run than the rounds written out. The bits are the same: element i of an
array is the exclusive or of the two words that encrypt the counter i
(`jax_threefry_partitionable`).

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(2011), https://doi.org/10.1145/2063384.2063405, section 3.3.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
# The parity of the key schedule, of Threefish (Skein 1.3).
_PARITY = 0x1BD11BDA
_MANTISSA_BITS = 23


def uniform(key: jax.Array, shape: tuple, dtype) -> jax.Array:
  """Uniform over [0, 1): the numbers of `jax.random.uniform`, bit for bit.

  Args:
    key: typed key.
    shape: of the result.
    dtype: a real floating-point dtype.
  """
  if dtype != jnp.float32 or not _is_ours(key, shape):
    return jax.random.uniform(key, shape, dtype)
  one = lax.bitcast_convert_type(jnp.float32(1.0), jnp.uint32)
  mantissa = bits(key, shape) >> jnp.uint32(32 - _MANTISSA_BITS)
  return lax.bitcast_convert_type(mantissa | one, jnp.float32) - jnp.float32(1.0)


def _is_ours(key, shape) -> bool:
  """True for few enough elements, one threefry key, and the CPU."""
  return (
    all(isinstance(size, int) for size in shape)
    and 0 < math.prod(shape) < 2**32
    and key.shape == ()
    and str(jax.random.key_impl(key)) == "threefry2x32"
    and jax.config.jax_threefry_partitionable
    and jax.default_backend() == "cpu"
  )


def bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """uint32 of a shape with fewer than 2**32 elements: those of `jax.random.bits`."""
  first, second = jax.random.key_data(key)
  counter = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
  left, right = _encrypt(first, second, jnp.zeros(shape, jnp.uint32), counter)
  return left ^ right


def _encrypt(first, second, left, right):
  """Twenty rounds on the words (left, right), with a part of the key every four."""
  schedule = (first, second, first ^ second ^ jnp.uint32(_PARITY))
  left, right = left + schedule[0], right + schedule[1]
  for turn in range(5):
    for rotation in _ROTATIONS[turn % 2]:
      left = left + right
      right = left ^ _rotate(right, rotation)
    left = left + schedule[(turn + 1) % 3]
    right = right + schedule[(turn + 2) % 3] + jnp.uint32(turn + 1)
  return left, right


def _rotate(word, places: int):
  return (word << jnp.uint32(places)) | (word >> jnp.uint32(32 - places))
