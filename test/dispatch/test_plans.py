"""Plans, made and called by hand: operands and keys, programs, checks, draws."""

import jax
import pytest
import torch

import torchax
from torchax.dispatch.plans import Plan

aten = torch.ops.aten
DROPOUT = torch.ops.torchax.dropout.default


def plan(op) -> Plan:
  env = torchax.default_env()
  return Plan(op, env._dispatcher.operator(op), env)


def ones(*size) -> torch.Tensor:
  return torch.ones(*size, device="jax")


def test_call_sorts_runs_and_wraps():
  result = plan(aten.add.Tensor)((ones(2), 3.0), {"alpha": 2})
  assert type(result) is torchax.tensor.Tensor and result.tolist() == [7.0, 7.0]


def test_numbers_are_operands_and_dims_are_static():
  flatten = plan(aten.add.Tensor).flattener.flatten
  (_, two), key = flatten((ones(2), 2.0), {})
  (_, three), other = flatten((ones(2), 3.0), {})
  assert (float(two), float(three)) == (2.0, 3.0) and key == other
  flatten = plan(aten.sum.dim_IntList).flattener.flatten
  (array,), key = flatten((ones(2, 3), [0]), {})
  assert array.shape == (2, 3) and key != flatten((ones(2, 3), [1]), {})[1]


@pytest.mark.usefixtures("strict_mode")  # reads operands
def test_rebuild_restores_the_arguments():
  flattener = plan(aten.add.Tensor).flattener
  operands, key = flattener.flatten((ones(4)[1:], 2.0), {"alpha": 3})
  (view, number), kwargs = flattener.rebuild(key, operands)
  assert view.shape == (3,) and float(number) == 2.0 and float(kwargs["alpha"]) == 3


def test_program_serves_all_numbers_and_shapes_of_a_key():
  add = plan(aten.add.Tensor)
  for number in (1.0, 2.0):
    for size in (2, 3):
      assert add((ones(size), number), {}).tolist() == [1 + number] * size
  assert len(add.programs) == 1
  add((ones(2), ones(2)), {})
  assert len(add.programs) == 2


def test_refused_arguments_leave_no_program():
  add = plan(aten.add.Tensor)
  with pytest.raises(RuntimeError, match="must match the size"):
    add((ones(2), ones(3)), {})
  assert len(add.programs) == 0


def test_other_shapes_of_a_program_are_checked_too():
  add = plan(aten.add.Tensor)
  add((ones(2), ones(2)), {})
  with pytest.raises(RuntimeError, match="must match the size"):
    add((ones(2), ones(3)), {})
  assert add((ones(3), ones(3)), {}).tolist() == [2.0] * 3


def test_sampler_takes_one_draw_and_redraw_takes_none():
  dropout, stream, draws = plan(DROPOUT), torchax.rng.current(), []
  before = stream.state.count
  first = dropout((ones(64), 0.5), {}, draws)
  assert stream.state.count == before + 1
  repeated = dropout.redraw(draws[-1], (ones(64), 0.5))
  assert torch.equal(repeated, first) and stream.state.count == before + 1
  assert not torch.equal(dropout((ones(64), 0.5), {}), first)


def test_failed_sampler_leaves_its_stream():
  stream = torchax.rng.current()
  before = stream.state
  with pytest.raises(RuntimeError):
    plan(aten.bernoulli.p)((ones(2), 2.0), {})
  assert stream.state == before


def test_shapes_compute_and_draw_nothing():
  dropout, before = plan(DROPOUT), torchax.rng.current().state
  given = jax.ShapeDtypeStruct((4, 2), "float32")
  found = dropout.shapes((given, 0.5), {})
  assert found.shape == (4, 2) and torchax.rng.current().state == before
