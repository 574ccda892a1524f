"""oneDNN's operation for one layer and direction, torch's LSTM on the CPU."""

import pytest
import torch
from ops.harness import Case, check, floats

aten = torch.ops.aten

HIDDEN = 6
WEIGHTS = (
  floats(4 * HIDDEN, 4, seed=1),
  floats(4 * HIDDEN, HIDDEN, seed=2),
  floats(4 * HIDDEN, seed=3),
  floats(4 * HIDDEN, seed=4),
)
LSTM, GRU = 2, 3


def layer(x, hidden, cell, *weights, reverse, mode=LSTM):
  """Drop the workspace, which only oneDNN reads."""
  options = (mode, HIDDEN, 1, True, False, False, False)
  return aten.mkldnn_rnn_layer(x, *weights, hidden, cell, reverse, [], *options)[:3]


def states(*shape) -> tuple[torch.Tensor, torch.Tensor]:
  return floats(*shape, seed=5), floats(*shape, seed=6)


CASES = (
  Case(layer, floats(5, 3, 4), *states(3, HIDDEN), *WEIGHTS, reverse=False),
  # torch's decomposition of `torch.lstm` gives states of three dimensions.
  Case(layer, floats(5, 3, 4), *states(1, 3, HIDDEN), *WEIGHTS, reverse=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_recurrent_networks(case):
  check(case)


def test_mkldnn_rnn_layer_raises_for_other_cells():
  given = [value.to("jax") for value in (floats(5, 3, 4), *states(3, HIDDEN), *WEIGHTS)]
  with pytest.raises(NotImplementedError, match="padded LSTM"):
    layer(*given, reverse=False, mode=GRU)
