"""Every test of `torch.compile` starts without compiled code."""

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_compiled():
  torch.compiler.reset()
  yield
  torch.compiler.reset()
