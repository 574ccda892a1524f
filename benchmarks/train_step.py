"""Compiled training step of four transformer blocks with twelve dropouts.

The baseline is the same step in plain JAX with explicit keys: `dot_general` on weights
that are not transposed, fused query-key-value projection, softmax attention, GELU.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax import lax

from benchmarks.timing import Row, arrays, compare
from torchax.interop import JittableModule, jax_jit, jax_value_and_grad

BLOCKS, WIDTH, HEADS, LENGTH, BATCH, RATE = 4, 128, 4, 64, 16, 0.1
LEARNING_RATE = 0.01


class Block(torch.nn.Module):
  """Pre-norm transformer block with three dropouts."""

  def __init__(self):
    super().__init__()
    self.norm1 = torch.nn.LayerNorm(WIDTH)
    self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
    self.out = torch.nn.Linear(WIDTH, WIDTH)
    self.norm2 = torch.nn.LayerNorm(WIDTH)
    self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
    self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

  def forward(self, x):
    batch, length, _ = x.shape
    qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(query, key, value)
    mixed = mixed.transpose(1, 2).reshape(batch, length, WIDTH)
    x = x + F.dropout(self.out(mixed), RATE)
    hidden = F.dropout(F.gelu(self.up(self.norm2(x))), RATE)
    return x + F.dropout(self.down(hidden), RATE)


def _linear(p, name, x):
  weight, bias = p[f"{name}.weight"], p[f"{name}.bias"]
  return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ()))) + bias


def _norm(p, name, x):
  mean = x.mean(-1, keepdims=True)
  variance = x.var(-1, keepdims=True)
  scaled = (x - mean) * lax.rsqrt(variance + 1e-5)
  return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]


def _dropout(key, x):
  mask = jax.random.bernoulli(key, 1 - RATE, x.shape)
  return jnp.where(mask, x / (1 - RATE), 0)


def _block(p, keys, x):
  batch, length, _ = x.shape
  qkv = _linear(p, "qkv", _norm(p, "norm1", x))
  qkv = qkv.reshape(batch, length, 3, HEADS, WIDTH // HEADS)
  query, key, value = jnp.transpose(qkv, (2, 0, 3, 1, 4))
  scores = jnp.einsum("bhle,bhse->bhls", query, key) / np.sqrt(WIDTH // HEADS)
  mixed = jnp.einsum("bhls,bhse->bhle", jax.nn.softmax(scores), value)
  mixed = jnp.transpose(mixed, (0, 2, 1, 3)).reshape(batch, length, WIDTH)
  x = x + _dropout(keys[0], _linear(p, "out", mixed))
  hidden = jax.nn.gelu(_linear(p, "up", _norm(p, "norm2", x)), approximate=False)
  return x + _dropout(keys[2], _linear(p, "down", _dropout(keys[1], hidden)))


def _plain_step(params, key, count, x, y):
  def loss(params):
    keys = jax.random.split(jax.random.fold_in(key, count), (BLOCKS, 3))
    out = x
    for index in range(BLOCKS):
      prefix = f"{index}."
      own = {
        k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)
      }
      out = _block(own, keys[index], out)
    return jnp.mean((out - y) ** 2)

  value, grads = jax.value_and_grad(loss)(params)
  updated = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)
  return value, updated


def _steps():
  """Return our step and JAX's on the same data, not compiled yet."""
  torch.manual_seed(0)
  model = torch.nn.Sequential(*[Block() for _ in range(BLOCKS)]).to("jax")
  module = JittableModule(model)
  x = torch.randn(BATCH, LENGTH, WIDTH, device="jax")
  y = torch.randn(BATCH, LENGTH, WIDTH, device="jax")
  params = {name: p.detach() for name, p in module.params.items()}

  def loss(params, x, y):
    return F.mse_loss(module.functional_call("forward", params, {}, x), y)

  value_and_grad = jax_value_and_grad(loss)

  def step(params, x, y):
    value, grads = value_and_grad(params, x, y)
    return value, {k: p - LEARNING_RATE * grads[k] for k, p in params.items()}

  plain_params = {name: p.jax() for name, p in params.items()}
  ours = functools.partial(jax_jit(step), params, x, y)
  jitted = jax.jit(_plain_step)
  plain = functools.partial(jitted, plain_params, jax.random.key(0), np.uint32(0))
  return ours, functools.partial(plain, x.jax(), y.jax()), jitted


def _first_call(step) -> float:
  start = time.perf_counter()
  jax.block_until_ready(arrays(step()[0]))
  return (time.perf_counter() - start) * 1e6


def rows() -> list[Row]:
  """Return the rows of later calls, the first call and memory."""
  first = Row("train step, first call (trace, compile)", "plain JAX", 0.0, 0.0, 0.95)
  times = []
  for _ in range(3):
    jax.clear_caches()
    ours, plain, _ = _steps()
    times.append((_first_call(ours), _first_call(plain)))
  first.ours_us, first.baseline_us = (sorted(column)[1] for column in zip(*times))
  ours, plain, _ = _steps()
  name = f"train step, {BLOCKS} transformer blocks, {3 * BLOCKS} dropouts"
  steady = compare(name, lambda: ours()[0], lambda: plain()[0], 0.90)
  return [steady, first, _memory(ours, plain)]


def _memory(ours, plain) -> Row:
  """Return XLA's estimate of temporary memory, bytes in place of microseconds."""
  own = ours.func.lower(*ours.args).compile().memory_analysis()
  their = plain.func.func if isinstance(plain.func, functools.partial) else plain.func
  theirs = their.lower(*plain.args).compile().memory_analysis()
  return Row(
    "train step, temporary memory (bytes)",
    "plain JAX",
    own.temp_size_in_bytes,
    theirs.temp_size_in_bytes,
    1.0,
    "XLA's memory analysis",
  )
