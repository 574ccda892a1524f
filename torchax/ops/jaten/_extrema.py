"""Extrema that are NaN where an element is NaN, as in torch.

On a CPU, XLA loses NaN if it reduces 4,096 elements or more with its own maximum or
minimum (https://github.com/openxla/xla/issues/21461).
"""

import jax.numpy as jnp


def highest(array, axis=None, keepdims=False):
  """Return the maximum over the axes, or NaN."""
  return _or_nan(jnp.max(array, axis=axis, keepdims=keepdims), array, axis, keepdims)


def lowest(array, axis=None, keepdims=False):
  """Return the minimum over the axes, or NaN."""
  return _or_nan(jnp.min(array, axis=axis, keepdims=keepdims), array, axis, keepdims)


def _or_nan(extremum, array, axis, keepdims):
  if not jnp.issubdtype(array.dtype, jnp.inexact):
    return extremum
  has_nan = jnp.any(jnp.isnan(array), axis=axis, keepdims=keepdims)
  return jnp.where(has_nan, jnp.nan, extremum)
