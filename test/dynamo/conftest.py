"""Fixture that clears compiled code before every test of `torch.compile`."""

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_compiled():
  torch.compiler.reset()
  yield
  torch.compiler.reset()
