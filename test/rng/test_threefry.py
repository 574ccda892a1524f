"""Our form of threefry2x32 gives JAX's bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from torchax.rng import threefry

SHAPES = [(), (1,), (7,), (3, 5), (2, 0, 3), (4, 129, 65)]
KEYS = [0, 1, 2**31, 2**32 - 1]


@pytest.mark.parametrize("seed", KEYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_jax(shape, seed):
  key = jax.random.fold_in(jax.random.key(seed), 5)
  expected = jax.random.bits(key, shape)
  assert np.array_equal(threefry.bits(key, shape), expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_uniform_numbers_are_those_of_jax(shape, dtype):
  key = jax.random.key(3)
  expected = jax.random.uniform(key, shape, dtype)
  actual = threefry.uniform(key, shape, dtype)
  assert actual.dtype == dtype
  assert np.array_equal(actual, expected)
  assert np.array_equal(
    jax.jit(threefry.uniform, static_argnums=(1, 2))(key, shape, dtype), expected
  )


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_generators_are_left_to_jax(impl):
  key = jax.random.key(3, impl=impl)
  expected = jax.random.uniform(key, (5,), jnp.float32)
  assert np.array_equal(threefry.uniform(key, (5,), jnp.float32), expected)


def test_rows_of_keys():
  keys = jax.random.split(jax.random.key(0), 4)
  expected = jax.vmap(lambda key: jax.random.uniform(key, (3,), jnp.float32))(keys)
  actual = jax.vmap(lambda key: threefry.uniform(key, (3,), jnp.float32))(keys)
  assert np.array_equal(actual, expected)


def test_the_older_counting_is_left_to_jax():
  with jax.threefry_partitionable(False):
    key = jax.random.key(3)
    expected = jax.random.uniform(key, (6,), jnp.float32)
    assert np.array_equal(threefry.uniform(key, (6,), jnp.float32), expected)
