"""Functions of `functions/layers.py` outside of an environment."""

import pytest
import torch
import torch.nn.functional as F

import torchax


def test_one_hot_runs_with_environment_suspended():
  labels = torch.tensor([0, 2, 1])
  with torchax.default_env().disabled():
    actual = F.one_hot(labels.to("jax"), 3)
  assert torch.equal(actual.cpu().long(), F.one_hot(labels, 3))


@pytest.mark.parametrize("device", ["cpu", "jax"])
@pytest.mark.parametrize(
  "call",
  [
    lambda x, number: F.one_hot(x.long(), number(3)),
    lambda x, number: F.dropout(x, number(1.0)),
    lambda x, number: torch.dropout(x, number(0.0), True),
    lambda x, number: F.rrelu(x, number(0.1), number(0.3)),
  ],
  ids=["one_hot", "F.dropout", "torch.dropout", "rrelu"],
)
def test_a_number_may_be_a_tensor(env, call, device):
  x = torch.tensor([0.0, 2.0, 1.0])
  with env:
    found = call(x.to("jax"), lambda value: torch.tensor(value, device=device))
  expected = call(x, torch.tensor)
  assert torch.equal(found.cpu().to(expected.dtype), expected)
