"""Attention over one block of keys at a time, with memory linear in the length.

The softmax accumulates over the blocks. The backward pass recomputes the weights from
the logsumexp of each row. The dropout mask is drawn by position (`rng/uniform.py`):
each block draws its part of the mask that `attention.py` draws as a whole.

`modified_attention` changes the scores by a function, and skips hidden blocks: it
serves `flex_attention.py` and `varlen_attention.py`.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018),
https://arxiv.org/abs/1805.02867; Dao, "FlashAttention-2" (2023), section 3,
https://arxiv.org/abs/2307.08691.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from torchax.compat import jax_compat
from torchax.ops.promotion import HALVES
from torchax.rng import threefry, uniform

BLOCK = 512
"""Keys per block."""


@dataclasses.dataclass(frozen=True)
class _Config:
  """Static parameters of the computation.

  Attributes:
    is_causal: row i attends to the keys 0 … i.
    rows: queries per head, without the padding of the last block.
    keys: number of keys, without the padding of the last block.
    row_block: queries per block and head.
    block: keys per block.
    prng_impl: PRNG implementation of the dropout mask, "" without dropout. Dropout
      needs all rows in one block.
    modify: see `modified_attention`; None changes nothing.
  """

  is_causal: bool
  rows: int
  keys: int
  row_block: int
  block: int
  prng_impl: str = ""
  modify: Callable | None = None


class _Constants(NamedTuple):
  """Operands without a gradient; `attention` documents most of them.

  `operands` of the score modification have None in place of the differentiable ones.
  `pairs` are the first row and key of the blocks to compute, and their number; None
  for all blocks of keys, with all rows.
  """

  scale: float | jax.Array
  mask: jax.Array | None = None
  words: jax.Array | None = None
  high: int | jax.Array | None = None
  low: int | jax.Array | None = None
  survivor_scale: float | jax.Array = 1.0
  operands: tuple = ()
  pairs: tuple[jax.Array, jax.Array, jax.Array] | None = None


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
  prng_impl: str = threefry.NAME,
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
    prng_impl: PRNG implementation of that key.

  Returns:
    (…, heads, l, v) in the dtype of `query`.
  """
  arrays = [a for a in (query, key, value, attn_mask, words) if a is not None]
  query, key, value, *_ = jax_compat.match_varying_axes(*arrays)
  rows, keys = query.shape[-2], key.shape[-2]
  prng_impl = "" if words is None else prng_impl
  config = _Config(is_causal, rows, keys, rows, min(block, keys), prng_impl)
  if attn_mask is not None:
    attn_mask = lax.broadcast_to_rank(attn_mask, query.ndim)
    if attn_mask.shape[-1] == keys:
      attn_mask = _pad_end(attn_mask, -keys % config.block, axis=-1)
  scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
  constants = _Constants(scale, attn_mask, words, high, low, survivor_scale)
  return _attend_heads(config, query, key, value, (), constants)[0]


def modified_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  modify: Callable[[jax.Array, jax.Array, jax.Array, Any], jax.Array],
  operands: Any,
  scale: float | jax.Array,
  row_block: int | None = None,
  visible: jax.Array | None = None,
  block: int = BLOCK,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Compute attention whose scores a function modifies, in blocks.

  Args:
    query: (…, heads, l, e).
    key: (…, key heads, s, e); the number of key heads divides `heads`.
    value: (…, key heads, s, v), of the same dtype.
    modify: function `(scores, rows, columns, operands) -> scores` of a block of scores
      (…, heads, r, k), in float32 at least, and of the int32 positions of its queries
      (r,) and keys (k,). A score of -inf hides a key.
    operands: tree of arrays for `modify`; floats among them have gradients.
    scale: factor of the scores, before they are modified.
    row_block: queries per block; by default all.
    visible: bool (row blocks, key blocks), the blocks with visible keys; the others are
      skipped. None computes all; `row_block` must be None then.
    block: keys per block.

  Returns:
    Attention (…, heads, l, v) in the dtype of `query`, then logsumexp and maximum of
    each row's scores (…, heads, l) in float32 at least, -inf in rows without visible
    keys. The maximum has no gradient.
  """
  operands, structure = jax.tree.flatten(operands)
  query, key, value, *operands = jax_compat.match_varying_axes(
    query, key, value, *operands
  )

  def modify_flat(scores, rows, columns, leaves):
    return modify(scores, rows, columns, jax.tree.unflatten(structure, leaves))

  rows, keys = query.shape[-2], key.shape[-2]
  row_block = min(row_block or rows, rows)
  config = _Config(False, rows, keys, row_block, min(block, keys), modify=modify_flat)
  pairs = None
  if visible is not None and visible.size > 1:
    row_blocks, key_blocks = jnp.nonzero(visible, size=visible.size, fill_value=0)
    starts = row_blocks * config.row_block, key_blocks * config.block
    pairs = (*(s.astype(jnp.int32) for s in starts), jnp.sum(visible, dtype=jnp.int32))
  has_gradient = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in operands]
  smooth = tuple(o if is_one else None for o, is_one in zip(operands, has_gradient))
  rest = tuple(None if is_one else o for o, is_one in zip(operands, has_gradient))
  constants = _Constants(scale, operands=rest, pairs=pairs)
  return _attend_heads(config, query, key, value, smooth, constants)


def _attend_heads(config: _Config, query, key, value, operands, constants: _Constants):
  """Group the heads that share a key head, and pad to whole blocks."""
  *leading, heads, rows, features = query.shape
  key_heads = key.shape[-3]
  grouped = query.reshape(*leading, key_heads, heads // key_heads, rows, features)
  grouped = _pad_end(grouped, -rows % config.row_block, axis=-2)
  key, value = (_pad_end(t, -config.keys % config.block, axis=-2) for t in (key, value))
  results = _attend(config, grouped, key, value, operands, constants)
  output, logsumexp, peak = (
    lax.collapse(t, t.ndim - 4, t.ndim - 2)[..., :rows, :] for t in results
  )
  return output, logsumexp[..., 0], peak[..., 0]


def _pad_end(array, padding: int, axis: int):
  if not padding:
    return array
  widths = [(0, 0)] * array.ndim
  widths[axis] = (0, padding)
  return jnp.pad(array, widths)


# One block --------------------------------------------------------------------------
#
# Queries have the dimensions (…, key head, member of its group, row, feature), keys and
# values (…, key head, key, feature).


def _product(pattern: str, left, right):
  """Multiply matrices, accumulating in float32 or wider."""
  wide = jnp.float32 if left.dtype in HALVES else left.dtype
  return jnp.einsum(pattern, left, right, preferred_element_type=wide)


def _merged(array):
  """Make the rows of a group one dimension, (…, key head, row, column)."""
  return lax.collapse(array, array.ndim - 3, array.ndim - 1)


def _slice(array, start, size: int, axis: int = -2):
  return lax.dynamic_slice_in_dim(array, start, size, array.ndim + axis)


def _replace(array, part, start):
  return lax.dynamic_update_slice_in_dim(array, part, start, array.ndim - 2)


def _modify(config: _Config, scores, row, column, operands, constants: _Constants):
  """Return the scores of a block, modified, with -inf for hidden keys."""
  shape = scores.shape
  scores = lax.collapse(scores, scores.ndim - 4, scores.ndim - 2)
  rows = row + lax.iota(jnp.int32, shape[-2])
  columns = column + lax.iota(jnp.int32, shape[-1])
  if config.modify is not None:
    operands = [
      constant if operand is None else operand
      for operand, constant in zip(operands, constants.operands)
    ]
    # Padding gets valid positions: a function may index its operands by them.
    positions = (
      jnp.minimum(rows, config.rows - 1),
      jnp.minimum(columns, config.keys - 1),
    )
    scores = config.modify(scores, *positions, operands)
  visible = columns < config.keys
  if config.is_causal:
    visible &= columns <= rows[:, None]
  scores = jnp.where(visible, scores, -jnp.inf)
  mask = constants.mask
  if mask is not None:
    mask = _slice(mask, column, config.block, axis=-1) if mask.shape[-1] > 1 else mask
    scores = jnp.where(mask, scores, -jnp.inf)
  return scores.reshape(shape)


def _drop(config: _Config, weights, column, constants: _Constants):
  """Zero the weights that dropout removes; the caller scales the others."""
  if not config.prng_impl:
    return weights
  rows = lax.iota(jnp.uint32, math.prod(weights.shape[:-1]))
  rows = rows.reshape(*weights.shape[:-1], 1)
  columns = column.astype(jnp.uint32) + lax.iota(jnp.uint32, config.block)
  positions = rows * jnp.uint32(config.keys) + columns
  steps = constants.high, constants.low
  keep = uniform.bernoulli_at(config.prng_impl, constants.words, positions, *steps)
  return jnp.where(keep, weights, 0)


# All blocks -------------------------------------------------------------------------


def _over_blocks(config: _Config, constants: _Constants, step: Callable, carry):
  """Apply `step(carry, first row, first key) -> carry` to each block to compute."""
  if constants.pairs is None:
    starts = lax.iota(jnp.int32, -(-config.keys // config.block)) * config.block
    return lax.scan(lambda carry, start: (step(carry, 0, start), None), carry, starts)[
      0
    ]
  rows, columns, count = constants.pairs
  return lax.fori_loop(0, count, lambda n, c: step(c, rows[n], columns[n]), carry)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(config: _Config, query, key, value, operands, constants: _Constants):
  """Return output, logsumexp and maximum of the rows; the last two (…, rows, 1)."""
  return _forward(config, query, key, value, operands, constants)[0]


def _forward(config: _Config, query, key, value, operands, constants: _Constants):
  """Return the results and the residuals of the backward pass."""
  wide = jnp.float32 if query.dtype in HALVES else query.dtype

  def step(carry, row, column):
    rows, peak, total, output = (
      _slice(t, row, config.row_block) for t in (query, *carry)
    )
    key_block, value_block = (_slice(t, column, config.block) for t in (key, value))
    scores = _product("...hgre,...hke->...hgrk", rows, key_block) * constants.scale
    scores = _modify(config, scores, row, column, operands, constants)
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1, keepdims=True))
    # Finite also for a row whose keys are all masked so far: no inf - inf.
    shift = jnp.where(new_peak == -jnp.inf, 0, new_peak)
    weights, rescale = jnp.exp(scores - shift), jnp.exp(peak - shift)
    total = total * rescale + jnp.sum(weights, axis=-1, keepdims=True)
    dropped = _drop(config, weights, column, constants).astype(query.dtype)
    output *= rescale
    output += _product("...hgrk,...hkv->...hgrv", dropped, value_block)
    parts = new_peak, total, output
    return tuple(_replace(t, part, row) for t, part in zip(carry, parts))

  start = [
    jnp.full((*query.shape[:-1], width), number, wide)
    for width, number in ((1, -jnp.inf), (1, 0), (value.shape[-1], 0))
  ]
  *start, _ = jax_compat.match_varying_axes(*start, query)
  peak, total, output = _over_blocks(config, constants, step, tuple(start))
  total = jnp.where(total == 0, 1, total)
  output = output * (constants.survivor_scale / total)
  logsumexp = jnp.where(peak == -jnp.inf, 0, peak) + jnp.log(total)
  results = (
    output.astype(query.dtype),
    jnp.where(peak == -jnp.inf, -jnp.inf, logsumexp),
    peak,
  )
  # The residual is not rounded to `query.dtype`: the gradient of a row with one large
  # weight is a small difference, which the rounding error of the output would exceed.
  return results, (query, key, value, operands, constants, output, logsumexp)


def _backward(config: _Config, residuals, grads):
  query, key, value, operands, constants, output, logsumexp = residuals
  grad, logsumexp_grad, _ = grads
  wide, dtype = logsumexp.dtype, query.dtype
  mean = jnp.sum(grad.astype(wide) * output, axis=-1, keepdims=True) - logsumexp_grad

  def step(carry, row, column):
    query_grad, key_grad, value_grad, operand_grads = carry
    rows, grad_rows, mean_rows, lse_rows, old_query = (
      _slice(t, row, config.row_block)
      for t in (query, grad, mean, logsumexp, query_grad)
    )
    key_block, value_block, old_key, old_value = (
      _slice(t, column, config.block) for t in (key, value, key_grad, value_grad)
    )
    scores = _product("...hgre,...hke->...hgrk", rows, key_block) * constants.scale
    scores, pull = jax.vjp(
      lambda s, o: _modify(config, s, row, column, o, constants), scores, operands
    )
    weights = jnp.exp(scores - lse_rows)
    dropped = _drop(config, weights, column, constants).astype(dtype)
    new_value = _product("...rk,...rv->...kv", _merged(dropped), _merged(grad_rows))
    new_value *= constants.survivor_scale
    kept_grad = _product("...hgrv,...hkv->...hgrk", grad_rows, value_block)
    kept_grad = _drop(config, kept_grad, column, constants) * constants.survivor_scale
    scores_grad, new_operands = pull(weights * (kept_grad - mean_rows))
    scores_grad = (scores_grad * constants.scale).astype(dtype)
    new_key = _product("...rk,...re->...ke", _merged(scores_grad), _merged(rows))
    new_query = _product("...hgrk,...hke->...hgre", scores_grad, key_block)
    return (
      _replace(query_grad, old_query + new_query, row),
      _replace(key_grad, old_key + new_key, column),
      _replace(value_grad, old_value + new_value, column),
      jax.tree.map(
        lambda old, new: old + new.astype(old.dtype), operand_grads, new_operands
      ),
    )

  primals = query, key, value, operands
  start = jax.tree.map(
    lambda t: jnp.zeros_like(t, jnp.promote_types(t.dtype, wide)), primals
  )
  found = _over_blocks(config, constants, step, start)
  cast = jax.tree.map(lambda grad, primal: grad.astype(primal.dtype), found, primals)
  return *cast, None


_attend.defvjp(_forward, _backward)
