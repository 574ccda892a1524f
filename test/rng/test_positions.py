"""Words of single elements equal those of a whole draw."""

import jax
import jax.numpy as jnp
import pytest

from torchax.rng import positions, threefry

SHAPE = (7, 9)
GENERATORS = ("threefry2x32", "threefry4x32", "philox4x32", "torch_philox")


@pytest.mark.parametrize("impl", GENERATORS)
@pytest.mark.parametrize("indices", [range(63), (62, 5, 5, 0)], ids=("all", "some"))
def test_words_at_indices_equal_the_whole_draw(impl, indices):
  key = jax.random.fold_in(jax.random.key(3, impl=impl), 5)
  assert positions.is_addressable(key, SHAPE)
  indices = jnp.array(indices, jnp.uint32)
  found = positions.words_at(impl, jax.random.key_data(key), indices)
  for have, want in zip(found, threefry.two_words(key, SHAPE), strict=True):
    assert jnp.array_equal(have, want.reshape(-1)[indices])


@pytest.mark.parametrize("impl", GENERATORS)
def test_indices_have_32_bits(impl):
  assert not positions.is_addressable(jax.random.key(0, impl=impl), (2**16, 2**16))


def test_rbg_and_the_older_threefry_have_no_positions():
  assert not positions.is_addressable(jax.random.key(0, impl="rbg"), SHAPE)
  with jax.threefry_partitionable(False):
    assert not positions.is_addressable(jax.random.key(0), SHAPE)
