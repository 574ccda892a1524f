"""Fixture that compiles every model by itself, below Dynamo's recompile limit."""

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_compiled():
  torch.compiler.reset()
