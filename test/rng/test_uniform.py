"""Elements of a mask computed by position equal those of the whole mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from torchax.rng import samplers, uniform


@pytest.mark.parametrize("impl", ("threefry2x32", "philox4x32"))
@pytest.mark.parametrize("p", (0.0, 0.25, 0.7, 0.9, 1 - 1e-8))
@pytest.mark.parametrize("shape", ((9,), (3, 5), (2, 3, 4, 7)), ids=str)
def test_elements_equal_the_whole_draw(shape, p, impl):
  key = jax.random.fold_in(jax.random.key(3, impl=impl), 8)
  whole = samplers.bernoulli(key, shape, p)
  places = np.random.default_rng(0).permutation(whole.size).astype(np.uint32)
  found = uniform.bernoulli_at(
    impl, jax.random.key_data(key), jnp.asarray(places), *uniform.steps_below(p)
  )
  np.testing.assert_array_equal(found, whole.reshape(-1)[places])
