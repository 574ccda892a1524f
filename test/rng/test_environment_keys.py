"""Keys of an environment by upstream's names: read, written, rotated, overridden."""

import jax
import jax.numpy as jnp
import pytest
import torch
from rng.boundaries import (
  all_equal,
  identity,
  rand,
  stream_state,
)

from torchax.interop import (
  jax_jit,
)
from torchax.rng import is_typed_key, samplers


@pytest.mark.parametrize("wrap", [identity, jax_jit], ids=["eager", "jit"])
@pytest.mark.parametrize("draws_before", [0, 3])
def test_prng_key_read_and_set_back_repeats_the_draws(env, wrap, draws_before):
  f = wrap(rand)
  for _ in range(draws_before):
    rand()
  key = env.prng_key
  first = [f(), f()]
  env.prng_key = key
  assert all_equal([f(), f()], first)


def test_reading_the_key_after_draws_and_writing_it_back_goes_on(env):
  """Upstream's compiled functions do this; the draws must not repeat."""
  drawn = []
  for _ in range(4):
    drawn.append(tuple(rand().tolist()))
    env.prng_key = env.prng_key
  assert len(set(drawn)) == 4


def test_a_key_read_inside_a_compiled_function_goes_on_after_it(env):
  def f():
    first = rand()
    key = env.prng_key
    second = rand()
    env.prng_key = key
    return first, second, rand()

  eager = [*f(), rand(), *f(), rand()]
  assert torch.equal(eager[1], eager[2]) and not torch.equal(eager[2], eager[4])
  torch.manual_seed(0)
  compiled = jax_jit(f)
  assert all_equal([*compiled(), rand(), *compiled(), rand()], eager)


def test_param_prng_is_prng_key(env):
  rand()
  key = env.param.prng
  expected = rand()
  env.prng_key = key
  assert torch.equal(rand(), expected)


@pytest.mark.parametrize("wrap", [identity, jax_jit], ids=["eager", "jit"])
def test_override_property_draws_from_its_key_then_resumes(env, wrap):
  f = wrap(rand)
  outside = [f(), f()]
  torch.manual_seed(0)
  assert torch.equal(f(), outside[0])
  with env.override_property(prng=jax.random.key(5)):
    inside = [f(), f()]
  assert torch.equal(f(), outside[1])
  with env.override_property(prng=jax.random.key(5)):
    assert all_equal([f(), f()], inside)
  assert not torch.equal(inside[0], inside[1])


def test_override_property_restores_after_an_exception(env):
  before = stream_state(env)
  with pytest.raises(KeyError), env.override_property(prng=jax.random.key(5)):
    rand()
    raise KeyError
  assert stream_state(env) == before


def test_get_and_rotate_prng_key_is_a_draw_like_any_other(env):
  keys = [env.get_and_rotate_prng_key() for _ in range(3)]
  after = rand()
  torch.manual_seed(0)
  drawn = [rand() for _ in range(4)]
  for key, numbers in zip(keys, drawn):
    expected = jax.jit(lambda key: samplers.uniform(key, (6,), jnp.float32))(key)
    assert jnp.array_equal(expected, numbers.jax())
  assert torch.equal(after, drawn[3])


def test_compiled_get_and_rotate_prng_key_matches_eager(env):
  expected = [jax.random.key_data(env.get_and_rotate_prng_key()) for _ in range(2)]
  torch.manual_seed(0)
  compiled = jax_jit(lambda: env.get_and_rotate_prng_key())
  for data in expected:
    key = compiled()
    assert is_typed_key(key) and jnp.array_equal(jax.random.key_data(key), data)
