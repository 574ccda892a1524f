"""Compiled training step of transformer blocks, each with three dropouts.

The baseline is the same step in plain JAX with explicit keys: `dot_general` on weights
that are not transposed, fused query-key-value projection, softmax attention, GELU.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch.nn.functional as F
from jax import lax

from benchmarks.timing import Row, arrays, compare
from benchmarks.transformer import LEARNING_RATE, RATE, Size
from torchax.interop import JittableModule, jax_jit, jax_value_and_grad

SMALL = Size()


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


def _attention(query, key, value):
  if jax.default_backend() == "gpu" and query.dtype == jnp.bfloat16:
    return jax.nn.dot_product_attention(query, key, value, implementation="cudnn")
  query, key, value = (jnp.swapaxes(part, 1, 2) for part in (query, key, value))
  scores = jnp.einsum("bhle,bhse->bhls", query, key) / np.sqrt(query.shape[-1])
  mixed = jnp.einsum("bhls,bhse->bhle", jax.nn.softmax(scores), value)
  return jnp.swapaxes(mixed, 1, 2)


def _block(p, keys, x, heads):
  batch, length, width = x.shape
  qkv = _linear(p, "qkv", _norm(p, "norm1", x))
  qkv = qkv.reshape(batch, length, 3, heads, width // heads)
  mixed = _attention(*jnp.transpose(qkv, (2, 0, 1, 3, 4))).reshape(x.shape)
  x = x + _dropout(keys[0], _linear(p, "out", mixed))
  hidden = jax.nn.gelu(_linear(p, "up", _norm(p, "norm2", x)), approximate=False)
  return x + _dropout(keys[2], _linear(p, "down", _dropout(keys[1], hidden)))


def _plain_step(size, params, key, count, x, y):
  def loss(params):
    keys = jax.random.split(jax.random.fold_in(key, count), (size.blocks, 3))
    out = x
    for index in range(size.blocks):
      prefix = f"{index}."
      own = {
        k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)
      }
      out = _block(own, keys[index], out, size.heads)
    return jnp.mean((out - y) ** 2)

  value, grads = jax.value_and_grad(loss)(params)
  updated = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)
  return value, updated


def steps(size: Size = SMALL):
  """Return our step and JAX's on the same data, not compiled yet."""
  module = JittableModule(size.model().to("jax"))
  x, y = size.data("jax")
  params = {name: p.detach() for name, p in module.params.items()}

  def loss(params, x, y):
    return F.mse_loss(module.functional_call("forward", params, {}, x), y)

  value_and_grad = jax_value_and_grad(loss)

  def step(params, x, y):
    value, grads = value_and_grad(params, x, y)
    return value, {k: p - LEARNING_RATE * grads[k] for k, p in params.items()}

  plain_params = {name: p.jax() for name, p in params.items()}
  ours = functools.partial(jax_jit(step), params, x, y)
  plain = functools.partial(
    jax.jit(functools.partial(_plain_step, size)),
    plain_params,
    jax.random.key(0),
    np.uint32(0),
    x.jax(),
    y.jax(),
  )
  return ours, plain


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
    ours, plain = steps()
    times.append((_first_call(ours), _first_call(plain)))
  first.ours_us, first.baseline_us = (sorted(column)[1] for column in zip(*times))
  ours, plain = steps()
  blocks = SMALL.blocks
  name = f"train step, {blocks} transformer blocks, {3 * blocks} dropouts"
  steady = compare(name, lambda: ours()[0], lambda: plain()[0], 0.90)
  return [steady, first, memory_row(ours, plain)]


def memory_row(ours, plain) -> Row:
  """Return XLA's estimate of temporary memory."""
  own = ours.func.lower(*ours.args).compile().memory_analysis()
  theirs = plain.func.lower(*plain.args).compile().memory_analysis()
  return Row(
    "train step, temporary memory",
    "plain JAX",
    own.temp_size_in_bytes,
    theirs.temp_size_in_bytes,
    1.0,
    "XLA's memory analysis",
    unit="bytes",
  )
