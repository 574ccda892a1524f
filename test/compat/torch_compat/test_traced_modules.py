"""Modules of `torch.nn` that read numbers of a tensor, in a trace."""

import pytest
import torch
from compare import assert_same
from ops.harness import floats
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from torchax.interop import jax_jit

IMAGES = floats(3, 2, 4)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(4)


@pytest.mark.parametrize("steps", [1, 3])
def test_cumulative_statistics_are_averaged_in_a_trace(steps):
  torch.manual_seed(0)
  module = nn.BatchNorm1d(2, momentum=None)
  on_jax = nn.BatchNorm1d(2, momentum=None).to("jax")
  step = jax_jit(lambda x: on_jax(x))
  for scale in range(1, steps + 1):
    assert_same(step((IMAGES * scale).to("jax")), module(IMAGES * scale))
  assert_same(on_jax.state_dict(), dict(module.state_dict()))


@pytest.mark.parametrize("mask", [CAUSAL, CAUSAL < 0, CAUSAL * 0], ids=str)
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_masks_of_transformers_are_applied_in_a_trace(kind, mask):
  torch.manual_seed(0)
  if kind == "encoder":
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    module = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    inputs = floats(2, 4, 4), mask
  else:
    layer = nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    module = nn.TransformerDecoder(layer, 1)
    inputs = floats(2, 4, 4), floats(2, 4, 4, seed=1), mask
  expected = module(*inputs)
  module.to("jax")
  actual = jax_jit(lambda *inputs: module(*inputs))(*[x.to("jax") for x in inputs])
  assert_same(actual, expected.detach())


@pytest.mark.parametrize("targets", [torch.tensor([0, 9, 4]), torch.tensor(7)], ids=str)
def test_adaptive_softmax_is_computed_in_a_trace(targets):
  torch.manual_seed(0)
  module = nn.AdaptiveLogSoftmaxWithLoss(4, 10, [3, 6])
  inputs = floats(*targets.shape, 4)
  expected = module(inputs, targets)
  module.to("jax")
  step = jax_jit(lambda *inputs: tuple(module(*inputs)))
  actual = step(inputs.to("jax"), targets.to("jax"))
  assert_same(actual, tuple(each.detach() for each in expected))


def test_adaptive_softmax_predicts_in_a_trace():
  torch.manual_seed(0)
  module = nn.AdaptiveLogSoftmaxWithLoss(4, 10, [3, 6])
  inputs = 4 * floats(16, 4)
  expected = module.predict(inputs)
  assert 0 < (expected < 3).sum() < 16  # in the head, and in clusters
  module.to("jax")
  assert_same(jax_jit(lambda x: module.predict(x))(inputs.to("jax")), expected)


@pytest.mark.parametrize("batch_first", [False, True])
def test_unsorted_sequences_are_padded_in_a_trace(batch_first):
  torch.manual_seed(0)
  module = nn.GRU(2, 3, batch_first=batch_first)
  lengths = torch.tensor([2, 3, 1])

  def run(x):
    options = {"batch_first": batch_first}
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False, **options)
    return pad_packed_sequence(module(packed)[0], total_length=4, **options)

  inputs = floats(3, 3, 2)
  with torch.no_grad():
    expected = run(inputs)
    module.to("jax")
    assert_same(jax_jit(run)(inputs.to("jax")), expected)
    # torch's own function after the trace
    assert run(inputs.to("jax"))[1].device.type == "cpu"
