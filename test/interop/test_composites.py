"""Composites: one name in the exported program, the same results everywhere."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compare import assert_same

import torchax
from torchax.export import exported_program_to_stablehlo
from torchax.ops.jlibrary import (
  _jit_composite_impl,
  register_jax_composite,
  register_torch_composite,
)
from torchax.registry import operators

aten = torch.ops.aten
library = torch.library.Library("torchax_test_jlibrary", "DEF")
mylib = torch.ops.torchax_test_jlibrary
library.define("softclip(Tensor x, float limit=1.0, str? mode=None) -> Tensor")
library.define("join(Tensor[] parts, int[] weights) -> Tensor")


def _softclip_on_cpu(x, limit=1.0, mode=None):
  return limit * torch.tanh(x / limit)


def _join_on_cpu(parts, weights):
  return sum(part * weight for part, weight in zip(parts, weights))


library.impl("softclip", _softclip_on_cpu, "CompositeExplicitAutograd")
library.impl("join", _join_on_cpu, "CompositeExplicitAutograd")


def softclip(x, limit=1.0, mode=None):
  return limit * jnp.tanh(x / limit)


@pytest.fixture(scope="module", autouse=True)
def _registered():
  """Register the composites of these tests; remove them at the end."""
  added = (mylib.softclip, mylib.join)
  before = operators.all_aten_ops[aten.gelu]
  register_jax_composite("test.softclip", softclip, mylib.softclip)
  register_jax_composite(
    "test.join", lambda parts, weights: _join_on_cpu(parts, weights), mylib.join
  )
  register_torch_composite("test.gelu", _gelu, aten.gelu)
  yield
  for op in added:
    del operators.all_aten_ops[op]
  operators.register(dataclasses.replace(before, is_user_defined=True))


def _gelu(self, *, approximate="none"):
  return self * 0.5 * (1 + torch.erf(self * 0.5**0.5))


class Module(torch.nn.Module):
  def __init__(self, function):
    super().__init__()
    self.function = function

  def forward(self, x):
    return self.function(x)


X = torch.linspace(-2, 2, 6)
CASES = {
  "softclip": lambda x: mylib.softclip(x, 2.0, "sharp"),
  "join": lambda x: mylib.join([x, x + 1], [2, 3]),
  "gelu": torch.nn.functional.gelu,
}


def test_exported_clamp_calls_clip():
  program = torch.export.export(Module(lambda x: x.clamp(0, 1)), (X,))
  assert "call @clip" in str(exported_program_to_stablehlo(program)[1].mlir_module())


@pytest.mark.parametrize("name", CASES)
def test_exported_program_keeps_the_composite_and_its_results(name):
  function = CASES[name]
  program = torch.export.export(Module(function), (X,))
  states, stablehlo = exported_program_to_stablehlo(program)
  assert f'stablehlo.composite "test.{name}"' in stablehlo.mlir_module()
  (output,) = stablehlo.call(states, (jnp.asarray(X.numpy()),))
  np.testing.assert_allclose(output, function(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_eager_mode_runs_the_composite(name):
  function = CASES[name]
  with torchax.default_env():
    assert_same(function(X.to("jax")), function(X))


def test_numbers_and_strings_are_attributes():
  text = jax.jit(lambda x: lowering()(x, 2.0, "sharp")).lower(jnp.ones(2)).as_text()
  assert "limit = 2.0" in text
  assert 'mode = "sharp"' in text


def lowering():
  return _jit_composite_impl("test.softclip", softclip)


TRANSFORMATIONS = {
  "grad": lambda f: jax.grad(lambda x: f(x).sum()),
  "jit of grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
  "vmap": jax.vmap,
  "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()),
  "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_jax_transforms_the_decomposition(name):
  transform, x = TRANSFORMATIONS[name], jnp.linspace(-1, 1, 6)
  np.testing.assert_allclose(
    transform(lowering())(x), transform(softclip)(x), rtol=1e-6
  )


def test_a_module_can_be_the_decomposition():
  composite = register_torch_composite("test.layer", torch.nn.ReLU())
  text = jax.jit(composite).lower(jnp.ones(2)).as_text()
  assert 'stablehlo.composite "test.layer"' in text


def test_jit_args_reach_jax_jit():
  inlined = _jit_composite_impl("test.inlined", softclip, inline=True)
  text = jax.jit(inlined).lower(jnp.ones(2)).as_text()
  # Main and the decomposition, without a call in it.
  assert text.count("func.func") == 2
