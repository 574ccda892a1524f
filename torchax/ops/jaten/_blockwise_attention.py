"""Attention over one block of keys at a time, with memory linear in the length.

The softmax accumulates over the blocks. The backward pass recomputes the weights from
the logsumexp of each row. The dropout mask is drawn by position (`rng/uniform.py`):
each block draws its part of the mask that `attention.py` draws as a whole.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018),
https://arxiv.org/abs/1805.02867; Dao, "FlashAttention-2" (2023), section 3,
https://arxiv.org/abs/2307.08691.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from torchax.compat import jax_compat
from torchax.ops.promotion import HALVES
from torchax.rng import uniform

BLOCK = 512
"""Keys per block."""


@dataclasses.dataclass(frozen=True)
class _Config:
  """Static parameters of the computation.

  Attributes:
    is_causal: row i attends to the keys 0 … i.
    rows: queries per head; grouped heads are consecutive rows of one product.
    keys: number of keys, without the padding of the last block.
    block: keys per block.
    drops: apply dropout.
  """

  is_causal: bool
  rows: int
  keys: int
  block: int
  drops: bool


class _Constants(NamedTuple):
  """Operands without a gradient; `attention` documents them."""

  mask: jax.Array | None
  words: jax.Array | None
  high: int | jax.Array | None
  low: int | jax.Array | None
  survivor_scale: float | jax.Array
  scale: float | jax.Array


def attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  attn_mask: jax.Array | None = None,
  words: jax.Array | None = None,
  high: int | jax.Array | None = None,
  low: int | jax.Array | None = None,
  survivor_scale: float | jax.Array = 1.0,
  is_causal: bool = False,
  scale: float | jax.Array | None = None,
  block: int = BLOCK,
) -> jax.Array:
  """Compute `attention.scaled_dot_product_attention` in blocks of keys.

  Args:
    query: (…, heads, l, e).
    key: (…, key heads, s, e); the number of key heads divides `heads`.
    value: (…, key heads, s, v), of the same dtype.
    attn_mask: bool, broadcastable to (…, heads, l, s); True attends.
    words: data of the key that draws the dropout mask; None without dropout.
    high, low: `uniform.steps_below` of the probability to keep.
    survivor_scale: factor of the weights that survive dropout.
    is_causal: position i attends to the keys 0 … i.
    scale: factor of the scores; by default 1 / sqrt(e).
    block: keys per block.

  Returns:
    (…, heads, l, v) in the dtype of `query`.
  """
  arrays = [a for a in (query, key, value, attn_mask, words) if a is not None]
  query, key, value, *_ = jax_compat.match_varying_axes(*arrays)
  *leading, heads, rows, features = query.shape
  key_heads, keys = key.shape[-3:-1]
  config = _Config(is_causal, rows, keys, min(block, keys), words is not None)
  # The queries that share a key head are rows of one product.
  grouped = query.reshape(*leading, key_heads, heads // key_heads * rows, features)
  padding = -keys % config.block
  if attn_mask is not None:
    attn_mask = lax.broadcast_to_rank(attn_mask, query.ndim)
    if attn_mask.shape[-1] == keys:
      attn_mask = _pad_end(attn_mask, padding, axis=-1)
  scale = 1 / math.sqrt(features) if scale is None else scale
  constants = _Constants(attn_mask, words, high, low, survivor_scale, scale)
  key, value = (_pad_end(array, padding, axis=-2) for array in (key, value))
  output = _attend(config, grouped, key, value, constants)
  return output.reshape(*leading, heads, rows, value.shape[-1])


def _pad_end(array, padding: int, axis: int):
  if not padding:
    return array
  widths = [(0, 0)] * array.ndim
  widths[axis] = (0, padding)
  return jnp.pad(array, widths)


# One block --------------------------------------------------------------------------


def _product(pattern: str, left, right):
  """Multiply matrices, accumulating in float32 or wider."""
  wide = jnp.float32 if left.dtype in HALVES else left.dtype
  return jnp.einsum(pattern, left, right, preferred_element_type=wide)


def _block_of(config: _Config, array, start, axis: int):
  return lax.dynamic_slice_in_dim(array, start, config.block, array.ndim + axis)


def _scores(config: _Config, query, key, start, constants: _Constants):
  """Return the scores of a block, with -inf for masked keys."""
  scores = _product("...re,...ke->...rk", query, key) * constants.scale
  columns = start + lax.broadcasted_iota(jnp.int32, scores.shape[-2:], 1)
  visible = columns < config.keys
  if config.is_causal:
    rows = lax.broadcasted_iota(jnp.int32, scores.shape[-2:], 0) % config.rows
    visible &= columns <= rows
  scores = jnp.where(visible, scores, -jnp.inf)
  mask = constants.mask
  if mask is None:
    return scores
  if mask.shape[-1] > 1:
    mask = _block_of(config, mask, start, -1)
  *leading, key_heads, all_rows, width = scores.shape
  heads = key_heads * all_rows // config.rows
  mask = jnp.broadcast_to(mask, (*leading, heads, config.rows, width))
  return jnp.where(mask.reshape(scores.shape), scores, -jnp.inf)


def _drop(config: _Config, weights, start, constants: _Constants):
  """Zero the weights that dropout removes; the caller scales the others."""
  if not config.drops:
    return weights
  rows = lax.iota(jnp.uint32, math.prod(weights.shape[:-1]))
  rows = rows.reshape(*weights.shape[:-1], 1)
  columns = start.astype(jnp.uint32) + lax.iota(jnp.uint32, config.block)
  positions = rows * jnp.uint32(config.keys) + columns
  keep = uniform.bernoulli_at(constants.words, positions, constants.high, constants.low)
  return jnp.where(keep, weights, 0)


def _block_starts(config: _Config, key):
  return lax.iota(jnp.int32, key.shape[-2] // config.block) * config.block


# All blocks -------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(config: _Config, query, key, value, constants: _Constants):
  return _forward(config, query, key, value, constants)[0]


def _forward(config: _Config, query, key, value, constants: _Constants):
  """Return the output and the residuals of the backward pass."""
  wide = jnp.float32 if query.dtype in HALVES else query.dtype

  def step(carry, start):
    peak, total, output = carry
    scores = _scores(config, query, _block_of(config, key, start, -2), start, constants)
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1, keepdims=True))
    # Finite also for a row whose keys are all masked so far: no inf - inf.
    shift = jnp.where(new_peak == -jnp.inf, 0, new_peak)
    weights, rescale = jnp.exp(scores - shift), jnp.exp(peak - shift)
    total = total * rescale + jnp.sum(weights, axis=-1, keepdims=True)
    dropped = _drop(config, weights, start, constants).astype(query.dtype)
    value_block = _block_of(config, value, start, -2)
    output = output * rescale + _product("...rk,...kv->...rv", dropped, value_block)
    return (new_peak, total, output), None

  start = [
    jnp.full((*query.shape[:-1], width), number, wide)
    for width, number in ((1, -jnp.inf), (1, 0), (value.shape[-1], 0))
  ]
  *start, _ = jax_compat.match_varying_axes(*start, query)
  (peak, total, output), _ = lax.scan(step, tuple(start), _block_starts(config, key))
  total = jnp.where(total == 0, 1, total)
  output = output * (constants.survivor_scale / total)
  logsumexp = jnp.where(peak == -jnp.inf, 0, peak) + jnp.log(total)
  # The residual is not rounded to `query.dtype`: the gradient of a row with one large
  # weight is a small difference, which the rounding error of the output would exceed.
  return output.astype(query.dtype), (query, key, value, constants, output, logsumexp)


def _backward(config: _Config, residuals, grad):
  query, key, value, constants, output, logsumexp = residuals
  wide = logsumexp.dtype
  dtype = query.dtype
  mean = jnp.sum(grad.astype(wide) * output, axis=-1, keepdims=True)

  def step(query_grad, start):
    key_block, value_block = (_block_of(config, t, start, -2) for t in (key, value))
    weights = jnp.exp(_scores(config, query, key_block, start, constants) - logsumexp)
    dropped = _drop(config, weights, start, constants).astype(dtype)
    value_grad = _product("...rk,...rv->...kv", dropped, grad)
    kept_grad = _product("...rv,...kv->...rk", grad, value_block)
    kept_grad = _drop(config, kept_grad, start, constants) * constants.survivor_scale
    scores_grad = (weights * (kept_grad - mean) * constants.scale).astype(dtype)
    key_grad = _product("...rk,...re->...ke", scores_grad, query)
    query_grad += _product("...rk,...ke->...re", scores_grad, key_block)
    value_grad *= constants.survivor_scale
    return query_grad, (key_grad.astype(dtype), value_grad.astype(dtype))

  start = jnp.zeros_like(query, wide)
  query_grad, block_grads = lax.scan(step, start, _block_starts(config, key))
  # (blocks, …, keys per block, features) to (…, keys, features).
  key_grad, value_grad = (
    lax.collapse(jnp.moveaxis(blocks, 0, -3), -3, -1) for blocks in block_grads
  )
  return query_grad.astype(dtype), key_grad, value_grad, None


_attend.defvjp(_forward, _backward)
