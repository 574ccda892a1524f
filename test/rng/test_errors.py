"""Refusals of the random state: each error names the remedy, and no state changes."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

import torchax
from torchax import errors
from torchax.errors import ClosedScopeError, SeedError, TracedDrawError
from torchax.interop import functional_rng, gradient_checkpoint, jax_jit, jax_view

drop = jax_view(lambda x: F.dropout(x, 0.5) * x)


@pytest.fixture(autouse=True)
def state_stays(env):
  """Assert that a test leaves the stream where it was."""
  torch.rand(1, device="jax")
  stream, before = env.rng, env.rng.state.state_dict()
  yield
  assert env.rng is stream
  assert env.rng.state.state_dict() == before


# A draw in a raw transformation -----------------------------------------------------


def _scan(f):
  return jax.lax.scan(lambda carry, _: (f(carry), None), jnp.ones(3), None, length=2)


RAW = {
  "jit": lambda f: jax.jit(f)(jnp.ones(3)),
  "scan": _scan,
  "fori_loop": lambda f: jax.lax.fori_loop(0, 2, lambda _, x: f(x), jnp.ones(3)),
  "cond": lambda f: jax.lax.cond(True, f, f, jnp.ones(3)),
  "checkpoint": lambda f: jax.checkpoint(f)(jnp.ones(3)),
  "make_jaxpr": lambda f: jax.make_jaxpr(f)(jnp.ones(3)),
  "eval_shape": lambda f: jax.eval_shape(f, jnp.ones(3)),
  "jit of grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))(jnp.ones(3)),
  "grad of jit": lambda f: jax.grad(lambda x: jax.jit(f)(x).sum())(jnp.ones(3)),
}


@pytest.mark.parametrize("name", RAW)
def test_draw_in_raw_transformation_raises_with_three_remedies(name):
  with pytest.raises(TracedDrawError) as caught:
    RAW[name](drop)
  message = str(caught.value)
  assert "dropout" in message
  for way in ("jax_jit", "rng=key", "env.rng_scope(key)"):
    assert way in message


VMAP = {
  "vmap": lambda f: jax.vmap(f)(jnp.ones((2, 3))),
  "vmap of vmap": lambda f: jax.vmap(jax.vmap(f))(jnp.ones((2, 3, 1))),
  "jit of vmap": lambda f: jax.jit(jax.vmap(f))(jnp.ones((2, 3))),
  "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum())(jnp.ones((2, 3))),
  "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x: f(x).sum()))(jnp.ones((2, 3))),
  "jacrev": lambda f: jax.vmap(lambda x: jax.vjp(f, x)[0])(jnp.ones((2, 3))),
}


@pytest.mark.parametrize("name", VMAP)
def test_a_draw_in_a_raw_vmap_asks_for_a_policy(name):
  with pytest.raises(TracedDrawError, match="dropout.*jax_vmap.*randomness"):
    VMAP[name](drop)


@pytest.mark.parametrize("name", ["jit", "scan"])
def test_the_next_draw_after_a_refused_one_works(env, name):
  with env.rng_scope(4):
    expected = torch.rand(3, device="jax")
  with env.rng_scope(4):
    with pytest.raises(TracedDrawError):
      RAW[name](drop)
    assert torch.equal(torch.rand(3, device="jax"), expected)


def test_a_draw_from_an_outer_scope_is_refused_too(env):
  with env.rng_scope(1) as stream:
    with pytest.raises(TracedDrawError):
      RAW["jit"](drop)
    assert stream.state.count == 0


def test_draw_in_raw_transformation_inside_jax_jit_raises():
  x = torch.ones(3, device="jax")
  for name in ("jit", "scan", "cond"):
    with pytest.raises(TracedDrawError, match="dropout"):
      jax_jit(lambda x, name=name: RAW[name](drop) and x)(x)
  with pytest.raises(TracedDrawError, match="jax_vmap.*randomness"):
    jax_jit(lambda x: VMAP["vmap"](drop) and x)(x)


def test_taking_a_key_in_a_raw_transformation_is_refused(env):
  for take in (
    lambda: env.get_and_rotate_prng_key(),
    lambda: env.prng_key,
    lambda: env.rng.next_key(),
    lambda: env.rng.fork("data").next_key(),
  ):
    with pytest.raises(TracedDrawError, match="rng="):
      jax.jit(lambda x, take=take: take() and x)(jnp.ones(1))


def test_traced_seed_in_a_raw_transformation_raises(env):
  with pytest.raises((TracedDrawError, jax.errors.ConcretizationTypeError)):
    jax.jit(lambda seed: env.manual_seed(seed))(jnp.int32(1))
  with pytest.raises(TracedDrawError):
    jax.jit(lambda key: setattr(env, "prng_key", key))(jax.random.key(1))


def test_a_checkpointed_draw_in_a_raw_transformation_is_refused():
  with pytest.raises(TracedDrawError, match="rng="):
    jax.jit(jax_view(gradient_checkpoint(lambda x: F.dropout(x))))(jnp.ones(3))


# The three remedies, as the errors describe them -------------------------------------


def test_the_first_way_out_works(env):
  with env.rng_scope(2):
    compiled = jax_jit(lambda x: F.dropout(x, 0.5))
    x = torch.ones(32, device="jax")
    assert not torch.equal(compiled(x), compiled(x))


def test_the_second_way_out_works():
  compiled = jax.jit(lambda x, key: drop(x, rng=key))
  x = jnp.ones(32)
  first = compiled(x, jax.random.key(0))
  assert jnp.array_equal(first, compiled(x, jax.random.key(0)))
  assert not jnp.array_equal(first, compiled(x, jax.random.key(1)))
  assert compiled._cache_size() == 1


def test_the_third_way_out_works(env):
  @jax.jit
  def compiled(x, key):
    with env.rng_scope(key):
      return drop(x)

  x = jnp.ones(32)
  first = compiled(x, jax.random.key(0))
  assert not jnp.array_equal(first, compiled(x, jax.random.key(1)))
  assert jnp.array_equal(first, drop(x, rng=jax.random.key(0)))


def test_a_key_for_each_row_is_a_way_out_of_vmap():
  keys = jax.random.split(jax.random.key(0), 3)
  x = jnp.ones((3, 16))
  rows = jax.vmap(lambda x, key: drop(x, rng=key))(x, keys)
  for row, key in zip(rows, keys):
    assert jnp.array_equal(row, drop(jnp.ones(16), rng=key))


def test_a_functional_form_goes_through_every_transformation():
  pure = functional_rng(lambda x: F.dropout(x, 0.5) * x)
  state = torchax.RngState.from_seed(3)
  expected, after = pure(state, jnp.ones(16))
  compiled, after_compiled = jax.jit(pure)(state, jnp.ones(16))
  assert jnp.array_equal(compiled, expected)
  assert (
    after_compiled.state_dict() == after.state_dict() == state.advance(1).state_dict()
  )
  _, steps = jax.lax.scan(
    lambda state, x: pure(state, x)[::-1],
    torchax.RngState(state.key, jnp.uint32(0)),
    jnp.ones((3, 16)),
  )
  assert jnp.array_equal(steps[0], expected)
  assert len({tuple(step.tolist()) for step in steps}) == 3


# Differentiation runs the function once ---------------------------------------------


DIFFERENTIATED = {
  "grad": lambda f: jax.grad(lambda x: f(x).sum())(jnp.ones(64)) / 2,
  "jvp": lambda f: jax.jvp(f, (jnp.ones(64),), (jnp.ones(64),))[0],
  "vjp": lambda f: jax.vjp(f, jnp.ones(64))[0],
  "linearize": lambda f: jax.linearize(f, jnp.ones(64))[0],
  "grad of grad": lambda f: (
    jax.grad(lambda x: jax.grad(lambda y: f(y).sum())(x).sum())(jnp.ones(64)) / 2
  ),
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_differentiation_draws_as_a_plain_call(env, name):
  with env.rng_scope(5):
    expected = drop(jnp.ones(64))
  with env.rng_scope(5) as stream:
    out = DIFFERENTIATED[name](drop)
    assert stream.state.count == 1
  assert jnp.array_equal(out, expected)


# Seeds, states, scopes --------------------------------------------------------------


@pytest.mark.parametrize("seed", [1.5, "a", None, True, [1], torch.ones(2)], ids=repr)
def test_a_wrong_seed_is_refused_wherever_it_is_given(env, seed):
  def use_as_rng():
    return drop(jnp.ones(2), rng=seed)

  def scope():
    with env.rng_scope(seed):
      pass

  def prop():
    with env.override_property(prng=seed):
      pass

  givers = [lambda: env.manual_seed(seed), scope, prop]
  givers += [lambda: setattr(env, "prng_key", seed)]
  givers += [lambda: functional_rng(lambda x: x)(seed, jnp.ones(2))]
  if seed is not None:
    givers.append(use_as_rng)
  for give in givers:
    with pytest.raises(SeedError, match="seed|integer"):
      give()


def test_a_closed_scope_says_how_to_draw():
  with torchax.rng_scope(0) as stream:
    pass
  with pytest.raises(ClosedScopeError, match=r"Draw inside.*env\.rng"):
    stream.next_key()


@pytest.mark.parametrize(
  "error, builtin",
  [
    (errors.TracedDrawError, RuntimeError),
    (errors.ClosedScopeError, RuntimeError),
    (errors.TracedStateError, RuntimeError),
    (errors.SeedError, TypeError),
  ],
)
def test_an_error_is_of_the_type_that_torch_users_catch(error, builtin):
  assert issubclass(error, builtin)


# Parameters that torch rejects ------------------------------------------------------


def _ones(device, *shape, dtype=torch.float32):
  return torch.ones(shape or (4,), dtype=dtype).to(device)


# Parameters inside tensors are tested in `test_random_ops.py`.
REJECTED = {
  "uniform_ from > to": lambda d: _ones(d).uniform_(2, 1),
  "uniform_ of integers": lambda d: _ones(d, dtype=torch.int32).uniform_(),
  "normal_ std < 0": lambda d: _ones(d).normal_(0, -1),
  "normal std < 0, tensor mean": lambda d: torch.normal(_ones(d), -1.0),
  "normal std < 0, with size": lambda d: torch.normal(0.0, -1.0, (3,), device=d),
  "normal shapes that do not broadcast": lambda d: torch.normal(_ones(d), _ones(d, 3)),
  "normal_ of integers": lambda d: _ones(d, dtype=torch.int32).normal_(),
  "exponential_ 0": lambda d: _ones(d).exponential_(0.0),
  "exponential_ < 0": lambda d: _ones(d).exponential_(-1.0),
  "exponential_ of integers": lambda d: _ones(d, dtype=torch.int32).exponential_(),
  "cauchy_ sigma 0": lambda d: _ones(d).cauchy_(0.0, 0.0),
  "cauchy_ sigma < 0": lambda d: _ones(d).cauchy_(0.0, -1.0),
  "cauchy_ of integers": lambda d: _ones(d, dtype=torch.int32).cauchy_(),
  "log_normal_ std 0": lambda d: _ones(d).log_normal_(0.0, 0.0),
  "log_normal_ std < 0": lambda d: _ones(d).log_normal_(0.0, -1.0),
  "log_normal_ of integers": lambda d: _ones(d, dtype=torch.int32).log_normal_(),
  "geometric_ p 0": lambda d: _ones(d).geometric_(0.0),
  "geometric_ p 1": lambda d: _ones(d).geometric_(1.0),
  "geometric_ p > 1": lambda d: _ones(d).geometric_(1.5),
  "bernoulli_ p > 1": lambda d: _ones(d).bernoulli_(1.5),
  "bernoulli_ p < 0": lambda d: _ones(d).bernoulli_(-0.5),
  "bernoulli of integers": lambda d: torch.bernoulli(_ones(d, dtype=torch.int32)),
  "random_ empty": lambda d: _ones(d).random_(3, 3),
  "random_ reversed": lambda d: _ones(d).random_(3, 1),
  "random_ to 0": lambda d: _ones(d).random_(0),
  "random_ too wide": lambda d: _ones(d, dtype=torch.int8).random_(0, 1000),
  "randint empty": lambda d: torch.randint(3, 3, (2,), device=d),
  "randint reversed": lambda d: torch.randint(3, 1, (2,), device=d),
  "randint high 0": lambda d: torch.randint(0, (2,), device=d),
  "randint too wide": lambda d: torch.randint(0, 300, (2,), device=d, dtype=torch.int8),
  "randint_like empty": lambda d: torch.randint_like(_ones(d), 3, 3),
  "randperm n < 0": lambda d: torch.randperm(-1, device=d),
  "rand of integers": lambda d: torch.rand(2, device=d, dtype=torch.int32),
  "randn of integers": lambda d: torch.randn(2, device=d, dtype=torch.int32),
  "rand_like of integers": lambda d: torch.rand_like(_ones(d, dtype=torch.int32)),
  "randn_like of integers": lambda d: torch.randn_like(_ones(d, dtype=torch.int32)),
  "rand of a negative size": lambda d: torch.rand(-1, device=d),
  "randn of a negative size": lambda d: torch.randn(2, -1, device=d),
  "randint of a negative size": lambda d: torch.randint(5, (-2,), device=d),
  "normal of a negative size": lambda d: torch.normal(0.0, 1.0, (-1,), device=d),
  "multinomial sum 0": lambda d: torch.multinomial(_ones(d) * 0, 1),
  "multinomial sum 0 in one row": lambda d: torch.multinomial(
    torch.tensor([[1.0, 1.0], [0.0, 0.0]]).to(d), 1, True
  ),
  "multinomial weight < 0": lambda d: torch.multinomial(-_ones(d), 1),
  "multinomial weight inf": lambda d: torch.multinomial(_ones(d) / 0, 1),
  "multinomial weight nan": lambda d: torch.multinomial(_ones(d) * float("nan"), 1),
  "multinomial 0 samples": lambda d: torch.multinomial(_ones(d), 0),
  "multinomial too many samples": lambda d: torch.multinomial(_ones(d), 5),
  "multinomial of integers": lambda d: torch.multinomial(
    _ones(d, dtype=torch.int32), 1
  ),
  "multinomial of three dimensions": lambda d: torch.multinomial(_ones(d, 2, 2, 2), 1),
  "dropout p > 1": lambda d: F.dropout(_ones(d), 1.5),
  "dropout p < 0": lambda d: F.dropout(_ones(d), -0.1),
  "dropout module p > 1": lambda d: torch.nn.Dropout(2.0),
  "torch.dropout p > 1": lambda d: torch.dropout(_ones(d), 1.5, True),
  "native_dropout p > 1": lambda d: torch.native_dropout(_ones(d), 1.5, True),
  "dropout2d p > 1": lambda d: F.dropout2d(_ones(d, 1, 2, 2, 2), 1.5),
  "alpha_dropout p < 0": lambda d: F.alpha_dropout(_ones(d), -0.1, True),
  "feature_dropout of one dimension": lambda d: torch.feature_dropout(
    _ones(d), 0.5, True
  ),
  "attention dropout p > 1": lambda d: F.scaled_dot_product_attention(
    _ones(d, 1, 2, 2), _ones(d, 1, 2, 2), _ones(d, 1, 2, 2), dropout_p=1.5
  ),
  "init.uniform_ reversed": lambda d: torch.nn.init.uniform_(_ones(d), 2, 1),
  "init.normal_ std < 0": lambda d: torch.nn.init.normal_(_ones(d), 0, -1),
}


@pytest.mark.parametrize("inside", [False, True], ids=["plain", "environment"])
@pytest.mark.parametrize("name", REJECTED)
def test_invalid_arguments_raise_torch_error_type_without_a_draw(env, name, inside):
  with pytest.raises(Exception) as on_cpu:
    REJECTED[name]("cpu")
  with env if inside else env.disabled(), pytest.raises(on_cpu.type) as on_jax:
    REJECTED[name]("jax")
  assert not isinstance(on_jax.value, errors.MixedDeviceError)
  assert not isinstance(on_jax.value, errors.OperatorNotFound)
