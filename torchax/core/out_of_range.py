"""Values for out-of-range indices where no error can be raised: never plausible ones.

In a compiled function the index is not known. In eager mode a check would wait for the
device. A read out of range gives `fill_value`: NaN, the smallest signed or the largest
unsigned integer, or True. If a write has an index out of range, all its values become
`fill_value`. The indexing operations (`torchax/ops`) and `chains.py` use this.
"""

import jax
import jax.numpy as jnp
import numpy as np


def fill_value(dtype) -> np.ndarray:
  """Return the fill value of a JAX dtype: NaN, an extreme integer, or True for bool.

  JAX fills in the same values with `mode="fill"`.
  """
  if jnp.issubdtype(dtype, jnp.inexact):
    return np.asarray(jnp.nan, dtype)
  if dtype == jnp.bool_:
    return np.asarray(True)
  limits = jnp.iinfo(dtype)
  return np.asarray(limits.min or limits.max, dtype)


def fill_invalid(values: jax.Array, where: jax.Array) -> jax.Array:
  """Return the values, with `fill_value` at true elements of a mask."""
  return jnp.where(where, fill_value(values.dtype), values)


def is_out_of_range(index: jax.Array, size, wraps: bool = False) -> jax.Array:
  """Return the mask of indices outside [0, size); with `wraps`, [-size, size)."""
  index = _wide(index)
  return (index < (-size if wraps else 0)) | (index >= size)


def clip(index: jax.Array, size, wraps: bool = False) -> jax.Array:
  """Clip an index to [0, size); with `wraps`, negative ones count from the end."""
  index = _wide(index)
  if wraps:
    index = jnp.where(index < 0, index + size, index)
  return jnp.clip(index, 0, size - 1)


def negative_to_size(index: jax.Array, size) -> jax.Array:
  """Replace negative indices by `size`, so that JAX does not count from the end."""
  index = _wide(index)
  return jnp.where(index < 0, size, index)


def read(array: jax.Array, indices, dim: int | None = None) -> jax.Array:
  """Return `array[indices]`, or elements along `dim`; `fill_value` out of range."""
  if dim is not None:
    return jnp.take_along_axis(array, indices, dim, mode="fill")
  return array.at[indices].get(mode="fill")


def write(array: jax.Array, indices, values, how, broken, gathers=False) -> jax.Array:
  """Return `how(array, indices, values)`; write `fill_value` if an index is invalid.

  Args:
    array: the array to write to.
    indices: indices, clipped by `clip`.
    values: the values to write.
    how: `(array, indices, values) -> array`.
    broken: mask of the indices that were out of range.
    gathers: `how` combines values at equal indices, as an addition does. NaN then
      stays NaN; integers do not, so the whole result becomes `fill_value`.
  """
  is_broken = jnp.any(broken)
  written = how(array, indices, fill_invalid(values, is_broken))
  if gathers and not jnp.issubdtype(written.dtype, jnp.inexact):
    return fill_invalid(written, is_broken)
  return written


def _wide(index) -> jax.Array:
  """Widen small integers, so that they can be compared with any size."""
  index = jnp.asarray(index)
  return index.astype(jnp.int32) if index.dtype.itemsize < 4 else index
