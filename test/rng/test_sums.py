"""Samplers that add floats, in an order that the compiler chooses.

They are compiled with the compiler effort of user programs, so that eager and compiled
draws have equal bits. All other samplers must not add floats.
"""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from rng.draws import DRAWS
from rng.jaxprs import equations

import torchax
from torchax.functions.dropout import keep_mask
from torchax.interop import jax_view
from torchax.registry import operators

ADDING_UP = {
  "multinomial with replacement": DRAWS["multinomial with replacement"],
  "dirichlet": lambda x: torch._sample_dirichlet(x.detach()),
}
FURTHER = {
  "poisson": lambda x: torch.poisson(x.detach()),
  "binomial": lambda x: torch.binomial(x.detach() * 9, torch.full_like(x, 0.4)),
  "gamma": lambda x: torch._standard_gamma(x.detach()),
  "rrelu": lambda x: F.rrelu(x, training=True),
}
_SUMS = {"reduce_sum", "cumsum", "cumprod", "reduce_prod", "dot_general"}


def _sums_of_floats(jaxpr) -> set[str]:
  return {
    equation.primitive.name
    for equation in equations(jaxpr)
    if equation.primitive.name in _SUMS
    and jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
  }


@pytest.mark.parametrize("name", {**DRAWS, **FURTHER, **ADDING_UP})
def test_samplers_that_add_up_say_so(name):
  draw = {**DRAWS, **FURTHER, **ADDING_UP}[name]
  with torchax.default_env():
    view = jax_view(draw)
    closed = jax.make_jaxpr(view)(jnp.linspace(0.1, 1, 6), rng=jax.random.key(0))
  assert bool(_sums_of_floats(closed.jaxpr)) == (name in ADDING_UP)


def test_only_summing_samplers_are_order_dependent():
  rows = operators.all_aten_ops.values()
  known = {str(row.torch_op).split(".")[1] for row in rows if row.draw.order_dependent}
  assert known == {"multinomial", "_sample_dirichlet"}


EXACT = {
  "dropout": lambda x: F.dropout(x, 0.3),
  "native_dropout": lambda x: torch.native_dropout(x, 0.3, True),
  "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
  "randint": lambda x: torch.randint(-5, 9, (6,), device="jax"),
  "random_": lambda x: torch.empty_like(x).random_(7),
  "attention": lambda x: keep_mask(x, (2, 3), 0.3),
  "rand": lambda x: torch.rand(x.shape, device="jax"),
  "rand_like": lambda x: torch.rand_like(x, dtype=torch.bfloat16),
}
# Operations on floats that have one correct result, whatever surrounds them.
_ONE_RESULT = {
  *("convert_element_type", "copy", "stop_gradient", "select_n", "broadcast_in_dim"),
  *("ge", "gt", "le", "lt", "eq", "ne", "reshape", "floor", "pjit", "jit", "clamp"),
}


@pytest.mark.parametrize("draw", EXACT.values(), ids=EXACT)
def test_the_arithmetic_of_exact_samplers_has_one_result(draw):
  """At most one operation rounds, so XLA can contract or reorder nothing."""
  with torchax.default_env():
    view = jax_view(draw)
    closed = jax.make_jaxpr(view)(jnp.linspace(0.1, 1, 6), rng=jax.random.key(0))
  of_floats = [
    equation.primitive.name
    for equation in equations(closed.jaxpr)
    if any(
      jnp.issubdtype(variable.aval.dtype, jnp.floating)
      for variable in [*equation.invars, *equation.outvars]
    )
  ]
  rounding = [name for name in of_floats if name not in _ONE_RESULT]
  assert rounding in ([], ["mul"]), rounding


def test_the_exact_samplers():
  each_operator = operators.all_aten_ops.values()
  known = {
    str(each.torch_op).split(".")[1] for each in each_operator if each.draw.is_exact
  }
  assert known == {
    *("bernoulli", "native_dropout", "_fused_dropout", "dropout", "keep_mask"),
    *("rand", "rand_like", "randint", "randint_like", "random"),
  }
