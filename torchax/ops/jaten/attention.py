"""Scaled dot-product attention, and the operations that `torch.compile` lowers it to.

The layout is torch's, (…, heads, positions, features). Both products are matrix
products over leading batch dimensions, so XLA copies no transposed operand. The softmax
is in float32 for half-precision inputs. `_attention_choice.py` lists alternatives.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from torchax.ops.builtin import op
from torchax.ops.promotion import HALVES
from torchax.registry.names import aten

# Products (query key, weights value). Grouped query heads have the dimensions (key
# head, member of its group), so that a group shares a key without copies of it.
GROUPED = ("...hgle,...hse->...hgls", "...hgls,...hse->...hgle")
PLAIN = ("...le,...se->...ls", "...ls,...se->...le")


def _check(query, key, value, attn_mask, is_causal, enable_gqa):
  if min(query.ndim, key.ndim, value.ndim) < 2:
    raise RuntimeError(
      "scaled_dot_product_attention expects query, key and value of 2 dimensions at "
      f"least, but got shapes {query.shape}, {key.shape} and {value.shape}."
    )
  if not query.dtype == key.dtype == value.dtype:
    raise RuntimeError(
      "Expected query, key, and value to have the same dtype, but got query "
      f"{query.dtype}, key {key.dtype} and value {value.dtype}."
    )
  if attn_mask is not None and is_causal:
    raise RuntimeError(
      "scaled_dot_product_attention: Explicit attn_mask should not be set when "
      "is_causal=True"
    )
  if attn_mask is not None and not (
    attn_mask.dtype == jnp.bool_ or jnp.issubdtype(attn_mask.dtype, jnp.floating)
  ):
    raise RuntimeError(
      f"Expected attn_mask dtype to be bool or float, but got {attn_mask.dtype}."
    )
  if not jnp.issubdtype(query.dtype, jnp.floating):
    raise RuntimeError(
      "scaled_dot_product_attention expects floating-point tensors, but got "
      f"{query.dtype}."
    )
  if enable_gqa:
    _check_groups(query, key, value)
  mask = None if attn_mask is None else attn_mask.shape
  require_shapes(query.shape, key.shape, value.shape, mask, enable_gqa)


def require_shapes(query, key, value, mask=None, enable_gqa=False) -> None:
  """Raise RuntimeError for inconsistent shapes.

  Args:
    query, key, value: the shapes (…, l, e), (…, s, e) and (…, s, v).
    mask: shape of the mask; None without one.
    enable_gqa: query, key and value may have different numbers of heads.
  """
  if min(map(len, (query, key, value))) < 2:
    return  # `_check` raises for these
  wrong, heads = None, 3 if enable_gqa else 2
  leading = _broadcast(*[shape[:-heads] for shape in (query, key, value)])
  if query[-1] != key[-1]:
    wrong = "query and key need the same last dimension"
  elif key[-2] != value[-2]:
    wrong = "key and value need the same number of positions, their dimension -2"
  elif leading is None:
    wrong = f"the dimensions before the last {heads} do not broadcast"
  elif mask is not None:
    batch = (*leading, query[-3]) if enable_gqa else leading
    scores = (*batch, query[-2], key[-2])
    if _broadcast(mask, scores) != scores:
      wrong = f"the mask does not broadcast to the scores, {list(scores)}"
  if wrong is not None:
    shapes = f"query {list(query)}, key {list(key)}, value {list(value)}"
    shapes += "" if mask is None else f", mask {list(mask)}"
    raise RuntimeError(f"scaled_dot_product_attention: {wrong}, but got {shapes}.")


def _broadcast(*shapes) -> tuple | None:
  try:
    return jnp.broadcast_shapes(*map(tuple, shapes))
  except ValueError:
    return None


def _check_groups(query, key, value):
  if min(query.ndim, key.ndim, value.ndim) < 3:
    raise RuntimeError(
      "enable_gqa expects a head dimension before (positions, features), but got "
      f"shapes {query.shape}, {key.shape} and {value.shape}."
    )
  heads, key_heads, value_heads = (t.shape[-3] for t in (query, key, value))
  if heads % key_heads or heads % value_heads:
    raise RuntimeError(
      "Number of heads in key and value must divide the number of heads in query, but "
      f"got {heads} query, {key_heads} key and {value_heads} value heads."
    )


def _split_heads(array, key_heads):
  """Split (…, heads, l, x) into (…, key heads, group, l, x); one head into (1, 1).

  A mask may be None or have no heads; it is returned unchanged then.
  """
  if array is None or array.ndim < 3:
    return array
  heads = array.shape[-3]
  split = (key_heads, heads // key_heads) if heads > 1 else (1, 1)
  return array.reshape(*array.shape[:-3], *split, *array.shape[-2:])


def _scores(product, query, key, attn_mask, is_causal, scale):
  """Return the masked scores, in float32 for half precision."""
  wide = jnp.float32 if query.dtype in HALVES else query.dtype
  scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
  scores = jnp.einsum(product, query, key, preferred_element_type=wide) * scale
  if is_causal:
    # Aligned at the first key, as in torch: row i attends to the keys 0 … i.
    rows = lax.broadcasted_iota(jnp.int32, scores.shape[-2:], 0)
    columns = lax.broadcasted_iota(jnp.int32, scores.shape[-2:], 1)
    return jnp.where(columns <= rows, scores, -jnp.inf)
  if attn_mask is None:
    return scores
  if attn_mask.dtype == jnp.bool_:
    return jnp.where(attn_mask, scores, -jnp.inf)
  return scores + attn_mask.astype(scores.dtype)


@jax.custom_jvp
def _safe_softmax(scores):
  """Apply softmax over the keys; a fully masked row has zero weights."""
  # XLA fuses these bounds, unlike `where`: finite without a key, and the largest weight
  # is 1, so 0.5 changes only the sum of a row without one.
  peak = jnp.max(scores, axis=-1, keepdims=True, initial=jnp.finfo(scores.dtype).min)
  weights = jnp.exp(scores - peak)
  return weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 0.5)


@_safe_softmax.defjvp
def _safe_softmax_jvp(primals, tangents):
  weights, (tangent,) = _safe_softmax(*primals), tangents
  weighted = weights * tangent
  return weights, weighted - weights * jnp.sum(weighted, axis=-1, keepdims=True)


def _drop(weights, keep_mask, dropout_p, survivor_scale):
  if keep_mask is None:
    return weights
  if survivor_scale is None:
    survivor_scale = scale_of_survivors(dropout_p)
  return jnp.where(keep_mask, weights * survivor_scale, 0)


def scale_of_survivors(dropout_p: float) -> float:
  """Return the factor of the weights that survive dropout."""
  return 1 / (1 - dropout_p) if dropout_p < 1 else 0.0


def noise_shape(query: tuple, key: tuple) -> tuple:
  """Return the shape of the weights, (…, heads, l, s); `heads` are the query's.

  Args:
    query: the shape (…, heads, l, e).
    key: the shape (…, heads, s, e).
  """
  batch, key_batch = tuple(query[:-2]), tuple(key[:-2])
  if batch and key_batch and batch[-1] != key_batch[-1]:
    leading = (*jnp.broadcast_shapes(batch[:-1], key_batch[:-1]), batch[-1])
  else:
    leading = jnp.broadcast_shapes(batch, key_batch)
  return (*leading, query[-2], key[-2])


def scaled_dot_product_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  attn_mask: jax.Array | None = None,
  keep_mask: jax.Array | None = None,
  dropout_p: float = 0.0,
  is_causal: bool = False,
  scale: float | None = None,
  enable_gqa: bool = False,
  survivor_scale: float | jax.Array | None = None,
) -> jax.Array:
  """Compute softmax(query keyᵀ scale + mask) value, with dropout of the weights.

  Args:
    query, key, value: (…, heads, l, e), (…, heads, s, e) and (…, heads, s, v), of one
      dtype; leading dimensions broadcast.
    attn_mask: broadcastable to (…, heads, l, s). Bool: True attends. Float: added to
      the scores.
    keep_mask: bool (…, heads, l, s), the weights that survive dropout; None for all.
    dropout_p: survivors are divided by 1 - dropout_p, unless `survivor_scale` is given.
    is_causal: position i attends to the keys 0 … i; excludes `attn_mask`.
    scale: factor of the scores; by default 1 / sqrt(e).
    enable_gqa: key and value have fewer heads, each shared by a group of query heads.
    survivor_scale: factor of the weights that survive dropout.

  Returns:
    (…, heads, l, v) in the dtype of `query`.

  Raises:
    RuntimeError: shapes, dtypes or masks that torch does not accept either.
  """
  _check(query, key, value, attn_mask, is_causal, enable_gqa)
  if enable_gqa and key.shape[-3] != value.shape[-3]:
    # Two group sizes have no common split: repeat the heads of both to the query's.
    heads = query.shape[-3]
    key, value = (jnp.repeat(t, heads // t.shape[-3], axis=-3) for t in (key, value))
  grouped = enable_gqa and query.shape[-3] != key.shape[-3]
  if grouped:
    split = functools.partial(_split_heads, key_heads=key.shape[-3])
    query, attn_mask, keep_mask = map(split, (query, attn_mask, keep_mask))
  score_product, value_product = GROUPED if grouped else PLAIN
  scores = _scores(score_product, query, key, attn_mask, is_causal, scale)
  weights = _drop(_safe_softmax(scores), keep_mask, dropout_p, survivor_scale)
  wide = jnp.float32 if query.dtype in HALVES else query.dtype
  output = jnp.einsum(
    value_product, weights.astype(query.dtype), value, preferred_element_type=wide
  )
  output = lax.collapse(output, -4, -2) if grouped else output
  return output.astype(query.dtype)


def _pad_positions(array, most: int, numpy):
  *leading, length, width = array.shape
  rows = numpy.zeros((*leading, most - length, width), array.dtype)
  return numpy.concatenate([array, rows], -2)


def padded_keys(key, value, attn_mask, most: int, numpy=jnp):
  """Pad keys, values and mask of attention to `most` positions.

  Args:
    key, value: (…, s, e) and (…, s, v).
    attn_mask: (…, s), or None.
    most: padded number of positions, at least s.
    numpy: module of the arrays, `numpy` or `jax.numpy`.

  Returns:
    Keys, values and a mask that excludes the padding.
  """
  length = key.shape[-2]
  if attn_mask is None:
    mask = numpy.arange(most) < length
  else:
    left_out = False if attn_mask.dtype == numpy.bool_ else -numpy.inf
    pad = numpy.full((*attn_mask.shape[:-1], most - length), left_out, attn_mask.dtype)
    mask = numpy.concatenate([attn_mask, pad], -1)
  return _pad_positions(key, most, numpy), _pad_positions(value, most, numpy), mask


# Operations that `torch.compile` lowers attention to on the CPU ----------------------


def _require_no_dropout(dropout_p):
  if dropout_p > 0:
    raise RuntimeError(
      "The CPU kernel of flash attention expects no dropout, but got dropout_p="
      f"{dropout_p}. Call torch.nn.functional.scaled_dot_product_attention."
    )


@op(aten._scaled_dot_product_flash_attention_for_cpu, static=("dropout_p", "scale"))
def _flash_attention(
  query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None
):
  """Return attention and the log of each row's sum of exponentials (…, heads, l)."""
  _require_no_dropout(dropout_p)
  output = scaled_dot_product_attention(
    query, key, value, attn_mask, is_causal=is_causal, scale=scale
  )
  scores = _scores(PLAIN[0], query, key, attn_mask, is_causal, scale)
  return output, jax.nn.logsumexp(scores, axis=-1)


@op(
  aten._scaled_dot_product_flash_attention_for_cpu_backward,
  static=("dropout_p", "scale"),
)
def _flash_attention_backward(
  grad_out,
  query,
  key,
  value,
  out,
  logsumexp,
  dropout_p,
  is_causal,
  *,
  attn_mask=None,
  scale=None,
):
  """Compute the gradients; recompute the weights, as flash attention does."""
  _require_no_dropout(dropout_p)
  attend = functools.partial(
    scaled_dot_product_attention,
    attn_mask=attn_mask,
    is_causal=is_causal,
    scale=scale,
  )
  return jax.vjp(attend, query, key, value)[1](grad_out)
