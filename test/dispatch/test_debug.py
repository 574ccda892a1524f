"""Logging and checking of single operations."""

import logging

import pytest
import torch
from compare import assert_same
from ops.harness import floats

from torchax.config import Configuration
from torchax.dispatch import debug
from torchax.errors import MixedDeviceError
from torchax.tensor import Environment

A = floats(2, 3)


def test_operations_are_logged(caplog):
  env = Environment(Configuration(debug_print_each_op=True))
  x = env.to_xla(A)
  with caplog.at_level(logging.INFO, "torchax"):
    result = torch.exp(x)
  assert_same(result, A.exp())
  assert [r.getMessage() for r in caplog.records] == ["DISPATCH: aten::exp"]


def test_operands_are_logged_with_their_shapes(caplog):
  env = Environment(
    Configuration(debug_print_each_op=True, debug_print_each_op_operands=True)
  )
  x = env.to_xla(A)
  with caplog.at_level(logging.INFO, "torchax"):
    torch.sum(x, 1, keepdim=True, dtype=torch.float16)
    torch.cat([x, x[0:0]])
  messages = [r.getMessage() for r in caplog.records]
  shown = "Tensor[torch.float32, [2, 3]]"
  assert messages == [
    f"DISPATCH: aten::sum.dim_IntList({shown}, [1], True, dtype=torch.float16)",
    f"DISPATCH: aten::slice.Tensor({shown}, 0, 0, 0)",
    f"DISPATCH: aten::cat([{shown}, View[torch.float32, [0, 3]]])",
  ]


def test_nothing_is_logged_by_default(caplog):
  with caplog.at_level(logging.DEBUG, "torchax"):
    torch.exp(A.to("jax"))
  assert not caplog.records


def test_debug_accuracy_reports_a_wrong_lowering(caplog):
  env = Environment(Configuration(debug_accuracy_for_each_op=True))
  env.override_op_definition(torch.ops.aten.exp, lambda x: x + 100)
  with caplog.at_level(logging.WARNING, "torchax"):
    result = torch.exp(env.to_xla(A))
  assert_same(result, A + 100)
  (message,) = [r.getMessage() for r in caplog.records]
  assert message.startswith("aten::exp differs from CPU torch")


CHECKED = {
  "functional": lambda x: torch.sin(x),
  "view": lambda x: x[0].t() * 2,
  "of_a_view": lambda x: x.t().exp(),
  "in_place": lambda x: x.clone().mul_(3),
  "in_place_on_a_view": lambda x: x.clone()[0].mul_(3),
  "random": lambda x: torch.rand_like(x) * 0,
  "many_results": lambda x: torch.max(x, 0),
}


@pytest.mark.parametrize("function", CHECKED.values(), ids=CHECKED)
def test_debug_accuracy_does_not_report_a_correct_lowering(function, caplog):
  env = Environment(Configuration(debug_accuracy_for_each_op=True))
  with caplog.at_level(logging.WARNING, "torchax"):
    assert_same(function(env.to_xla(A)), function(A))
  assert not caplog.records


def test_debug_accuracy_compares_one_result():
  x = A.to("jax")
  exp = torch.ops.aten.exp.default
  assert debug.debug_accuracy(exp, (x,), {}, x.exp())
  assert not debug.debug_accuracy(exp, (x,), {}, x)


def test_mixed_devices_are_logged_before_they_raise(caplog):
  env = Environment(Configuration(debug_mixed_tensor=True))
  with caplog.at_level(logging.INFO, "torchax"), pytest.raises(MixedDeviceError):
    env.to_xla(A) + A
  (message,) = [r.getMessage() for r in caplog.records]
  assert "aten.add.Tensor" in message and "[2, 3]" in message and "cpu" in message
