"""Table of special plans: its rows and their order."""

import pytest
import torch

import torchax
from torchax.dispatch import special_plans
from torchax.dispatch.decomposed import TensorPlan
from torchax.registry.schema import schema_of

aten = torch.ops.aten

ROWS = {
  "function of tensors": aten.resize_.default,
  "in-place view": aten.t_.default,
  "view": aten.transpose.int,
  "refused operation": aten.q_scale.default,
  "copy to a tensor": aten.copy_.default,
  "cast or move": aten._to_copy.default,
  "factory": aten.new_zeros.default,
  "positional generator": aten.poisson.default,
  "convolution": aten.convolution.default,
  "copy of lists": aten._foreach_copy_.default,
}
# Operations that several rows accept, and the row that wins.
OVERLAPS = {
  aten.is_pinned.default: "function of tensors",
  aten.lift_fresh.default: "function of tensors",
  aten._nested_view_from_buffer.default: "view",
  aten.to.device: "view",
  aten._sparse_coo_tensor_unsafe.default: "refused operation",
  aten._to_copy.default: "cast or move",
}


def row(op) -> str | None:
  found = special_plans.find(op, schema_of(op))
  return found and found.name


def test_every_row_accepts_an_operation():
  assert [special.name for special in special_plans.TABLE] == list(ROWS)
  assert {name: row(op) for name, op in ROWS.items()} == {name: name for name in ROWS}
  assert row(aten.add.Tensor) is None


@pytest.mark.parametrize("op", OVERLAPS, ids=str)
def test_first_of_two_matching_rows_wins(op):
  schema = schema_of(op)
  takers = [
    special.name for special in special_plans.TABLE if special.takes(op, schema)
  ]
  assert len(takers) == 2 and row(op) == takers[0] == OVERLAPS[op]


def test_operators_of_an_environment_precede_the_table():
  env = torchax.Environment()
  env.override_op_definition(aten.transpose.int, lambda x, *dims: x)
  assert isinstance(env.plan_for(aten.transpose.int), TensorPlan)


def test_default_plan_is_built_on_demand(monkeypatch):
  env = torchax.Environment()
  asked = []
  by_registry = env._dispatcher._default_plan
  monkeypatch.setattr(
    env._dispatcher,
    "_default_plan",
    lambda op: asked.append(op) or by_registry(op),
  )
  for op in (aten.transpose.int, aten.copy_.default, aten.q_scale.default):
    env.plan_for(op)
  assert asked == [aten.copy_.default]
