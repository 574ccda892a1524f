"""Core ATen operations of torch, which every backend needs, have a plan each."""

import pytest
import torch

import torchax
from torchax.compat import torch_compat

CORE = [
  overload
  for packet in torch_compat.aten_packets()
  for overload in (getattr(packet, name) for name in packet.overloads())
  if torch.Tag.core in overload.tags
]


@pytest.mark.parametrize("overload", CORE, ids=str)
def test_a_core_operation_has_a_lowering_or_a_decomposition(overload):
  assert callable(torchax.default_env()._dispatcher.plan_for(overload))


def test_the_core_is_not_empty():
  assert len(CORE) > 150
