"""Our implementation of threefry2x32 gives JAX's bits."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerators import cpu_only

from torchax.rng import rejection, samplers, threefry

SHAPES = [(), (1,), (7,), (3, 5), (2, 0, 3), (32, 32), (4, 129, 65)]
KEYS = [0, 1, 2**31, 2**32 - 1]
WIDTHS = ["uint8", "uint16", "uint32", "uint64"]
DRAWS = {
  "bfloat16": functools.partial(jax.random.uniform, shape=(9,), dtype=jnp.bfloat16),
  "float64": functools.partial(jax.random.uniform, shape=(9,), dtype=jnp.float64),
  "normal": functools.partial(jax.random.normal, shape=(9,), dtype=jnp.float32),
  "normal, float64": functools.partial(jax.random.normal, shape=(9,)),
  "randint": lambda key: jax.random.randint(key, (9,), 0, 10**12, jnp.int64),
  "permutation": lambda key: jax.random.permutation(key, 100),
  "split": lambda key: jax.random.normal(jax.random.split(key, (2, 3))[1, 2], (4,)),
  "fold_in": lambda key: jax.random.normal(jax.random.fold_in(key, 2**31), (4,)),
  "rows": lambda key: jax.vmap(jax.random.normal)(jax.random.split(key, 4)),
}


def draw(sampler, key, *args):
  return jax.jit(lambda key: sampler(key, *args))(key)


@pytest.fixture(autouse=True)
def x64():
  with jax.enable_x64(True):
    yield


@pytest.mark.parametrize("seed", KEYS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_bits_equal_jax(shape, seed, width):
  key = jax.random.fold_in(jax.random.key(seed), 5)
  expected = jax.random.bits(key, shape, width)
  actual = jax.random.bits(threefry.unrolled_key(key), shape, width)
  assert actual.dtype == expected.dtype
  assert np.array_equal(actual, expected)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_equal_jax(name):
  key = jax.random.key(3)
  sampler = threefry.with_unrolled_key(DRAWS[name])
  expected = DRAWS[name](key)
  assert expected.dtype == draw(sampler, key).dtype
  assert np.array_equal(draw(sampler, key), expected)


SAMPLERS = [
  (samplers.uniform, (5,), jnp.float32),
  (samplers.standard_exponential, (5,), jnp.float32),
  (samplers.normal, (5,), jnp.float32),
  (samplers.log_normal, (5,), jnp.float32),
  (samplers.bernoulli, (5,), 0.5),
  (samplers.integers, (5,), jnp.int32, 0, 7),
  (samplers.permutation, 5, jnp.int32),
  (samplers.exponential, (5,), jnp.float32),
  (samplers.cauchy, (5,), jnp.float32),
  (samplers.geometric, (5,), jnp.float32, 0.3),
  (samplers.multinomial, jnp.ones(5), 2, True),
  (samplers.multinomial, jnp.ones(5), 2, False),
  (rejection.poisson, jnp.ones(5), jnp.float32),
  (rejection.binomial, jnp.ones(5), jnp.ones(5) / 2, jnp.float32),
  (rejection.standard_gamma, jnp.ones(5), jnp.float32),
  (rejection.dirichlet, jnp.ones(5), jnp.float32),
]


@cpu_only("JAX's own threefry runs on accelerators")
@pytest.mark.parametrize("row", SAMPLERS, ids=lambda row: row[0].__name__)
def test_every_sampler_draws_as_with_jaxs_key(row, monkeypatch):
  sampler, *args = row
  key = jax.random.key(11)
  jaxpr = str(jax.make_jaxpr(lambda key: sampler(key, *args))(key))
  assert jaxpr.count("key<fry>") == 1, "only the argument is a key of JAX's own kind"
  ours = draw(sampler, key, *args)
  monkeypatch.setattr(threefry, "_can_unroll", lambda key: False)
  assert np.array_equal(ours, draw(sampler, key, *args))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_generators_are_left_to_jax(impl):
  key = jax.random.key(3, impl=impl)
  assert threefry.unrolled_key(key) is key


@pytest.mark.parametrize(
  "setting", [jax.threefry_partitionable(False), jax.debug_key_reuse(True)]
)
def test_left_to_jax(setting):
  """JAX's implementation runs with its older counters and its check of key reuse."""
  key = jax.random.key(3)
  with setting:
    assert threefry.unrolled_key(key) is key


def test_a_chain_of_draws_compiles_in_time():
  """With unrolled key derivations, compiling eleven draws took minutes."""

  def chain(key, x):
    for index in range(12):
      x = jnp.tanh(x) * samplers.normal(
        jax.random.fold_in(key, index), x.shape, x.dtype
      )
    return x

  lowered = jax.jit(chain).lower(jax.random.key(0), jnp.ones(4096, jnp.float32))
  start = time.perf_counter()
  lowered.compile()
  assert time.perf_counter() - start < 30, "seconds; it takes one"
