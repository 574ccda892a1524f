"""First calls of the standard training step of a transformer, beside NNX with Optax.

The step is a user's: `zero_grad`, loss, `backward`, `AdamW.step`, compiled by
`jax_jit`. The baseline is the same model in `flax.nnx`, under `nnx.jit`. Neither has
optimizer state or gradients before its first call.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import torch
from flax import nnx

from benchmarks.timing import Row, arrays
from benchmarks.transformer import RATE, Size, training_step
from torchax.interop import jax_jit

DEPTHS = (12, 24, 48)
LEARNING_RATE = 1e-3
GOAL = 1.0
BASELINE = "NNX, optax"


def _ours(size: Size) -> Callable[[], torch.Tensor]:
  return jax_jit(training_step(size))


class _Block(nnx.Module):
  """Pre-norm transformer block with three dropouts."""

  def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
    self.heads = heads
    self.norm1, self.norm2 = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
    self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
    self.out = nnx.Linear(width, width, rngs=rngs)
    self.up = nnx.Linear(width, 4 * width, rngs=rngs)
    self.down = nnx.Linear(4 * width, width, rngs=rngs)
    self.dropout = nnx.Dropout(RATE, rngs=rngs)

  def __call__(self, x):
    batch, length, width = x.shape
    qkv = self.qkv(self.norm1(x))
    qkv = qkv.reshape(batch, length, 3, self.heads, width // self.heads)
    mixed = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0)).reshape(x.shape)
    x = x + self.dropout(self.out(mixed))
    hidden = jax.nn.gelu(self.up(self.norm2(x)), approximate=False)
    return x + self.dropout(self.down(self.dropout(hidden)))


def _of_nnx(size: Size) -> Callable[[], jax.Array]:
  rngs = nnx.Rngs(0)
  blocks = [_Block(size.width, size.heads, rngs) for _ in range(size.blocks)]
  model = nnx.Sequential(*blocks)
  optimizer = nnx.Optimizer(model, optax.adamw(LEARNING_RATE), wrt=nnx.Param)
  x, y = (tensor.jax() for tensor in size.data("jax"))

  def loss(model):
    return jnp.mean((model(x) - y) ** 2)

  @nnx.jit
  def step(model, optimizer):
    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value

  return lambda: step(model, optimizer)


def _first_calls(step: Callable, calls: int) -> list[float]:
  """Return the microseconds of the first calls of a new step."""
  times = []
  for _ in range(calls):
    start = time.perf_counter()
    jax.block_until_ready(arrays(step()))
    times.append((time.perf_counter() - start) * 1e6)
  return times


def rows() -> list[Row]:
  """Return a row for the first call at each depth, and one for the first two calls."""
  for build in (_ours, _of_nnx):  # compiles the programs that all depths share
    _first_calls(build(Size(blocks=1)), 1)
  found = []
  for depth in DEPTHS:
    size = Size(blocks=depth)
    theirs, ours = (_first_calls(build(size), 2) for build in (_of_nnx, _ours))
    name = f"of a training step, {depth} blocks"
    found += [
      Row(f"first call {name}", BASELINE, ours[0], theirs[0], GOAL),
      Row(f"first two calls {name}", BASELINE, sum(ours), sum(theirs), GOAL),
    ]
  return found
