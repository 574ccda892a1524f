"""Every model is compiled by itself: one class stays below Dynamo's recompile limit."""

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_compiled():
  torch.compiler.reset()
