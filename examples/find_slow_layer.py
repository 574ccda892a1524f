"""Find the slow layer of a training step by its trace, and repair it.

The model is a small transformer with a learned position bias, as in Swin Transformer
V2: a network computes the bias of attention from the distance of two positions. The
first version computes it for every pair of positions, although pairs of equal distance
have an equal bias. The second one computes it once for each distance.

Prints the time of a step and the table of its modules for both versions, then the
memory of each block. Saves a picture of the tables.

usage: python examples/find_slow_layer.py [--length=128] [--steps=10]
         [--picture=output/profiling.svg]
"""

import pathlib
import tempfile
import time

import matplotlib
import torch
import torch.nn.functional as F
from absl import app, flags
from torch import nn

import torchax
from torchax.interop import jax_jit

matplotlib.use("Agg")
from matplotlib import pyplot

_LENGTH = flags.DEFINE_integer("length", 128, "Length of a sequence.", 2)
_STEPS = flags.DEFINE_integer("steps", 10, "Steps in a trace.", 1)
_PICTURE = flags.DEFINE_string(
  "picture", "output/profiling.svg", "Path of the picture."
)

WIDTH, HEADS, BLOCKS, BATCH = 64, 4, 2, 4
# Readable on a light and on a dark page.
TEXT, FORWARD, BACKWARD = "#808080", "#4c8bf5", "#e8833a"


class PositionBias(nn.Module):
  """Bias of attention, computed from the distances of positions by a small network."""

  def __init__(self, by_pair: bool):
    super().__init__()
    self.by_pair = by_pair
    self.network = nn.Sequential(nn.Linear(1, 512), nn.GELU(), nn.Linear(512, HEADS))

  def forward(self, x):
    length = x.shape[1]
    positions = torch.arange(length, device=x.device)
    distances = positions[:, None] - positions
    if self.by_pair:
      return self.network(distances[..., None] / length).movedim(-1, 0)
    every = torch.arange(1 - length, length, device=x.device)
    bias = self.network(every[:, None] / length)
    return bias[distances + length - 1].movedim(-1, 0)


class Attention(nn.Module):
  def __init__(self, by_pair: bool):
    super().__init__()
    self.bias = PositionBias(by_pair)
    self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

  def forward(self, x):
    heads = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(*heads, attn_mask=self.bias(x))
    return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
  def __init__(self, by_pair: bool):
    super().__init__()
    self.attention = Attention(by_pair)
    self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

  def forward(self, x):
    x = x + self.attention(self.norm1(x))
    return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


def profile(by_pair: bool) -> torchax.Profile:
  """Train for some steps; print and return their profile."""
  torch.manual_seed(0)
  model = nn.Sequential(*[Block(by_pair) for _ in range(BLOCKS)]).to("jax")
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
  x = torch.randn(BATCH, _LENGTH.value, WIDTH, device="jax")

  def step(x):
    loss = F.mse_loss(model(x), x.roll(1, dims=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

  jitted = jax_jit(step)
  first = jitted(x).item()
  with torchax.profile(tempfile.mkdtemp()) as found:
    start = time.perf_counter()
    for _ in range(_STEPS.value):
      last = jitted(x).item()
    seconds = (time.perf_counter() - start) / _STEPS.value
  name = "pair of positions" if by_pair else "distance"
  print(f"\na bias for each {name}: {1e3 * seconds:.1f} ms a step")
  print(f"loss {first:.6f}, then {last:.6f}\n{found}")
  if by_pair:
    print("\nbytes of each block:")
    for path, memory in torchax.memory_by_module(model, optimizer, depth=1).items():
      print(f"{path}: {memory}")
  return found


def picture(profiles: list[torchax.Profile], path: pathlib.Path) -> None:
  """Save the time of each module in both profiles as bars."""
  pyplot.rcParams.update(
    dict.fromkeys(
      ["text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"],
      TEXT,
    )
  )
  tables = [each.by_module() for each in profiles]
  modules = list(tables[0])[:10][::-1]
  figure, axes = pyplot.subplots(
    1, 2, figsize=(9, 4), layout="constrained", sharex=True, sharey=True
  )
  titles = ("bias for each pair of positions", "bias for each distance")
  for axis, table, title in zip(axes, tables, titles):
    left = [0.0] * len(modules)
    for kind, color in (("forward", FORWARD), ("backward", BACKWARD)):
      times = [
        1e3 * getattr(table[module], kind) / _STEPS.value if module in table else 0.0
        for module in modules
      ]
      axis.barh(modules, times, left=left, color=color, label=kind)
      left = [a + b for a, b in zip(left, times)]
    axis.set(title=title, xlabel="milliseconds a step")
    axis.spines[["top", "right"]].set_visible(False)
  axes[1].legend(frameon=False, loc="lower right")
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, transparent=True)
  pyplot.close(figure)


def main(_) -> None:
  """Entry point of `absl.app.run`."""
  profiles = [profile(by_pair=True), profile(by_pair=False)]
  picture(profiles, pathlib.Path(_PICTURE.value))
  print(f"\npicture: {_PICTURE.value}")


if __name__ == "__main__":
  app.run(main)
