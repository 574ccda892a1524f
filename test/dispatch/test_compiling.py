"""Fallback of lowerings that need the values of arrays, and its errors."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compare import assert_same
from registries import ONES, define, on_jax

import torchax
from torchax.errors import DataDependentError
from torchax.interop import jax_jit
from torchax.ops import jtorch
from torchax.ops.op_base import op
from torchax.registry import operators
from torchax.registry.operators import register_torch_function_op

DATA_DEPENDENT = {
  "a mask as an index": (lambda x: x[x > 1], [2.0, 3.0]),
  "nonzero": (lambda x: jnp.nonzero(x > 1)[0] * 1.0, [2.0, 3.0]),
  "a branch": (lambda x: x + 1 if x.sum() > 0 else x, [1.0, 2.0, 3.0, 4.0]),
  "a number": (lambda x: x * float(x[1]), [0.0, 1.0, 2.0, 3.0]),
  "an integer": (lambda x: jnp.arange(int(x[2])) * 1.0, [0.0, 1.0]),
  "numpy": (lambda x: jnp.asarray(np.asarray(x) + 1), [1.0, 2.0, 3.0, 4.0]),
  "a shape": (lambda x: jnp.ones(x[2].astype(int)), [1.0, 1.0]),
  "a slice": (lambda x: x[: x[2].astype(int)], [0.0, 1.0]),
  "a list": (lambda x: jnp.asarray(x.tolist()), [0.0, 1.0, 2.0, 3.0]),
}


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_lowering_that_needs_values_falls_back_at_once(name):
  function, expected = DATA_DEPENDENT[name]
  packet = define("(Tensor x) -> Tensor")
  calls = []

  @op(packet)
  def lowering(x):
    calls.append(isinstance(x, jax.core.Tracer))
    return function(x)

  tensor = torch.arange(4.0).to("jax")
  for _ in range(3):
    assert_same(packet(tensor), torch.tensor(expected))
  assert calls == [True, False, False, False]
  assert operators.all_aten_ops[packet].execution.compiled is None


@pytest.mark.parametrize("name", DATA_DEPENDENT)
@pytest.mark.parametrize("is_known", [False, True])
def test_error_names_a_lowering_that_needs_values(name, is_known):
  function, _ = DATA_DEPENDENT[name]
  packet = define("(Tensor x) -> Tensor")

  @op(packet)
  def picked(x):
    return function(x)

  tensor = torch.arange(4.0).to("jax")
  if is_known:
    packet(tensor)
  found = rf"picked of {re.escape(str(packet))} needs the values of(.|\n)*jax_jit"
  with pytest.raises(DataDependentError, match=found) as raised:
    jax_jit(packet)(tensor)
  assert raised.value.__cause__ is not None


def test_error_names_an_array_function_that_needs_values():
  def first(x):
    return x[: int(x.sum())]

  jtorch.register_function(torch.corrcoef, is_user_defined=True)(first)
  try:
    tensor = torch.tensor([1.0, 0.0, 2.0]).to("jax")
    with torchax.default_env():
      assert_same(torch.corrcoef(tensor), torch.tensor([1.0, 0.0, 2.0]))
      with pytest.raises(DataDependentError, match="first of (.|\n)*corrcoef"):
        jax_jit(torch.corrcoef)(tensor)
  finally:
    ours = operators.all_torch_functions[torch.corrcoef].replaced
    operators.register(dataclasses.replace(ours, is_user_defined=True))


def test_other_errors_in_a_trace_are_unchanged():
  packet = define("(Tensor x) -> Tensor")
  op(packet)(lambda x: "a" + x)
  with pytest.raises(TypeError, match="concatenate"):
    jax_jit(packet)(on_jax())


def test_lowering_that_sometimes_needs_values_falls_back_then():
  packet = define("(Tensor x, Tensor index) -> Tensor")
  op(packet)(lambda x, index: x[index])
  tensor = torch.arange(4.0).to("jax")
  mask = tensor > 1
  assert_same(packet(tensor, mask.long()), torch.tensor([0.0, 0.0, 1.0, 1.0]))
  assert operators.all_aten_ops[packet].execution.compiled is None
  assert_same(packet(tensor, mask), torch.tensor([2.0, 3.0]))
  assert operators.all_aten_ops[packet].execution.compiled is None
  assert_same(packet(tensor, mask.long()), torch.tensor([0.0, 0.0, 1.0, 1.0]))


def test_fallback_affects_one_program_and_is_logged_once(caplog):
  packet = define("(Tensor x, bool masked) -> Tensor")
  traced = []

  @op(packet)
  def picked(x, masked):
    traced.append((masked, isinstance(x, jax.core.Tracer)))
    return x[x > 1] if masked else x + 1

  operator = operators.all_aten_ops[packet]
  before = dataclasses.replace(operator)
  tensor = torch.arange(4.0).to("jax")
  with caplog.at_level("WARNING", logger="torchax"):
    for _ in range(2):
      assert_same(packet(tensor, True), torch.tensor([2.0, 3.0]))
      assert_same(packet(tensor, False), torch.arange(4.0) + 1)
  assert traced == [(True, True), (True, False), (False, True), (True, False)]
  assert operators.all_aten_ops[packet] is operator == before
  (record,) = [r for r in caplog.records if r.name == "torchax"]
  message = record.getMessage()
  assert message.startswith(f"The lowering picked of {packet} does not compile")
  assert "compiled=False" in message and "NonConcreteBooleanIndex" in message
  with torchax.Environment(), caplog.at_level("WARNING", logger="torchax"):
    assert_same(packet(tensor, True), torch.tensor([2.0, 3.0]))
  assert len([r for r in caplog.records if r.name == "torchax"]) == 1


def test_a_lowering_that_compiles_is_traced_once():
  packet = define("(Tensor x) -> Tensor")
  calls = []
  op(packet)(lambda x: calls.append(type(x)) or x + 1)
  for _ in range(3):
    assert_same(packet(on_jax()), ONES + 1)
  assert len(calls) == 1 and issubclass(calls[0], jax.core.Tracer)


def test_wrong_arguments_do_not_trigger_the_fallback():
  packet = define("(Tensor x, Tensor y) -> Tensor")

  @op(packet)
  def lowering(x, y):
    if x.shape != y.shape:
      raise TypeError(f"got a {type(x).__name__} of another shape")
    return x + y

  with pytest.raises(TypeError, match="got a ArrayImpl of another shape"):
    packet(on_jax(), torch.ones(2).to("jax"))
  assert operators.all_aten_ops[packet].execution.compiled is None
  assert_same(packet(on_jax(), on_jax()), ONES + 1)


def test_in_place_and_out_forms_of_uncompiled_lowerings_work():
  """`clamp` represents operators that read their numbers."""
  clamp = torch.ops.aten.clamp.default
  ours = operators.all_aten_ops[torch.ops.aten.clamp]
  env = torchax.Environment()

  def lowering(self, min=None, max=None):
    return jnp.clip(self, float(self[0]), max)

  env.override_op_definition(clamp, lowering, is_jax_function=True)
  tensor = env.to_xla(torch.tensor([1.0, 0.0, 5.0]))
  tensor[:].clamp_(0.0, 3.0)
  assert_same(tensor, torch.tensor([1.0, 1.0, 3.0]))
  out = env.to_xla(torch.zeros(3))
  torch.clamp(env.to_xla(torch.tensor([2.0, 0.0, 5.0])), 0.0, 3.0, out=out)
  assert_same(out, torch.tensor([2.0, 2.0, 3.0]))
  assert operators.all_aten_ops[torch.ops.aten.clamp] is ours


def test_a_torch_function_that_needs_data_has_a_gradient():
  def torch_function(x):
    return torch.overrides.handle_torch_function(torch_function, (x,), x)

  register_torch_function_op(torch_function, lambda x: x[x > 1] ** 2)
  try:
    with torchax.default_env():
      for _ in range(2):
        tensor = torch.arange(4.0).to("jax").requires_grad_()
        result = torch_function(tensor)
        assert_same(result, torch.tensor([4.0, 9.0]))
        result.sum().backward()
        assert_same(tensor.grad, torch.tensor([0.0, 0.0, 4.0, 6.0]))
  finally:
    del operators.all_torch_functions[torch_function]
