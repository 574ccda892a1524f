"""`KeyedFunction`: key and count are operands, the advance returns without arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from torchax.errors import TracedDrawError
from torchax.interop import jax_jit, jax_view
from torchax.rng import KeyedFunction, NewOperands, RngState


def _drop(array):
  return jax_view(lambda x: F.dropout(x, 0.5))(array)


def _rand(generator=None) -> torch.Tensor:
  return torch.rand(3, device="jax", generator=generator)


def test_the_key_and_the_count_are_typed_operands():
  pure = KeyedFunction(_drop)
  closed = jax.make_jaxpr(pure)(pure.values(), jnp.ones(4))
  kinds = [str(var.aval) for var in closed.jaxpr.invars]
  assert kinds == ["key<fry>[]", "uint32[]", "float32[4]"]
  assert not closed.consts


def test_the_advance_is_static_and_has_no_array(env):
  pure = KeyedFunction(lambda x: _drop(_drop(x)))
  out, advance = jax.eval_shape(pure, pure.values(), jnp.ones(4))
  assert advance.total == 2 and advance.draws == (2,)
  assert jax.tree.leaves(advance) == []
  assert len(jax.tree.leaves((out, advance))) == 1


def test_a_cached_call_brings_the_advance_back(env):
  pure = KeyedFunction(lambda x: _drop(_drop(x)))
  jitted = jax.jit(pure)
  for calls in range(1, 4):
    pure.run(lambda rng: jitted(rng, jnp.ones(4)))
    assert env.rng.state.count == 2 * calls
  assert jitted._cache_size() == 1


def test_operands_depend_on_nothing_that_was_computed(env):
  """Two calls of a step share no array of the random state."""
  pure = KeyedFunction(_drop)
  jitted = jax.jit(pure)
  ((key, _),) = pure.values()
  pure.run(lambda rng: jitted(rng, jnp.ones(4)))
  ((later_key, count),) = pure.values()
  assert later_key is key
  assert isinstance(count, np.uint32) and count == 1


def test_a_reseed_inside_comes_back_as_a_leaf(env):
  def reseeded(x):
    torch.manual_seed(6)
    return _drop(x)

  pure = KeyedFunction(reseeded)
  pure.run(lambda rng: jax.jit(pure)(rng, jnp.ones(4)))
  assert env.rng.state.state_dict() == RngState.from_seed(6).advance(1).state_dict()


def test_exception_restores_the_stream_and_generators(env):
  generator = torch.Generator().manual_seed(0)

  def fails(x):
    _rand(generator)
    _rand()
    raise KeyError("mine")

  before, words = env.rng.state.state_dict(), generator.get_state()
  pure = KeyedFunction(fails)
  for _ in range(2):
    with pytest.raises(KeyError, match="mine"):
      pure.run(lambda rng: jax.jit(pure)(rng, jnp.ones(4)))
    assert env.rng.state.state_dict() == before
    assert torch.equal(generator.get_state(), words)


def test_trying_abstractly_advances_nothing(env):
  generator = torch.Generator().manual_seed(0)
  pure = KeyedFunction(lambda x: jax_view(_rand(generator)) + _drop(x))
  before, words = env.rng.state.state_dict(), generator.get_state()
  traced = pure.try_abstractly(lambda rng: jax.jit(pure).trace(rng, jnp.ones(3)))
  assert env.rng.state.state_dict() == before
  assert torch.equal(generator.get_state(), words)
  kinds = [str(var.aval) for var in traced.jaxpr.jaxpr.invars]
  assert kinds == ["key<fry>[]", "uint32[]", "uint32[1,2]", "float32[3]"]


def test_a_generator_costs_one_more_trace_and_then_none():
  generator = torch.Generator().manual_seed(0)
  traces = []

  def f(x):
    traces.append(None)
    return jax_view(_rand(generator)) + x

  pure = KeyedFunction(f)
  jitted = jax.jit(pure)
  for _ in range(4):
    pure.run(lambda rng: jitted(rng, jnp.zeros(3)))
  assert len(traces) == 2


def test_new_operands_is_not_caught_by_except_exception():
  assert not issubclass(NewOperands, Exception)


def test_a_branch_that_draws_more_gets_more_words():
  """Shapes select the branch; more words are taken, and the old shape still works."""
  generator = torch.Generator().manual_seed(0)

  def f(x):
    return torch.stack([_rand(generator) for _ in range(x.shape[0])])

  compiled = jax_jit(f)
  few, many = torch.ones(1, device="jax"), torch.ones(4, device="jax")
  drawn = [compiled(few), compiled(many), compiled(many)]
  generator.manual_seed(0)
  assert torch.equal(drawn[0], f(few))
  assert torch.equal(drawn[1], f(many))
  assert torch.equal(drawn[2], f(many))


def test_a_branch_that_draws_fewer_takes_no_more_than_it_draws():
  generator = torch.Generator().manual_seed(0)

  def f(x):
    return torch.stack([_rand(generator) for _ in range(x.shape[0])])

  compiled = jax_jit(f)
  few, many = torch.ones(1, device="jax"), torch.ones(4, device="jax")
  drawn = [compiled(many), compiled(few), compiled(few), compiled(many)]
  generator.manual_seed(0)
  expected = [f(many), f(few), f(few), f(many)]
  assert all(map(torch.equal, drawn, expected))


def test_nested_call_with_fewer_generator_draws_matches_eager():
  generator = torch.Generator().manual_seed(0)

  def f(x):
    return torch.stack([_rand(generator) for _ in range(x.shape[0])])

  compiled = jax_jit(f)
  few, many = torch.ones(1, device="jax"), torch.ones(4, device="jax")
  compiled(many)
  nested = jax_jit(
    lambda: (compiled(few), compiled(many), compiled(few), compiled(few))
  )
  generator.manual_seed(0)
  drawn = [*nested(), *nested()]
  words = generator.get_state()
  generator.manual_seed(0)
  expected = [f(x) for x in (few, many, few, few) * 2]
  assert all(map(torch.equal, drawn, expected))
  assert torch.equal(generator.get_state(), words)


def test_function_without_draws_runs_in_any_raw_transformation(env):
  doubled = jax_view(jax_jit(lambda x: x * 2))
  before = env.rng.state.state_dict()
  x = jnp.arange(3.0)
  assert jnp.array_equal(jax.jit(doubled)(x), x * 2)
  assert jnp.array_equal(jax.vmap(doubled)(x), x * 2)
  assert jnp.array_equal(jax.checkpoint(doubled)(x), x * 2)
  assert jax.eval_shape(doubled, x).shape == (3,)
  assert env.rng.state.state_dict() == before


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.checkpoint])
def test_compiled_function_with_draws_raises_in_raw_transforms(env, transform):
  def noisy(x):
    return F.dropout(x, 0.5)

  before = env.rng.state.state_dict()
  with pytest.raises(TracedDrawError, match="noisy inside a raw.*rng="):
    transform(jax_view(jax_jit(noisy)))(jnp.ones((2, 3)))
  assert env.rng.state.state_dict() == before


def test_compiled_function_with_a_generator_raises_in_raw_jit(env):
  generator = torch.Generator().manual_seed(0)
  words = generator.get_state()
  compiled = jax_jit(lambda: _rand(generator))
  with pytest.raises(TracedDrawError):
    jax.jit(jax_view(compiled))()
  assert torch.equal(generator.get_state(), words)
  drawn = compiled()
  words = generator.get_state()
  with pytest.raises(TracedDrawError):
    jax.jit(jax_view(compiled))()
  assert torch.equal(generator.get_state(), words)
  generator.manual_seed(0)
  assert torch.equal(drawn, _rand(generator))


def test_a_traced_state_is_saved_and_restored_in_its_function(env):
  def f():
    torch.rand(2, device="jax")
    state = torch.jax.get_rng_state()
    first = torch.rand(2, device="jax")
    torch.jax.set_rng_state(state)
    return first, torch.rand(2, device="jax"), torch.rand(2, device="jax")

  expected = f()
  torch.manual_seed(0)
  compiled = jax_jit(f)()
  for ours, eager in zip(compiled, expected):
    assert torch.equal(ours, eager)
  assert torch.equal(compiled[0], compiled[1])
  assert env.rng.state.count == 3


def test_a_traced_state_is_refused_outside_of_its_function(env):
  saved = []

  def f(x):
    saved.append(torch.jax.get_rng_state())
    return x

  jax_jit(f)(torch.ones(2, device="jax"))
  before = env.rng.state.state_dict()
  with pytest.raises(ValueError, match="same side"):
    torch.jax.set_rng_state(saved[0])
  assert env.rng.state.state_dict() == before


def test_the_traced_state_can_be_returned(env):
  torch.rand(1, device="jax")

  def f(x):
    dropped = F.dropout(x, 0.5)
    state = env.rng.state
    return dropped, state.key, state.count

  _, key, count = jax_jit(f)(torch.ones(2, device="jax"))
  assert count.item() == 2
  assert jnp.array_equal(
    jax.random.key_data(key), jax.random.key_data(env.rng.state.key)
  )


def test_streams_of_other_implementations_are_carried_too(env):
  draw = jax_jit(lambda: _rand())
  threefry = draw()
  for impl in ("rbg", "unsafe_rbg"):
    with env.rng_scope(RngState.from_seed(0, impl)):
      compiled = draw()
    with env.rng_scope(RngState.from_seed(0, impl)):
      assert torch.equal(compiled, _rand())
    assert not torch.equal(compiled, threefry)
