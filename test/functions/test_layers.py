"""Functions of `functions/layers.py` outside of an environment."""

import torch
import torch.nn.functional as F

import torchax


def test_one_hot_runs_with_environment_suspended():
  labels = torch.tensor([0, 2, 1])
  with torchax.default_env().disabled():
    actual = F.one_hot(labels.to("jax"), 3)
  assert torch.equal(actual.cpu().long(), F.one_hot(labels, 3))
