"""Flax modules in torch programs, as users of upstream write them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import torchax

linen = pytest.importorskip("flax.linen", reason="Flax is optional")

from torchax.flax import FlaxNNModule  # noqa: E402
from torchax.interop import jax_view, torch_view  # noqa: E402

X = jnp.ones((1, 3))


@pytest.mark.parametrize("seed", [0, 5])
def test_parameters_are_drawn_from_the_environments_key(seed):
  env = torchax.Environment()
  env.manual_seed(seed)
  key = env.prng_key
  expected = linen.Dense(2).init(key, X)["params"]["kernel"]
  first, second = (
    jax_view(FlaxNNModule(env, linen.Dense(2), (torch_view(X),)).params.kernel)
    for _ in range(2)
  )
  np.testing.assert_array_equal(first, expected)
  assert not np.array_equal(first, second)
  data = jax.random.key_data(env.prng_key)
  assert not np.array_equal(data, jax.random.key_data(key))
