"""Operator tables of environments: later registrations, overrides and lookup."""

import jax.numpy as jnp
import pytest
import torch
from compare import assert_same
from registries import ONES, define, on_jax

import torchax
from torchax.compat import torch_compat
from torchax.errors import OperatorNotFound
from torchax.ops import jaten
from torchax.ops.op_base import op
from torchax.registry import operators
from torchax.registry.operators import Kind, register_torch_function_op


def test_a_living_environment_sees_a_later_registration():
  packet = define("(Tensor x) -> Tensor")
  tensor = on_jax()
  with pytest.raises(OperatorNotFound, match=str(packet)):
    packet(tensor)
  op(packet)(lambda x: x + 1)
  assert_same(packet(tensor), ONES + 1)


def test_a_living_environment_sees_a_later_function():
  def torch_function(x):
    return torch.overrides.handle_torch_function(torch_function, (x,), x)

  tensor = on_jax()
  with torchax.default_env():
    register_torch_function_op(torch_function, lambda x: x + 5)
    try:
      assert_same(torch_function(tensor), ONES + 5)
    finally:
      del operators.all_torch_functions[torch_function]


def test_an_override_belongs_to_one_environment():
  packet = define("(Tensor x) -> Tensor")
  op(packet)(lambda x: x + 1)
  other = torchax.tensor.Environment()
  other.override_op_definition(packet, lambda x: x + 9)
  assert_same(packet(on_jax()), ONES + 1)
  assert_same(packet(other.to_xla(ONES)), ONES + 9)


def test_an_override_takes_functions_of_tensors():
  packet = define("(Tensor x) -> Tensor")
  env = torchax.tensor.Environment()
  env.override_op_definition(packet, lambda x: torch.cat([x, x]))
  assert_same(packet(env.to_xla(ONES)), torch.ones(6))


def test_an_override_takes_torch_functions():
  env = torchax.tensor.Environment()
  env.override_op_definition(torch.nn.functional.silu, lambda x, inplace=False: x - 7)
  with env:
    assert_same(torch.nn.functional.silu(env.to_xla(ONES)), ONES - 7)
  silu = torch.nn.functional.silu
  assert_same(silu(on_jax()), silu(ONES))


def test_an_override_seen_after_use_drops_what_was_cached():
  env = torchax.tensor.Environment()
  tensor = env.to_xla(ONES)
  assert_same(torch.neg(tensor), -ONES)
  env.override_op_definition(torch.ops.aten.neg, lambda x: x + 3)
  assert_same(torch.neg(tensor), ONES + 3)


# Lookup -------------------------------------------------------------------------------


def test_an_operation_is_found_by_packet_and_by_overload():
  env = torchax.default_env()
  by_packet = env._get_op_or_decomp(torch.ops.aten.add)
  by_overload = env._get_op_or_decomp(torch.ops.aten.add.Tensor)
  assert by_packet is by_overload
  assert by_packet.func(jnp.ones(2), jnp.ones(2)).tolist() == [2.0, 2.0]


def test_decomposition_runs_without_a_lowering():
  env = torchax.default_env()
  decomposed = [
    operation
    for operation in operators.decompositions
    if isinstance(operation, torch._ops.OpOverload)
    and operation not in operators.all_aten_ops
    and operation.overloadpacket not in operators.all_aten_ops
    and not torch_compat.is_composite(operation)
  ]
  assert decomposed
  for operation in decomposed:
    found = env._get_op_or_decomp(operation)
    assert found.func is operators.decompositions[operation]
    assert found.kind is Kind.TENSORS


def test_composite_operations_use_torchs_own_decomposition():
  """Its reference in Python may take other arguments, or ask for itself."""
  composite = torch.ops.aten.nll_loss.default
  assert composite in operators.decompositions
  found = torchax.default_env()._get_op_or_decomp(composite)
  scores, target = torch.rand(4, 3), torch.arange(3).repeat(2)[:4]
  summed = found.func(scores, target, None, 2, -100)
  assert summed == torch.nn.functional.nll_loss(scores, target, reduction="sum")


def test_an_unknown_operation_is_not_found():
  packet = define("(Tensor x) -> Tensor")
  with pytest.raises(OperatorNotFound, match=str(packet)):
    torchax.default_env()._get_op_or_decomp(packet)


def test_upstreams_names_lead_to_the_registry():
  assert jaten.op is op
  assert jaten.all_ops is operators.all_aten_ops
  assert operators.all_aten_ops[torch.ops.aten.add].is_jax_function
