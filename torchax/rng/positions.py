"""Elements of a mask by their positions, without the rest of it.

With threefry2x32 element i of a draw is a function of the key and of i. What needs a
mask part by part draws it so, as often as it likes, and has the bits that
`samplers.bernoulli` draws as a whole. Other generators have no such form.
"""

import math

import jax

from torchax.rng import threefry, units


def is_addressable(key: jax.Array, shape: tuple[int, ...]) -> bool:
  """True if the elements of a draw of this shape have positions.

  Args:
    key: a typed key.
    shape: of the whole draw.
  """
  return (
    str(jax.random.key_impl(key)) == threefry.NAME
    and bool(jax.config.jax_threefry_partitionable)
    and math.prod(shape) < 2**32
  )


def words_of(key: jax.Array) -> jax.Array:
  """The two words of an addressable key, uint32 of shape (2,)."""
  return jax.random.key_data(key)


def bernoulli_at(words, positions, high, low) -> jax.Array:
  """The elements of `samplers.bernoulli(key, shape, p)` at some positions; bool.

  Args:
    words: of the key.
    positions: in the flattened shape, uint32.
    high, low: `units.steps_below(p)`, of a p that has steps.
  """
  first, second = threefry.words_at(words, positions)
  return units.is_below_steps(first, second, high, low)
