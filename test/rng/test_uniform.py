"""Elements of a mask computed by position equal those of the whole mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from torchax.rng import samplers, threefry, uniform


@pytest.mark.parametrize("p", (0.0, 0.25, 0.7, 0.9, 1 - 1e-8))
@pytest.mark.parametrize("shape", ((9,), (3, 5), (2, 3, 4, 7)), ids=str)
def test_elements_equal_the_whole_draw(shape, p):
  key = jax.random.fold_in(jax.random.key(3), 8)
  whole = samplers.bernoulli(key, shape, p)
  places = np.random.default_rng(0).permutation(whole.size).astype(np.uint32)
  found = uniform.bernoulli_at(
    jax.random.key_data(key), jnp.asarray(places), *uniform.steps_below(p)
  )
  np.testing.assert_array_equal(found, whole.reshape(-1)[places])


@pytest.mark.parametrize(
  "key, shape, expected",
  (
    (lambda: jax.random.key(0), (2**16, 2**15), True),
    (lambda: jax.random.key(0), (2**16, 2**16), False),  # more than a word can count
    (lambda: jax.random.key(0, impl="rbg"), (4,), False),
  ),
  ids=("threefry", "too many", "rbg"),
)
def test_positions_exist_for_keys_and_shapes(key, shape, expected):
  assert threefry.is_addressable(key(), shape) == expected


def test_the_older_threefry_has_no_positions():
  with jax.threefry_partitionable(False):
    assert not threefry.is_addressable(jax.random.key(0), (4,))
