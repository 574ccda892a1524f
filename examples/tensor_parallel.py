"""Tensor parallelism and FSDP with torch's API, on a mesh of 2 x 4 devices.

`parallelize_module` shards the linear layers of a transformer block over four devices
("tp"). `fully_shard` shards the rest of the parameters over two ("dp"), and the batch
is sharded over those two as well. XLA inserts the communication.

Prints the collectives of a forward pass, the placements of each parameter, and the
losses of one and of eight devices, which are equal up to rounding.

usage:
  XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/tensor_parallel.py
"""

import copy
import re

import jax
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
  ColwiseParallel,
  RowwiseParallel,
  parallelize_module,
)

import torchax
from torchax.interop import jax_view

WIDTH, HEADS, STEPS = 32, 4, 5


class Attention(nn.Module):
  """Causal attention; the heads are columns of `query`, `key` and `value`."""

  def __init__(self):
    super().__init__()
    self.query = nn.Linear(WIDTH, WIDTH)
    self.key = nn.Linear(WIDTH, WIDTH)
    self.value = nn.Linear(WIDTH, WIDTH)
    self.out = nn.Linear(WIDTH, WIDTH)

  def forward(self, x):
    heads = [
      layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
      for layer in (self.query, self.key, self.value)
    ]
    mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
  """Attention and two linear layers, each after a norm."""

  def __init__(self):
    super().__init__()
    self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
    self.attention = Attention()
    self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

  def forward(self, x):
    x = x + self.attention(self.norms[0](x))
    return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


PLAN = {
  "attention.query": ColwiseParallel(),
  "attention.key": ColwiseParallel(),
  "attention.value": ColwiseParallel(),
  "attention.out": RowwiseParallel(),
  "up": ColwiseParallel(),
  "down": RowwiseParallel(),
}


def losses(block: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
  """Train a few steps; return the loss of each."""
  optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
  found = []
  for _ in range(STEPS):
    loss = nn.functional.mse_loss(block(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    found.append(loss.item())
  return found


def communication(block: nn.Module, x: torch.Tensor) -> dict[str, int]:
  """Count the collectives of a compiled forward pass by kind."""

  def forward(parameters, x):
    return torch.func.functional_call(block, parameters, (x,))

  parameters = {name: p.detach() for name, p in block.named_parameters()}
  arrays = jax_view((parameters, x))
  text = jax.jit(jax_view(forward)).lower(*arrays).compile().as_text()
  kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
  return {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in kinds}


def main() -> None:
  torch.manual_seed(0)
  block = Block().to("jax")
  alone = copy.deepcopy(block)
  x, y = torch.randn(8, 16, WIDTH), torch.randn(8, 16, WIDTH)

  mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
  parallelize_module(block, mesh["tp"], PLAN)
  rows = [Shard(0), Replicate()]
  sharded_x, sharded_y = (distribute_tensor(t, mesh, rows) for t in (x, y))
  print("collectives of a forward pass:", communication(block, sharded_x))
  fully_shard(block, mesh=mesh["dp"])
  for name, parameter in block.named_parameters():
    print(f"{name:24}{tuple(parameter.shape)!s:12}{parameter.placements}")

  one = losses(alone, x.to("jax"), y.to("jax"))
  eight = losses(block, sharded_x, sharded_y)
  print("losses of one device:   ", *[f"{loss:.5f}" for loss in one])
  print("losses of eight devices:", *[f"{loss:.5f}" for loss in eight])
  equal = torch.allclose(torch.tensor(one), torch.tensor(eight), rtol=1e-5)
  print("equal up to rounding:", equal)


if __name__ == "__main__":
  with torchax.default_env():
    main()
