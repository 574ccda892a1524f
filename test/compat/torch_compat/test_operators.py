"""Operators of torch: builtin functions, packets and decompositions."""

import functools

import pytest
import torch
from torch.overrides import TorchFunctionMode

from torchax.compat import torch_compat


class Recorder(TorchFunctionMode):
  """Mode that records the functions it receives."""

  def __init__(self):
    super().__init__()
    self.seen = []

  def __torch_function__(self, func, types, args=(), kwargs=None):
    self.seen.append(func)
    return func(*args, **(kwargs or {}))


BUILTINS = {
  "linear": (torch_compat.linear, torch.nn.functional.linear),
  "attention": (
    torch_compat.scaled_dot_product_attention,
    torch.nn.functional.scaled_dot_product_attention,
  ),
  "one_hot": (torch_compat.one_hot, torch.nn.functional.one_hot),
}


@pytest.mark.parametrize("row", BUILTINS.values(), ids=BUILTINS)
def test_builtin_is_its_public_function(row):
  private, public = row
  assert private is public


def test_undispatched_attention_calls_overrides_of_its_parts():
  layer = torch.nn.MultiheadAttention(4, 2)
  x = torch.ones(3, 4)
  weights = (layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0)
  out = (layer.out_proj.weight, layer.out_proj.bias)
  with Recorder() as recorder:
    found, _ = torch_compat.undispatched_attention(x, x, x, 4, 2, *weights, *out)
  assert {torch_compat.linear, torch.nn.functional.softmax} <= set(recorder.seen)
  assert torch.nn.functional.multi_head_attention_forward not in recorder.seen
  torch.testing.assert_close(found, layer(x, x, x)[0])


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_a_recurrent_builtin_reaches_function_modes(name):
  layer = {
    "lstm": torch.nn.LSTM,
    "gru": torch.nn.GRU,
    "rnn_tanh": torch.nn.RNN,
    "rnn_relu": functools.partial(torch.nn.RNN, nonlinearity="relu"),
  }[name](2, 3)
  with Recorder() as recorder:
    layer(torch.ones(1, 1, 2))
  assert getattr(torch_compat, name) in recorder.seen


def test_all_packets_of_aten_are_found():
  packets = torch_compat.aten_packets()
  assert torch.ops.aten.add in packets and torch.ops.aten._foreach_add_ in packets
  assert all(packet.overloads() for packet in packets)


def test_regions_of_a_graph_are_higher_order_operators():
  for name in ("cond", "while_loop", "wrap_with_set_grad_enabled"):
    region = getattr(torch.ops.higher_order, name)
    assert isinstance(region, torch_compat.HigherOrderOperator)
    assert region.name() == name
  assert not isinstance(torch.ops.aten.add.Tensor, torch_compat.HigherOrderOperator)


# Decompositions -----------------------------------------------------------------------


def test_the_table_of_decompositions_is_keyed_by_overload():
  table = torch_compat.decomposition_table
  assert callable(table[torch.ops.aten.silu_backward.default])


def test_a_composite_kernel_is_found():
  composite = torch.ops.aten.linear.default
  decompose = torch_compat.composite_decomposition(composite)
  x, weight = torch.ones(2, 3), torch.ones(4, 3)
  assert torch.equal(decompose(x, weight), x @ weight.t())
  assert torch_compat.composite_decomposition(torch.ops.aten.mm.default) is None
  assert torch_compat.composite_decomposition(torch.mm) is None


def test_composite_operations_are_identified():
  aten = torch.ops.aten
  assert torch_compat.is_composite(aten.nll_loss.default)
  assert not torch_compat.is_composite(aten.mm.default)
  # It exists for TorchScript alone.
  assert not torch_compat.is_composite(aten.__and__.bool)
  assert not torch_compat.is_composite(torch.mm)


def test_a_composite_kernel_is_torchs_own():
  kernel = torch_compat.composite_kernel(torch.ops.aten.dropout.default)
  x = torch.ones(50)
  torch.manual_seed(0)
  dropped = kernel(x, 0.5, True)
  torch.manual_seed(0)
  assert torch.equal(dropped, torch.nn.functional.dropout(x))
