"""First call of a training step by the depth of the model, with scanned layers.

The model is a transformer of `torch.nn` layers, changed by `scan_layers`. Tracing and
compiling should cost the same for any depth.
"""

import time

import jax
import torch

from benchmarks.timing import Row
from torchax.interop import JittableModule, jax_jit, jax_value_and_grad
from torchax.stacks import scan_layers

DEPTHS = (12, 24, 48, 96)
WIDTH, HEADS, LENGTH = 32, 4, 16
GOAL = 1.25


def _first_call(depth: int) -> float:
  """Return the microseconds of the first call of a step, compilation included."""
  torch.manual_seed(0)
  layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
  encoder = torch.nn.TransformerEncoder(layer, depth)
  x = torch.randn(2, LENGTH, WIDTH, device="jax")
  module = JittableModule(scan_layers(encoder.to("jax"), x))
  params = {name: p.detach() for name, p in module.params.items()}

  def loss(params, x):
    return module.functional_call("forward", params, module.buffers, x).square().mean()

  step = jax_jit(jax_value_and_grad(loss))
  start = time.perf_counter()
  value, gradients = step(params, x)
  jax.block_until_ready([value.jax(), *[g.jax() for g in gradients.values()]])
  return (time.perf_counter() - start) * 1e6


def rows() -> list[Row]:
  """Return a row for each depth, with the smallest depth as the baseline."""
  _first_call(2)  # compiles the programs that all depths share
  least = _first_call(DEPTHS[0])
  return [
    Row(
      f"first call of a step of {depth} scanned layers",
      f"{DEPTHS[0]} layers",
      _first_call(depth),
      least,
      GOAL,
    )
    for depth in DEPTHS[1:]
  ]
