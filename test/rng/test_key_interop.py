"""Keys of the stream in other libraries: one draw, fresh on each call, never constant.

The libraries take typed keys, also while JAX refuses legacy ones (`conftest.py`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from accelerators import ON_CPU

import torchax
from torchax.compat import versions
from torchax.errors import TracedDrawError
from torchax.interop import call_jax, jax_jit, jax_view, torch_view

SIZE = 256


def _key():
  return torchax.default_env().get_and_rotate_prng_key()


def jax_function(x):
  return call_jax(jax.random.normal, _key(), x.shape)


def linen_dropout(x):
  linen = pytest.importorskip("flax.linen", reason="the flax extra is not installed")
  layer = linen.Dropout(0.5, deterministic=False)
  return call_jax(lambda k, x: layer.apply({}, x, rngs={"dropout": k}), _key(), x)


def nnx_dropout(x):
  nnx = pytest.importorskip("flax.nnx", reason="the flax extra is not installed")
  layer = nnx.Dropout(0.5)
  return call_jax(lambda k, x: layer(x, rngs=nnx.Rngs(dropout=k)), _key(), x)


def nnx_initialisation(x):
  nnx = pytest.importorskip("flax.nnx", reason="the flax extra is not installed")
  return call_jax(lambda k, x: nnx.Linear(SIZE, 8, rngs=nnx.Rngs(k))(x), _key(), x)


def equinox_dropout(x):
  eqx = pytest.importorskip("equinox", reason="the interop extra is not installed")
  layer = eqx.nn.Dropout(0.5)
  return call_jax(lambda k, x: layer(x, key=k), _key(), x)


def equinox_initialisation(x):
  eqx = pytest.importorskip("equinox", reason="the interop extra is not installed")
  return call_jax(lambda k, x: eqx.nn.Linear(SIZE, 8, key=k)(x), _key(), x)


def haiku_dropout(x):
  hk = pytest.importorskip("haiku", reason="the interop extra is not installed")
  layer = hk.transform(lambda x: hk.dropout(hk.next_rng_key(), 0.5, x))
  return call_jax(lambda k, x: layer.apply({}, k, x), _key(), x)


def numpyro_distribution(x):
  dist = pytest.importorskip(
    "numpyro.distributions", reason="the interop extra is not installed"
  )
  return call_jax(lambda k, x: dist.Normal().sample(k, x.shape), _key(), x)


def numpyro_model(x):
  numpyro = pytest.importorskip("numpyro", reason="the interop extra is not installed")

  def model(x):  # integers, because XLA rounds floats differently op by op and compiled
    rate = numpyro.sample("rate", numpyro.distributions.Uniform(0.3, 0.7))
    return numpyro.sample("hits", numpyro.distributions.Bernoulli(rate * x))

  return call_jax(lambda k, x: numpyro.handlers.seed(model, k)(x), _key(), x)


each_library = pytest.mark.parametrize(
  "draw",
  [
    jax_function,
    linen_dropout,
    nnx_dropout,
    nnx_initialisation,
    equinox_dropout,
    equinox_initialisation,
    haiku_dropout,
    numpyro_distribution,
    numpyro_model,
  ],
  ids=lambda draw: draw.__name__,
)


def _are_same(first, second) -> bool:
  """Return True if the numbers are equal.

  JAX 0.10.0 rounds the libraries' own arithmetic differently op by op and compiled; so
  do accelerators, which fuse multiplications and additions.
  """
  rounds_alike = ON_CPU and not versions.is_older(jax.__version__, "0.10.2")
  if not rounds_alike and first.is_floating_point():
    return torch.allclose(first, second, rtol=1.3e-6, atol=1e-5)
  return torch.equal(first, second)


@pytest.fixture
def x():
  return torch.ones(SIZE, device="jax")


@each_library
def test_a_key_gives_fresh_numbers_eager_and_compiled(draw, x, env):
  torch.manual_seed(5)
  eager = [draw(x), draw(x)]
  assert env.rng.state.count == 2, "one draw for each key"
  compiled = jax_jit(draw)
  torch.manual_seed(6)
  other = compiled(x)
  torch.manual_seed(5)  # after the compilation: the key is an operand
  again = [compiled(x), compiled(x)]
  assert env.rng.state.count == 2
  assert not torch.equal(eager[0], eager[1])
  assert not torch.equal(other, again[0])
  assert all(_are_same(a, b) for a, b in zip(eager, again))


@each_library
def test_two_keys_of_one_compiled_function_differ(draw, x):
  first, second = jax_jit(lambda x: (draw(x), draw(x)))(x)
  assert not torch.equal(first, second)
  torch.manual_seed(0)
  assert _are_same(draw(x), first) and _are_same(draw(x), second)


@each_library
def test_a_raw_transformation_refuses_a_key_and_takes_one(draw, x, env):
  frozen = jax.jit(jax_view(draw))
  before = env.rng.state
  with pytest.raises(TracedDrawError, match="get_and_rotate_prng_key"):
    frozen(x.jax())
  assert env.rng.state == before
  one, two = (frozen(x.jax(), rng=jax.random.key(seed)) for seed in (1, 2))
  assert not jnp.array_equal(one, two)
  with env.rng_scope(jax.random.key(1)):
    assert _are_same(draw(x), torch_view(one))


def test_keys_and_draws_of_one_stream_are_independent(env):
  """A library's draws do not repeat the torch draws around them."""
  draws = []
  for _ in range(6):
    draws.append(torch.rand(10_000, device="jax").numpy())
    draws.append(call_jax(jax.random.uniform, _key(), (10_000,)).numpy())
  correlations = np.corrcoef(draws) - np.eye(len(draws))
  assert np.abs(correlations).max() < 5 / np.sqrt(10_000)


def test_a_generator_gives_keys_too(env):
  generator = torch.Generator().manual_seed(3)
  before = env.rng.state

  def draw():
    return call_jax(jax.random.normal, env.get_and_rotate_prng_key(generator), (8,))

  first, second = draw(), draw()
  generator.manual_seed(3)
  assert torch.equal(draw(), first) and not torch.equal(first, second)
  assert env.rng.state == before, "the environment's stream stands still"


def test_raw_key_data_serves_functions_without_typed_keys():
  """Old code expects uint32[2]; here JAX is configured to accept such a key."""
  key = _key()
  with jax.legacy_prng_key("allow"):
    raw = jax.random.normal(jax.random.key_data(key), (8,))
  assert jnp.array_equal(raw, jax.random.normal(key, (8,)))
