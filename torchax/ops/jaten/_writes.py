"""Ways to write at places of an array: `(array, places, values) -> array`.

Bools, which JAX does not add or multiply, are joined by "or" and "and".
"""

import jax.numpy as jnp


def assigned(array, places, values):
  """The values in place of the elements."""
  return array.at[places].set(values)


def added(array, places, values):
  """The sums of the elements and all values of their place."""
  at = array.at[places]
  return at.max(values) if values.dtype == jnp.bool_ else at.add(values)


def multiplied(array, places, values):
  """The products of the elements and all values of their place."""
  at = array.at[places]
  return at.min(values) if values.dtype == jnp.bool_ else at.multiply(values)
