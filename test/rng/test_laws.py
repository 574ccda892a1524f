"""The laws that hold over every boundary, as equalities to the last bit.

`docs/rng-design.md` states them. A boundary here is a way to run a function of tensors:
eagerly, compiled, compiled inside compiled, checkpointed, differentiated. Loops and
maps are in `test_loops.py` and `test_maps.py`, nests of all in `test_nests.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rng.boundaries import (
  BOUNDARIES,
  all_equal,
  drop,
  identity,
  ramp,
  rand,
  stream_state,
)
from rng.draws import DRAWS, all_draws

from torchax.errors import TracedDrawError
from torchax.interop import (
  functional_rng,
  gradient_checkpoint,
  jax_jit,
  jax_value_and_grad,
  jax_view,
)
from torchax.rng import RngState

# eager == jit == nested jit == checkpointed == value_and_grad -------------------------


@pytest.mark.parametrize("name", BOUNDARIES)
def test_every_draw_is_the_eager_one(env, name):
  wrapped = BOUNDARIES[name](all_draws)
  with env:
    expected = all_draws(ramp()) + all_draws(ramp())
  after = stream_state(env)
  torch.manual_seed(0)
  drawn = wrapped(ramp()) + wrapped(ramp())
  for label, first, second in zip([*DRAWS] * 2, drawn, expected):
    assert torch.equal(first, second), label
  assert stream_state(env) == after


def test_eager_draws_are_the_same_inside_the_environment_block(env):
  with env:
    inside = all_draws(ramp())
  torch.manual_seed(0)
  for label, first, second in zip(DRAWS, all_draws(ramp()), inside):
    assert torch.equal(first, second), label


def test_the_functional_form_draws_the_eager_numbers(env):
  with env:
    expected = all_draws(ramp())
  state = RngState.from_seed(0)
  pure = functional_rng(all_draws)
  before = stream_state(env)
  for function in (pure, jax.jit(pure)):
    drawn, after = function(state, ramp().jax())
    assert all(map(jnp.array_equal, drawn, jax_view(expected)))
    assert after.state_dict() == before
  assert stream_state(env) == before


def test_a_jax_view_with_a_key_draws_the_eager_numbers(env):
  with env:
    expected = jax_view(all_draws(ramp()))
  view = jax_view(all_draws)
  for rng in (0, jax.random.key(0), RngState.from_seed(0)):
    assert all(map(jnp.array_equal, view(ramp().jax(), rng=rng), expected))
  compiled = jax.jit(view)(ramp().jax(), rng=jax.random.key(0))
  assert all(map(jnp.array_equal, compiled, expected))


def test_alpha_dropout_drops_the_same_eager_and_compiled(env):
  """XLA may contract its arithmetic, so results differ by up to 1 ulp."""
  x = ramp(256)
  with env:
    eager = F.alpha_dropout(x, 0.3, training=True)
  torch.manual_seed(0)
  compiled = jax_jit(lambda x: F.alpha_dropout(x, 0.3, training=True))(x)
  np.testing.assert_array_max_ulp(eager.numpy(), compiled.numpy(), maxulp=1)


@pytest.mark.parametrize("name", ["normal", "multinomial", "bernoulli", "uniform_"])
def test_a_draw_gives_its_parameters_no_gradient(name):
  """The law of torch holds for `backward` and for gradients of JAX."""
  draws = {
    "normal": lambda x: torch.normal(x, x),
    "multinomial": lambda x: torch.multinomial(x, 3).float(),
    "bernoulli": lambda x: torch.bernoulli(x / 10),
    "uniform_": lambda x: (x * 1).uniform_(1.0, 2.0),
  }
  loss = lambda x: draws[name](x).sum() + 3 * x.sum()  # noqa: E731
  x = ramp()
  _, grad = jax_value_and_grad(loss)(x)
  assert grad.tolist() == [3.0] * 6
  leaf = x.clone().requires_grad_()
  loss(leaf).backward()
  assert leaf.grad.tolist() == [3.0] * 6


def test_calls_go_on_where_eager_draws_and_other_calls_left_off():
  compiled = jax_jit(drop)
  x = ramp(32)
  mixed = [drop(x), compiled(x), compiled(x), drop(x), compiled(x)]
  torch.manual_seed(0)
  assert all_equal(mixed, [drop(x) for _ in range(5)])


@pytest.mark.parametrize("wrap", [jax_jit, gradient_checkpoint])
def test_shape_dependent_draws_advance_by_the_actual_number(env, wrap):
  def f(x):
    return torch.stack([rand() for _ in range(len(x))])

  wrapped = wrap(f)
  for n, total in ((3, 3), (1, 4), (3, 7)):
    wrapped(ramp(n))
    assert env.rng.state.count == total


# Masks in the backward pass -----------------------------------------------------------


@pytest.mark.parametrize("wrap", [identity, jax_jit], ids=["eager", "jit"])
@pytest.mark.parametrize("block", [identity, gradient_checkpoint, jax_jit])
def test_the_gradient_has_the_mask_of_the_forward_pass(wrap, block):
  masked = block(lambda x: x * drop(torch.ones(64, device="jax")))
  step = wrap(
    jax_value_and_grad(lambda x: ((y := masked(x)).sum(), y), {"has_aux": True})
  )
  (_, forward), grad = step(torch.ones(64, device="jax"))
  assert set(forward.tolist()) == {0.0, 2.0}
  assert torch.equal(grad, forward)


def test_backward_in_a_compiled_function_uses_the_forward_mask():
  def step(x):
    leaf = x.detach().requires_grad_()
    y = leaf * drop(torch.ones(64, device="jax"))
    y.sum().backward()
    return y.detach(), leaf.grad

  x = torch.ones(64, device="jax")
  expected = step(x)
  torch.manual_seed(0)
  compiled = jax_jit(step)(x)
  assert torch.equal(*compiled) and all_equal(compiled, expected)


# Nothing leaks ------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOUNDARIES)
def test_no_tracer_leaks_from_a_boundary(env, name):
  def f(x):
    return [drop(x), torch.randn(6, device="jax")]

  with jax.checking_leaks():
    BOUNDARIES[name](f)(ramp())
  assert isinstance(env.rng.state.count, int)
  assert not isinstance(env.rng.state.key, jax.core.Tracer)


class _Mine(BaseException):
  """Not an Exception: like KeyboardInterrupt, no handler catches it."""


def _failing(error):
  def f(x):
    drop(x)
    torch.manual_seed(3)
    rand()
    raise error

  return f


# Outside of a trace a checkpointed function simply runs, draw by draw.
@pytest.mark.parametrize("name", [name for name in BOUNDARIES if name != "checkpoint"])
@pytest.mark.parametrize("error", [ValueError, _Mine])
def test_an_exception_in_a_boundary_leaves_the_state_as_it_was(env, name, error):
  rand()
  expected = rand()
  torch.manual_seed(0)
  rand()
  stream, before = env.rng, stream_state(env)
  wrapped = BOUNDARIES[name](_failing(error))
  for _ in range(2):
    with pytest.raises(error):
      wrapped(ramp())
    assert env.rng is stream and stream_state(env) == before
  assert torch.equal(rand(), expected)


def test_a_shape_error_found_by_jax_leaves_the_state_as_it_was(env):
  compiled = jax_jit(lambda x: drop(x) @ torch.rand(5, device="jax"))
  before = stream_state(env)
  with pytest.raises(Exception, match="shape|size|dimension|contract"):
    compiled(ramp())
  assert stream_state(env) == before


def test_failed_draw_leaves_the_enclosing_trace_usable(env):
  def f(x):
    with pytest.raises(TracedDrawError):
      jax.vmap(jax_view(drop))(jnp.ones((2, 3)))
    return drop(x)

  x = ramp(32)
  expected = drop(x)
  torch.manual_seed(0)
  assert torch.equal(jax_jit(f)(x), expected)
  assert env.rng.state.count == 1


# Seeding inside compiled functions ----------------------------------------------------


@pytest.mark.parametrize("name", ["jit", "nested jit", "checkpoint", "value_and_grad"])
def test_seed_inside_a_boundary_matches_eager_and_persists(env, name):
  def f(x):
    first = drop(x)
    torch.manual_seed(7)
    return [first, drop(x)]

  x = ramp(32)
  expected = [*f(x), rand(), *f(x), rand()]
  torch.manual_seed(0)
  wrapped = BOUNDARIES[name](f)
  drawn = [*wrapped(x), rand(), *wrapped(x), rand()]
  assert all_equal(drawn, expected)


def test_traced_seed_in_a_compiled_function_matches_eager(env):
  def f(seed):
    env.manual_seed(seed)
    return rand()

  compiled = jax_jit(f)
  for number in (5, 6, -1, 2**31 - 1):
    seed = torch.tensor(number, dtype=torch.int32).to("jax")
    expected = [f(seed), rand()]
    torch.manual_seed(0)
    assert all_equal([compiled(seed), rand()], expected)


def test_a_traced_seed_does_not_retrace(env):
  traces = []

  def f(seed):
    traces.append(None)
    env.manual_seed(seed)
    return rand()

  compiled = jax_jit(f)
  drawn = [compiled(torch.tensor(n, dtype=torch.int32).to("jax")) for n in range(3)]
  assert len(traces) == 1
  assert len({tuple(numbers.tolist()) for numbers in drawn}) == 3


def test_a_key_argument_inside_a_compiled_function_seeds_it(env):
  compiled = jax_jit(lambda key: (env.manual_seed(key), rand())[1])
  for seed in (3, 4):
    with env.rng_scope(seed):
      expected = rand()
    assert torch.equal(compiled(jax.random.key(seed)), expected)


# Keys are used as JAX allows ----------------------------------------------------------


def test_no_key_is_used_twice_as_far_as_jax_can_tell(env):
  def f(x):
    return drop(x) + torch.randn(6, device="jax") + drop(x)

  with jax.debug_key_reuse(True):
    f(ramp())
    for wrap in (jax_jit, gradient_checkpoint):
      wrapped = wrap(f)
      wrapped(ramp())
      wrapped(ramp())
    jax_jit(jax_value_and_grad(gradient_checkpoint(lambda x: f(x).sum())))(ramp())
    with env.rng_scope(env.rng.fork("data")):
      jax_jit(f)(ramp())
    _ = env.prng_key
    jax_jit(f)(ramp())
