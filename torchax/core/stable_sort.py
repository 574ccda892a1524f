"""Stable sort of an array together with the positions of its elements.

XLA's CPU compiler sorts a pair of operands, or floats, by calling a comparator for each
comparison. A single operand of integers takes a fifth of that time. So the order of an
element and its position are packed into one 64-bit integer.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Bits of a float32 without the sign, and of infinity; those of NaN are between.
_LARGEST, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)


def sort_with_positions(array, axis: int, descending=False):
  """Sort an axis; equal elements keep their order, and NaN is the largest value.

  Args:
    array: array of at least one dimension.
    axis: non-negative axis to sort.
    descending: largest first.

  Returns:
    The sorted array, and the positions of its elements in `array` as int32.
  """
  ranks = _ranks(array) if jax.default_backend() == "cpu" else None
  if ranks is None:
    return _sort_pair(array, axis, descending)
  positions = _sorted_positions(~ranks if descending else ranks, axis)
  values = jnp.take_along_axis(array, positions, axis, mode="promise_in_bounds")
  return values, positions


def _ranks(array) -> jax.Array | None:
  """Return int32 numbers in the order of the elements; None for 64-bit dtypes."""
  array = lax.stop_gradient(array)
  if array.dtype.itemsize > 4:
    return None
  if array.dtype == jnp.uint32:
    return lax.bitcast_convert_type(array ^ np.uint32(1 << 31), jnp.int32)
  if not jnp.issubdtype(array.dtype, jnp.floating):
    return array.astype(jnp.int32)
  bits = lax.bitcast_convert_type(array.astype(jnp.float32), jnp.int32)
  magnitude = bits & _LARGEST
  # Negative numbers have the reversed order of their bits. Comparing floats instead of
  # bits would take subnormal numbers for zeros.
  ranks = jnp.where(bits < 0, -magnitude, magnitude)
  return jnp.where(magnitude > _INFINITY, _LARGEST, ranks)


def _sorted_positions(ranks, axis: int) -> jax.Array:
  positions = lax.broadcasted_iota(jnp.int32, ranks.shape, axis)
  bits = lax.full_like(ranks, 32)
  # JAX has 64-bit integers inside this context only. Numbers of 64 bits in the trace
  # would lose bits if it is evaluated outside.
  with jax.enable_x64(True):
    ranks, positions, bits = (
      lax.convert_element_type(array, jnp.int64) for array in (ranks, positions, bits)
    )
    packed = lax.bitwise_or(lax.shift_left(ranks, bits), positions)
    packed = lax.sort(packed, dimension=axis, is_stable=False)
    return lax.convert_element_type(packed, jnp.int32)  # the lower half


def _sort_pair(array, axis: int, descending: bool):
  # Reversing before and after keeps ties in order and puts NaN first.
  order = (slice(None),) * axis + (slice(None, None, -1 if descending else 1),)
  positions = lax.broadcasted_iota(jnp.int32, array.shape, axis)
  operands = array[order], positions[order]
  values, positions = lax.sort(operands, dimension=axis, num_keys=1, is_stable=True)
  return values[order], positions[order]
