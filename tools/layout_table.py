"""Write the table with the losses of one training in several layouts.

usage: python -m tools.layout_table docs/rng-evidence.md

Trains the transformer of `benchmarks/sharded_transformer.py` from one seed in each
layout, with dropout and clipped gradients. Its parameters are initialized on the mesh.
Needs eight devices: `XLA_FLAGS=--xla_force_host_platform_device_count=8`. The text
between the two markers of the page is replaced.
"""

import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
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
from benchmarks import sharded_transformer as transformer
from tools import tables
from torchax.interop import jax_jit

HEADER = (
  *("layout", "mesh", "losses of four steps", "largest difference"),
  "initial parameters and masks",
)
STEPS, RATE, MAX_NORM = 4, 0.01, 0.5


def _plain(model, mesh):
  return model


def _ddp(model, mesh):
  return nn.parallel.DistributedDataParallel(model.to_empty(device="jax"))


def _fsdp(model, mesh):
  for part in (*model.layers, model):
    fully_shard(part, mesh=mesh)
  return model


def _tensor_parallel(model, mesh, between=Replicate()):  # noqa: B008  has no state
  """Shard linear layers; activations between them have the placement `between`."""
  columns = ColwiseParallel(input_layouts=between)
  rows = RowwiseParallel(output_layouts=between)
  layer = {"qkv": columns, "out": rows, "up": columns, "down": rows}
  plan = {f"layers.*.{name}": style for name, style in layer.items()}
  plan["words"] = rows
  plan["head"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
  return parallelize_module(model, mesh, plan)


def _sequence_parallel(model, mesh):
  return _tensor_parallel(model, mesh, Shard(1))


def _two_dimensional(model, mesh):
  return _fsdp(_sequence_parallel(model, mesh["tp"]), mesh["dp"])


class Layout(NamedTuple):
  """Mesh axes and their sizes; function of a model on the meta device and the mesh."""

  axes: Mapping[str, int] = {}
  distribute: Callable = _plain
  compiles: bool = False


LAYOUTS = {
  "one device": Layout(),
  "DDP": Layout({"dp": 8}, _ddp),
  "FSDP2": Layout({"dp": 8}, _fsdp),
  "FSDP2, `jax_jit`": Layout({"dp": 8}, _fsdp, compiles=True),
  "HSDP": Layout({"replica": 2, "dp": 4}, _fsdp),
  "TP of 2": Layout({"tp": 2}, _tensor_parallel),
  "TP of 4": Layout({"tp": 4}, _tensor_parallel),
  "TP of 8": Layout({"tp": 8}, _tensor_parallel),
  "TP, sequence parallel": Layout({"tp": 8}, _sequence_parallel),
  "FSDP2 and TP": Layout({"dp": 2, "tp": 4}, _two_dimensional),
}


def train(layout: Layout) -> tuple[list[float], list[torch.Tensor]]:
  """Train from seed 0; return the losses, and the initial parameters and the masks."""
  with torch.device("meta"):
    inner = transformer.Transformer()
  mesh = layout.axes and init_device_mesh(
    "jax", tuple(layout.axes.values()), mesh_dim_names=tuple(layout.axes)
  )
  model = layout.distribute(inner, mesh)
  torch.manual_seed(0)
  for module in inner.to_empty(device="jax").modules():
    if hasattr(module, "reset_parameters"):
      module.reset_parameters()
  drawn = [parameter.detach().cpu() for parameter in inner.parameters()]
  optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

  def step(tokens):
    logits, masks = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().long())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), masks

  step = jax_jit(step) if layout.compiles else step
  placements = [Replicate() if axis == "tp" else Shard(0) for axis in layout.axes]
  losses = []
  for tokens in transformer.batches(STEPS * transformer.BATCH).split(transformer.BATCH):
    on_mesh = mesh and distribute_tensor(tokens, mesh, placements)
    loss, masks = step(on_mesh if mesh else tokens.to("jax"))
    losses.append(loss.item())
    drawn.append(masks.cpu())
  return losses, drawn


def table() -> str:
  """Return the table in Markdown."""
  runs = {name: train(layout) for name, layout in LAYOUTS.items()}
  losses_of_one, drawn_by_one = runs["one device"]
  rows = []
  for name, (losses, drawn) in runs.items():
    difference = max(abs(a - b) for a, b in zip(losses, losses_of_one))
    is_equal = all(map(torch.equal, drawn, drawn_by_one))
    rows.append(
      [
        name,
        " x ".join(map(str, LAYOUTS[name].axes.values())) or "–",
        " ".join(f"{loss:.4f}" for loss in losses),
        f"{difference:.0e}",
        "equal" if is_equal else "different",
      ]
    )
  return tables.markdown(HEADER, rows)


if __name__ == "__main__":
  torchax.enable_globally()
  page = pathlib.Path(sys.argv[1])
  page.write_text(tables.insert(page.read_text(), "layout_table", table()))
