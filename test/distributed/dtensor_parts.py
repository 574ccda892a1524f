"""Meshes, modules and comparisons shared by the laws of meshes, `DTensor` and FSDP.

`device_mesh_cases.py`, `dtensor_cases.py`, `fsdp_cases.py`, `state_cases.py` use them.
"""

import copy
import re
from collections.abc import Callable

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchax.interop import jax_jit, jax_view

CASES: dict[str, Callable] = {}


def case(function: Callable, name: str | None = None) -> Callable:
  """Register a law."""
  CASES[name or function.__name__] = function
  return function


def enter_refusals(rows: dict[str, tuple]) -> None:
  """Register a law for each row of a function, its error and the message."""
  for name, (function, kind, message) in rows.items():

    def refuses(function=function, kind=kind, message=message):
      with pytest.raises(kind, match=message):
        function()

    case(refuses, f"refused: {name}")


def grid() -> DeviceMesh:
  return init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))


def line() -> DeviceMesh:
  return init_device_mesh("jax", (8,))


def numbers(*shape: int) -> torch.Tensor:
  return torch.arange(float(np.prod(shape))).reshape(shape) / 10


class Block(nn.Module):
  """Module of a norm and two linear layers."""

  def __init__(self):
    super().__init__()
    self.norm = nn.LayerNorm(8)
    self.up = nn.Linear(8, 16)
    self.down = nn.Linear(16, 8)

  def forward(self, x):
    return self.down(torch.relu(self.up(self.norm(x))))


def pair() -> tuple[Block, Block]:
  """Return two equal blocks."""
  torch.manual_seed(0)
  block = Block()
  return block, copy.deepcopy(block)


X = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1))


def assert_trains_alike(sharded: nn.Module, reference: nn.Module) -> None:
  """Assert eager results and gradients, and compiled results, of one device."""
  x, mine = X.clone().requires_grad_(), X.to("jax").requires_grad_()
  expected, found = reference(x), sharded(mine)
  expected.pow(2).sum().backward()
  found.pow(2).sum().backward()
  torch.testing.assert_close(found.detach().cpu(), expected.detach())
  torch.testing.assert_close(mine.grad.cpu(), x.grad, rtol=1e-4, atol=1e-4)
  for (name, p), (other, q) in zip(
    reference.named_parameters(), sharded.named_parameters(), strict=True
  ):
    assert name == other
    torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-4, atol=1e-4)
  compiled = jax_jit(lambda x: sharded(x))(X.to("jax"))
  torch.testing.assert_close(compiled.detach().cpu(), expected.detach())


def collectives(module: nn.Module, x: torch.Tensor) -> dict[str, int]:
  """Count the collectives of each kind in a compiled forward pass."""

  def forward(parameters, x):
    return torch.func.functional_call(module, parameters, (x,))

  parameters = {name: p.detach() for name, p in module.named_parameters()}
  arrays = jax_view((parameters, x))
  text = jax.jit(jax_view(forward)).lower(*arrays).compile().as_text()
  kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
  counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in kinds}
  return {kind: count for kind, count in counts.items() if count}
