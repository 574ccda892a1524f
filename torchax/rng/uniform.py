"""Conversion of random words to numbers in (0, 1), bools and ranges of integers.

Each element has 64 random bits: a uniform number U in steps of 2**-64. A float near 1
cannot hold these, so `halves` returns the distance of U to the nearer end. Comparison
with a probability (`is_below`) and scaling to an integer (`scale_to_integer`) use
integer arithmetic. No 64-bit types are needed. `samplers.py` calls these functions.
"""

import jax
import jax.numpy as jnp
import numpy as np

from torchax.rng.positions import words_at
from torchax.rng.threefry import second_words, two_words

_31_BITS = 0x7FFFFFFF


def unit(key, shape, dtype) -> jax.Array:
  """Sample uniformly over [0, 1): multiples of 2**-d, d the digits of the dtype.

  d is the same as in torch: 53 in float64, 24 in float32, 11 in float16 and 8 in
  bfloat16. All values are exact; 1 is excluded.
  """
  digits = jnp.finfo(dtype).nmant + 1
  width = max(8, 1 << (digits - 1).bit_length())
  shifted = jax.random.bits(key, shape, f"uint{width}") >> (width - digits)
  # Signed integers convert much faster; the sign bit is 0 after the shift.
  signed = shifted.astype(jnp.int64 if width == 64 else jnp.int32)
  wide = jnp.promote_types(dtype, jnp.float32)
  return (signed.astype(wide) * np.asarray(2.0**-digits, wide)).astype(dtype)


def halves(key, shape, dtype) -> tuple[jax.Array, jax.Array]:
  """Sample U uniformly over (0, 1); return (U > 1/2, distance to the nearer end).

  The distance is in (0, 1/2] with full relative precision of the dtype, float32 or
  float64, down to 2**-64.
  """
  if dtype == jnp.float64:
    word = jax.random.bits(key, shape, jnp.uint64)
    upper = word >> 63 != 0
    first = jnp.where(upper, ~word, word).astype(jnp.int64)
    return upper, first.astype(dtype) * 2.0**-64 + 2.0**-65
  first, second = two_words(key, shape)
  upper = first > _31_BITS
  first, second = (jnp.where(upper, ~word, word) for word in (first, second))
  coarse = first.astype(jnp.int32).astype(dtype) * np.float32(2.0**-32)
  fine = (second >> 1).astype(jnp.int32).astype(dtype) + np.float32(0.5)
  return upper, coarse + fine * np.float32(2.0**-63)


def is_below(key, shape, p) -> jax.Array:
  """Sample bools U < p for a uniform U; their probability is p up to 2**-62.

  p is a Python number, the result of `steps_below`, or an array, used in float32 or
  float64. NaN counts as 0.
  """
  first, second = two_words(key, shape)
  if isinstance(p, int | float):
    p = steps_below(p)
  if p is None:
    return jnp.ones(first.shape, bool)
  if isinstance(p, tuple):
    return is_below_steps(first, second, *p)
  first, second = ((word >> 1).astype(jnp.int32) for word in (first, second))
  p = jnp.asarray(p, p.dtype if p.dtype == jnp.float64 else jnp.float32)
  steps = p * 2.0**31
  high = jnp.where((p >= 0) & (p < 1), steps, 0).astype(jnp.int32)
  low = ((steps - high.astype(p.dtype)) * 2.0**31).astype(jnp.int32)
  below = (first < high) | ((first == high) & (second < low))
  return jnp.where((p > 0) & (p < 1), below, p >= 1)


def steps_below(p: float) -> tuple[int, int] | None:
  """Return p in steps of 2**-62 as two numbers of 31 bits; None for p = 1."""
  steps = round(min(max(p, 0.0), 1.0) * 2.0**62) if p == p else 0
  return None if steps >> 62 else (steps >> 31, steps & _31_BITS)


def is_below_steps(first, second, high, low) -> jax.Array:
  """Compute U < p from the two random words of U and the `steps_below` of p."""
  first, second = ((word >> 1).astype(jnp.int32) for word in (first, second))
  # If the first word is enough, XLA does not compute the second.
  if isinstance(low, int) and low == 0:
    return first < high
  return (first < high) | ((first == high) & (second < low))


def bernoulli_at(impl, words, positions, high, low) -> jax.Array:
  """Compute the elements of `samplers.bernoulli(key, shape, p)` at `positions`; bool.

  Args:
    impl: name of the key's implementation; see `positions.is_addressable`.
    words: `jax.random.key_data(key)`.
    positions: indices into the flattened shape, uint32.
    high, low: `steps_below(p)`, for p < 1.
  """
  return is_below_steps(*words_at(impl, words, positions), high, low)


def scale_to_integer(key, shape, span, dtype) -> jax.Array:
  """Sample integers over [0, span), nearly uniformly; uint32 or uint64.

  It uses twice the bits of the dtype. Probabilities of two integers differ by at most
  2**-32 of themselves, or 2**-64 for uint64. `span` is an int from 1 to 2**32 (or
  2**64), or an array of the dtype.
  """
  width = jnp.iinfo(dtype).bits
  if isinstance(span, int) and span & (span - 1) == 0:
    shift = width + 1 - span.bit_length()
    word = jax.random.bits(key, shape, dtype)
    return word >> shift if shift < width else jnp.zeros(shape, dtype)
  if width == 32:
    first, second = two_words(key, shape)
  else:
    first = jax.random.bits(key, shape, dtype)
    second = second_words(key, shape, dtype)
  span = jnp.asarray(span, dtype)
  low = first * span
  carries = low + _high_product(second, span) < low
  return _high_product(first, span) + carries.astype(dtype)


def _high_product(a, b):
  """Return the upper half of the product of two words, computed from half words."""
  half = jnp.iinfo(a.dtype).bits // 2
  mask = np.asarray((1 << half) - 1, a.dtype)
  a_low, a_high, b_low, b_high = a & mask, a >> half, b & mask, b >> half
  middle = a_high * b_low + (a_low * b_low >> half)
  other = a_low * b_high + (middle & mask)
  return a_high * b_high + (middle >> half) + (other >> half)
