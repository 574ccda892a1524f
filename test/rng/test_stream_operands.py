"""Key and count of a stream are operands of compiled functions, never constants."""

import jax
import jax.numpy as jnp
import pytest
import torch
from rng.boundaries import (
  drop,
  ramp,
  stream_state,
)
from rng.draws import all_draws
from rng.jaxprs import equations

from torchax.interop import (
  functional_rng,
  gradient_checkpoint,
  jax_jit,
  jax_value_and_grad,
  jax_view,
)
from torchax.rng import RngState, is_typed_key
from torchax.rng.threefry import unrolled_key


def _constants(closed):
  yield from closed.consts
  for equation in equations(closed.jaxpr):
    for inner in equation.params.values():
      yield from getattr(inner, "consts", ())


def _baked_keys(closed) -> list[str]:
  """List the equations and constants with a key that is no operand."""
  found_equations = list(equations(closed.jaxpr))
  # The words of a key that has come in, under another implementation, are fine.
  words = {
    id(equation.outvars[0])
    for equation in found_equations
    if equation.primitive.name == "random_unwrap"
  }
  found = [
    str(equation)
    for equation in found_equations
    if equation.primitive.name == "random_seed"
    or (
      equation.primitive.name == "random_wrap" and id(equation.invars[0]) not in words
    )
  ]
  found += [
    f"constant {constant}"
    for constant in _constants(closed)
    if is_typed_key(constant)
    or (getattr(constant, "dtype", None) == jnp.uint32 and constant.size >= 2)
  ]
  return found


@pytest.mark.parametrize(
  "baked",
  [
    lambda: jax.random.uniform(jax.random.key(0)),
    lambda key=jax.random.key(0): jax.random.uniform(key),  # noqa: B008
    lambda data=jnp.zeros(2, jnp.uint32): jax.random.uniform(  # noqa: B008
      jax.random.wrap_key_data(data)
    ),
    lambda: jax.jit(lambda: jax.random.uniform(jax.random.key(0)))(),
    lambda key=jax.random.key(0): jax.random.uniform(unrolled_key(key)),  # noqa: B008
  ],
  ids=["seeded", "closed over", "raw data", "nested", "closed over, unrolled"],
)
def test_the_search_for_baked_keys_finds_them(baked):
  assert _baked_keys(jax.make_jaxpr(baked)())


TRACED = {
  "jit": lambda: jax_jit(drop),
  "nested jit": lambda: jax_jit(lambda x: jax_jit(drop)(jax_jit(drop)(x))),
  "checkpoint": lambda: jax_jit(gradient_checkpoint(drop)),
  "value_and_grad": lambda: jax_jit(jax_value_and_grad(lambda x: drop(x).sum())),
  "value_and_grad of checkpoint": lambda: jax_jit(
    jax_value_and_grad(gradient_checkpoint(lambda x: drop(x).sum()))
  ),
  "every draw": lambda: jax_jit(all_draws),
}


@pytest.mark.parametrize("name", TRACED)
def test_key_and_count_are_invars_and_never_constants(name):
  closed = TRACED[name]().trace(ramp()).jaxpr
  kinds = [str(var.aval) for var in closed.jaxpr.invars]
  assert sorted(kinds) == ["float32[6]", "key<fry>[]", "uint32[]"]
  assert _baked_keys(closed) == []
  used = [var for equation in closed.jaxpr.eqns for var in equation.invars]
  for var in closed.jaxpr.invars:
    assert any(var is other for other in used), f"{var.aval} is never used"


@pytest.mark.parametrize(
  "wrap", [lambda f: f, gradient_checkpoint], ids=["plain", "checkpoint"]
)
def test_the_key_of_a_jax_view_is_an_invar(wrap):
  view = jax_view(wrap(drop))
  closed = jax.make_jaxpr(view)(jnp.ones(6), rng=jax.random.key(0))
  kinds = [str(var.aval) for var in closed.jaxpr.invars]
  assert sorted(kinds) == ["float32[6]", "key<fry>[]"]
  assert _baked_keys(closed) == []


def test_the_state_of_a_functional_form_is_an_invar():
  closed = jax.make_jaxpr(functional_rng(drop))(RngState.from_seed(0), jnp.ones(6))
  assert str(closed.jaxpr.invars[0].aval) == "key<fry>[]"
  assert len(closed.jaxpr.invars) == 3 and _baked_keys(closed) == []


def test_new_seed_changes_numbers_without_recompiling(env):
  traces = []

  def f(x):
    traces.append(None)
    return drop(x) + torch.rand(32, device="jax")

  compiled = jax_jit(f)
  x = ramp(32)
  outs = []
  for seed in (None, None, 1, -1, 2**40, jax.random.key(3), None):
    if seed is not None:
      env.manual_seed(seed)
    outs.append(tuple(compiled(x).tolist()))
  with env.rng_scope(9):
    outs.append(tuple(compiled(x).tolist()))
  with env.rng_scope(RngState.from_seed(9).advance(100_000)):
    outs.append(tuple(compiled(x).tolist()))
  assert len(traces) == 1
  assert len(set(outs)) == len(outs)


def test_a_seed_after_compilation_gives_its_eager_numbers():
  compiled = jax_jit(drop)
  x = ramp(32)
  compiled(x)
  for seed in (5, 6):
    torch.manual_seed(seed)
    expected = drop(x)
    torch.manual_seed(seed)
    assert torch.equal(compiled(x), expected)


def _signature(text: str) -> str:
  return next(line for line in text.splitlines() if "@main" in line).split("->")[0]


def test_a_function_that_draws_nothing_has_no_key_parameter():
  signature = _signature(jax_jit(lambda x: x * 2).lower(ramp()).as_text())
  assert signature.count("%arg") == 1 and "ui32" not in signature
  signature = _signature(jax_jit(drop).lower(ramp()).as_text())
  assert signature.count("%arg") == 3 and signature.count("ui32") == 2


def test_a_function_that_draws_nothing_leaves_the_stream_alone(env):
  before = stream_state(env)
  jax_jit(lambda x: x * 2)(ramp())
  jax_value_and_grad(lambda x: x.sum())(ramp())
  gradient_checkpoint(lambda x: x * 2)(ramp())
  assert stream_state(env) == before
