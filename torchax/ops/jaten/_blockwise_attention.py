"""Attention over one block of keys at a time, with memory linear in the length.

The softmax accumulates over the blocks. The backward pass recomputes the weights from
the logarithm of each row's sum. The dropout mask is drawn by position
(`rng/units.py`): each block draws its part of the mask that `attention.py` draws as a
whole.

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
from torchax.rng import units

BLOCK = 512
"""Keys per block."""


@dataclasses.dataclass(frozen=True)
class _Form:
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


class _Rest(NamedTuple):
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
    high, low: `units.steps_below` of the probability to keep.
    survivor_scale: factor of the weights that survive dropout.
    is_causal: position i attends to the keys 0 … i.
    scale: factor of the scores; by default 1 / sqrt(e).
    block: keys per block.

  Returns:
    (…, heads, l, v) in the dtype of `query`.
  """
  given = [a for a in (query, key, value, attn_mask, words) if a is not None]
  query, key, value, *_ = jax_compat.varying_alike(*given)
  *leading, heads, rows, features = query.shape
  key_heads, keys = key.shape[-3:-1]
  form = _Form(is_causal, rows, keys, min(block, keys), words is not None)
  # The queries that share a key head are rows of one product.
  grouped = query.reshape(*leading, key_heads, heads // key_heads * rows, features)
  missing = -keys % form.block
  if attn_mask is not None:
    attn_mask = attn_mask.reshape(
      (1,) * (query.ndim - attn_mask.ndim) + attn_mask.shape
    )
    if attn_mask.shape[-1] == keys:
      attn_mask = _filled_up(attn_mask, missing, axis=-1)
  scale = 1 / math.sqrt(features) if scale is None else scale
  rest = _Rest(attn_mask, words, high, low, survivor_scale, scale)
  key, value = (_filled_up(array, missing, axis=-2) for array in (key, value))
  output = _attend(form, grouped, key, value, rest)
  return output.reshape(*leading, heads, rows, value.shape[-1])


def _filled_up(array, missing: int, axis: int):
  if not missing:
    return array
  widths = [(0, 0)] * array.ndim
  widths[axis] = (0, missing)
  return jnp.pad(array, widths)


# One block --------------------------------------------------------------------------


def _product(pattern: str, left, right):
  """Multiply matrices, accumulating in float32 or wider."""
  wide = jnp.float32 if left.dtype in HALVES else left.dtype
  return jnp.einsum(pattern, left, right, preferred_element_type=wide)


def _block_of(form: _Form, array, start, axis: int):
  return lax.dynamic_slice_in_dim(array, start, form.block, array.ndim + axis)


def _scores(form: _Form, query, key, start, rest: _Rest):
  """Return the scores of a block, with -inf for masked keys."""
  scores = _product("...re,...ke->...rk", query, key) * rest.scale
  columns = start + lax.broadcasted_iota(jnp.int32, scores.shape[-2:], 1)
  visible = columns < form.keys
  if form.is_causal:
    rows = lax.broadcasted_iota(jnp.int32, scores.shape[-2:], 0) % form.rows
    visible &= columns <= rows
  scores = jnp.where(visible, scores, -jnp.inf)
  mask = rest.mask
  if mask is None:
    return scores
  if mask.shape[-1] > 1:
    mask = _block_of(form, mask, start, -1)
  *leading, key_heads, all_rows, width = scores.shape
  heads = key_heads * all_rows // form.rows
  mask = jnp.broadcast_to(mask, (*leading, heads, form.rows, width))
  return jnp.where(mask.reshape(scores.shape), scores, -jnp.inf)


def _kept(form: _Form, weights, start, rest: _Rest):
  """Zero the weights that dropout removes; the caller scales the others."""
  if not form.drops:
    return weights
  rows = lax.iota(jnp.uint32, math.prod(weights.shape[:-1]))
  rows = rows.reshape(*weights.shape[:-1], 1)
  columns = start.astype(jnp.uint32) + lax.iota(jnp.uint32, form.block)
  places = rows * jnp.uint32(form.keys) + columns
  keep = units.bernoulli_at(rest.words, places, rest.high, rest.low)
  return jnp.where(keep, weights, 0)


def _starts(form: _Form, key):
  return lax.iota(jnp.int32, key.shape[-2] // form.block) * form.block


# All blocks -------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form: _Form, query, key, value, rest: _Rest):
  return _forward(form, query, key, value, rest)[0]


def _forward(form: _Form, query, key, value, rest: _Rest):
  """Return the output and the residuals of the backward pass."""
  wide = jnp.float32 if query.dtype in HALVES else query.dtype

  def turn(so_far, start):
    peak, total, output = so_far
    scores = _scores(form, query, _block_of(form, key, start, -2), start, rest)
    higher = jnp.maximum(peak, jnp.max(scores, axis=-1, keepdims=True))
    # Finite also for a row whose keys are all masked so far: no inf - inf.
    base = jnp.where(higher == -jnp.inf, 0, higher)
    weights, before = jnp.exp(scores - base), jnp.exp(peak - base)
    total = total * before + jnp.sum(weights, axis=-1, keepdims=True)
    kept = _kept(form, weights, start, rest).astype(query.dtype)
    found = _product("...rk,...kv->...rv", kept, _block_of(form, value, start, -2))
    return (higher, total, output * before + found), None

  start = [
    jnp.full((*query.shape[:-1], width), number, wide)
    for width, number in ((1, -jnp.inf), (1, 0), (value.shape[-1], 0))
  ]
  *start, _ = jax_compat.varying_alike(*start, query)
  (peak, total, output), _ = lax.scan(turn, tuple(start), _starts(form, key))
  total = jnp.where(total == 0, 1, total)
  output = output * (rest.survivor_scale / total)
  logarithm = jnp.where(peak == -jnp.inf, 0, peak) + jnp.log(total)
  # The residual is not rounded to `query.dtype`: the gradient of a row with one large
  # weight is a small difference, which the rounding error of the output would exceed.
  return output.astype(query.dtype), (query, key, value, rest, output, logarithm)


def _backward(form: _Form, residuals, grad):
  query, key, value, rest, output, logarithm = residuals
  wide = logarithm.dtype
  dtype = query.dtype
  mean = jnp.sum(grad.astype(wide) * output, axis=-1, keepdims=True)

  def turn(of_query, start):
    key_here, value_here = (_block_of(form, t, start, -2) for t in (key, value))
    weights = jnp.exp(_scores(form, query, key_here, start, rest) - logarithm)
    kept = _kept(form, weights, start, rest).astype(dtype)
    of_value = _product("...rk,...rv->...kv", kept, grad)
    of_kept = _product("...rv,...kv->...rk", grad, value_here)
    of_kept = _kept(form, of_kept, start, rest) * rest.survivor_scale
    of_scores = (weights * (of_kept - mean) * rest.scale).astype(dtype)
    of_key = _product("...rk,...re->...ke", of_scores, query)
    of_query += _product("...rk,...ke->...re", of_scores, key_here)
    of_value *= rest.survivor_scale
    return of_query, (of_key.astype(dtype), of_value.astype(dtype))

  start = jnp.zeros_like(query, wide)
  of_query, of_blocks = lax.scan(turn, start, _starts(form, key))
  of_key, of_value = (_joined(blocks) for blocks in of_blocks)
  return of_query.astype(dtype), of_key, of_value, None


def _joined(blocks):
  """Reshape (blocks, …, keys per block, features) to (…, keys, features)."""
  joined = jnp.moveaxis(blocks, 0, -3)
  return joined.reshape(*joined.shape[:-3], -1, joined.shape[-1])


_attend.defvjp(_forward, _backward)
