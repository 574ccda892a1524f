"""What comes of an index outside of a dimension where nobody can raise: never a number
that one could take for a result.

Inside a compiled function, and where the device would have to be waited for, an index
is data. What is read at one outside is `no_number`: NaN, the least integer, the largest
unsigned one, True. A write at one makes `no_number` of everything that it writes.
"""

import jax
import jax.numpy as jnp
import numpy as np


def no_number(dtype) -> np.ndarray:
  """What stands for no result in a dtype of JAX; bools have nothing better than True.

  It is what JAX fills in, too.
  """
  if jnp.issubdtype(dtype, jnp.inexact):
    return np.asarray(jnp.nan, dtype)
  if dtype == jnp.bool_:
    return np.asarray(True)
  limits = jnp.iinfo(dtype)
  return np.asarray(limits.min or limits.max, dtype)


def spoiled(values: jax.Array, where: jax.Array) -> jax.Array:
  """The values with `no_number` where a mask is true."""
  return jnp.where(where, no_number(values.dtype), values)


def outside(index: jax.Array, size, wraps: bool = False) -> jax.Array:
  """Where an index is in none of the places 0 to `size`; with `wraps`, from `-size`."""
  index = _wide(index)
  return (index < (-size if wraps else 0)) | (index >= size)


def inside(index: jax.Array, size, wraps: bool = False) -> jax.Array:
  """An index with the nearest place for one outside, counted from the start."""
  index = _wide(index)
  if wraps:
    index = jnp.where(index < 0, index + size, index)
  return jnp.clip(index, 0, size - 1)


def from_start(index: jax.Array, size) -> jax.Array:
  """An index none of whose places JAX counts from the end: negative ones are beyond."""
  index = _wide(index)
  return jnp.where(index < 0, size, index)


def read(array: jax.Array, places, dim: int | None = None) -> jax.Array:
  """`array[places]`, or the elements at places along `dim`; outside, `no_number`."""
  if dim is not None:
    return jnp.take_along_axis(array, places, dim, mode="fill")
  return array.at[places].get(mode="fill")


def write(array: jax.Array, places, values, how, broken, gathers=False) -> jax.Array:
  """`how(array, places, values)`, unmistakably wrong where an index is.

  Args:
    array: what is written to.
    places: to index it with, all of them `inside`.
    values: what is written.
    how: `(array, places, values) -> array`.
    broken: mask of the indices that were outside.
    gathers: values that meet at a place are put together. NaN stays NaN then; integers
      have nothing of the kind, so that the whole result is `no_number`.
  """
  is_broken = jnp.any(broken)
  written = how(array, places, spoiled(values, is_broken))
  if gathers and not jnp.issubdtype(written.dtype, jnp.inexact):
    return spoiled(written, is_broken)
  return written


def _wide(index) -> jax.Array:
  """Small integers where they can be compared with any size."""
  index = jnp.asarray(index)
  return index.astype(jnp.int32) if index.dtype.itemsize < 4 else index
