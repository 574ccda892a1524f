"""Train a transformer on eight devices, with FSDP and with tensor parallelism.

FSDP shards each parameter over all devices. Tensor parallelism shards them by rules for
their names. The model is initialized on the mesh, shard by shard, and the batch is
sharded too. Without accelerators, JAX splits the CPU into eight devices.

Prints the losses on one device and on each mesh, dropout included, the largest
difference between them, and the shape of a weight on each device.

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

_STEPS = flags.DEFINE_integer("steps", 8, "Training steps.", 1)

DEVICES = 8
TOKENS = 32
WIDTH = 16
LENGTH = 8
BATCH = 16


class Model(nn.Module):
  """Transformer layer that predicts the next token."""

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
  """Return a mesh with one axis; each device holds a shard of each parameter."""
  sharder = SingleAxisSharder("fsdp", DEVICES, replicate_unshardable=True)
  return Mesh(jax.make_mesh((DEVICES,), ("fsdp",)), sharder)


def tensor_parallel() -> Mesh:
  """Return a mesh of 4 × 2: four shards of the batch, two of each matrix product."""
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
  """Train on one batch; return the loss of each step."""
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
    print(f"  weight {tuple(weight.shape)}: each device holds {part}")
    print(f"  largest difference to one device: {difference:.1e}")


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", DEVICES)  # has no effect on accelerators
  torchax.enable_globally()
  app.run(main)
