"""Trains a transformer on eight devices: parameters divided by size, and by rules.

The model is made on the mesh, part by part, and its batch is divided. The losses are
those of one device, dropout included. Without accelerators the devices are eight of the
CPU.

usage: python examples/train_sharded.py [--steps=8]
"""

import jax
import torch
import torch.nn.functional as F
from absl import app, flags
from torch import nn

import torchax
from torchax.interop import jax_jit
from torchax.mesh_util import Mesh, ShardingRules, SingleAxisSharder

_STEPS = flags.DEFINE_integer("steps", 8, "Steps of training.", 1)

DEVICES = 8
TOKENS = 32
WIDTH = 16
LENGTH = 8
BATCH = 16


class Model(nn.Module):
  """Predicts the next token."""

  def __init__(self):
    super().__init__()
    self.embedding = nn.Embedding(TOKENS, WIDTH)
    self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
    self.layer = nn.TransformerEncoderLayer(
      WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True
    )
    self.out = nn.Linear(WIDTH, TOKENS)

  def forward(self, tokens):
    return self.out(self.layer(self.embedding(tokens) + self.positions))


def fsdp() -> Mesh:
  """All devices along one axis; each has its part of each parameter."""
  sharder = SingleAxisSharder("fsdp", DEVICES, replicate_unshardable=True)
  return Mesh(jax.make_mesh((DEVICES,), ("fsdp",)), sharder)


def tensor_parallel() -> Mesh:
  """Two devices share each product of the layer, and four pairs share the batch."""
  rules = ShardingRules(
    [
      ("*.in_proj_weight", ("model", None)),
      ("*.out_proj.weight", (None, "model")),
      ("*.linear1.weight", ("model", None)),
      ("*.linear1.bias", ("model",)),
      ("*.linear2.weight", (None, "model")),
    ]
  )
  return Mesh(jax.make_mesh((DEVICES // 2, 2), ("data", "model")), rules)


def train(model: nn.Module, tokens, labels) -> list[float]:
  """The losses of some steps on one batch."""
  optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

  @jax_jit
  def step(tokens, labels):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
    return loss

  return [step(tokens, labels).item() for _ in range(_STEPS.value)]


def main(argv) -> None:
  del argv
  tokens = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % TOKENS
  labels = (7 * tokens) % TOKENS

  torch.manual_seed(0)
  with torch.device("jax"):
    model = Model()
  expected = train(model, tokens.to("jax"), labels.to("jax"))
  print(f"one device: loss {expected[0]:.4f}, then {expected[-1]:.4f}")

  for mesh in (fsdp(), tensor_parallel()):
    torch.manual_seed(0)
    model = mesh.initialize_model_sharded(Model, ())
    rows = (mesh.jax_mesh.axis_names[0],)
    losses = train(model, mesh.shard(tokens, rows), mesh.shard(labels, rows))
    weight = model.layer.linear1.weight
    part = tuple(weight.jax().addressable_shards[0].data.shape)
    difference = max(abs(a - b) for a, b in zip(losses, expected))
    print(f"{mesh}: loss {losses[0]:.4f}, then {losses[-1]:.4f}")
    print(f"  of a weight of {tuple(weight.shape)} a device has {part}")
    print(f"  largest difference to one device: {difference:.1e}")


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", DEVICES)  # where there is no accelerator
  torchax.enable_globally()
  app.run(main)
