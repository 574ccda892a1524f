"""Multi-head attention with its projections, and torch.nn's inference shortcuts.

`multi_head_attention` is `torch.nn.functional.multi_head_attention_forward` for the
common calls of `torch.nn.MultiheadAttention` (`functions/multi_head.py`). It is one
program with one gradient, instead of a dozen of each.

In eval mode, without gradients and outside the environment, `TransformerEncoderLayer`
and `MultiheadAttention` call one ATen operation each. Here they are composed of torch's
functions. Inside the environment torch does not take these shortcuts.
"""

import math

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax import lax

from torchax.ops.builtin import Kind, op
from torchax.ops.jaten import attention
from torchax.ops.promotion import widen
from torchax.registry.names import aten


def project(input: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
  """Return input weightᵀ + bias, without transposing the weight."""
  contracted = ((input.ndim - 1,), (1,))
  product = lax.dot_general(input, weight, (contracted, ((), ())))
  return product if bias is None else product + bias


def _project_inputs(query, key, value, weight, bias, heads: int):
  """Project query, key and value to (batch, heads, positions, width / heads).

  Inputs that are None equal the previous one and share its product.
  """
  inputs = [array for array in (query, key, value) if array is not None]
  # Number of projections of each input; they sum to 3.
  shares = {1: (3,), 2: (1, 2), 3: (1, 1, 1)}[len(inputs)]
  width = query.shape[-1]
  done: list[jax.Array] = []
  for input, share in zip(inputs, shares):
    rows = slice(len(done) * width, (len(done) + share) * width)
    part = project(input, weight[rows], None if bias is None else bias[rows])
    part = part.reshape(*part.shape[:-1], share, heads, width // heads)
    done += [part[:, :, index].transpose(1, 2, 0, 3) for index in range(share)]
  return done


def _merge_masks(mask, padding, batch: int, heads: int, dtype):
  """Merge both masks into one of (batch or 1, heads or 1, l or 1, s), or None."""
  if mask is not None:
    grouped = (batch, heads) if mask.ndim == 3 else (1, 1)
    mask = mask.reshape(*grouped, *mask.shape[-2:])
  if padding is not None:
    padding = padding[:, None, None, :]
  masks = [each for each in (mask, padding) if each is not None]
  numbers = [
    jnp.where(each, -jnp.inf, 0).astype(dtype) if each.dtype == jnp.bool_ else each
    for each in masks
  ]
  return sum(numbers[1:], numbers[0]) if numbers else None


def _attention_weights(scaled_query, key, mask_scores):
  """Return the weights of attention, (batch, heads, l, s)."""
  scores = widen(jnp.einsum(attention.PLAIN[0], scaled_query, key))
  scores = scores if mask_scores is None else scores + mask_scores
  return jax.nn.softmax(scores, axis=-1).astype(scaled_query.dtype)


def multi_head_attention(
  query: jax.Array,
  key: jax.Array | None,
  value: jax.Array | None,
  in_weight: jax.Array,
  in_bias: jax.Array | None,
  out_weight: jax.Array,
  out_bias: jax.Array | None,
  attn_mask: jax.Array | None = None,
  key_padding_mask: jax.Array | None = None,
  keep_mask: jax.Array | None = None,
  survivor_scale: float | jax.Array | None = None,
  *,
  heads: int,
  weights: str | None = None,
):
  """Project the inputs, attend in `heads` heads, and project the results.

  Args:
    query: (l, batch, width).
    key: (s, batch, width); None if it equals the query.
    value: (s, batch, width); None if it equals the key.
    in_weight, in_bias: (3 width, width) and (3 width,), for query, key and value.
    out_weight, out_bias: (width, width) and (width,).
    attn_mask: (l, s) or (batch heads, l, s); True masks a key, floats are added to the
      scores.
    key_padding_mask: (batch, s), with the same meaning.
    keep_mask: bool (batch, heads, l, s), True for weights that survive dropout.
    survivor_scale: factor of these weights.
    heads: number of heads, a divisor of the width.
    weights: the weights to return: None, "mean" over the heads, or "all".

  Returns:
    The output (l, batch, width). With `weights`, a pair of it and the weights:
    (batch, l, s) for "mean", (batch, heads, l, s) for "all".
  """
  length, batch, width = query.shape
  q, k, v = _project_inputs(query, key, value, in_weight, in_bias, heads)
  mask_scores = _merge_masks(attn_mask, key_padding_mask, batch, heads, q.dtype)
  if weights is None:
    mixed = attention.scaled_dot_product_attention(
      *(q, k, v, mask_scores, keep_mask), survivor_scale=survivor_scale
    )
  else:
    attended = _attention_weights(q * math.sqrt(heads / width), k, mask_scores)
    mixed = jnp.einsum(attention.PLAIN[1], attended, v)
  mixed = mixed.transpose(2, 0, 1, 3).reshape(length, batch, width)
  output = project(mixed, out_weight, out_bias)
  if weights is None:
    return output
  return output, attended.mean(axis=1) if weights == "mean" else attended


# --- Inference shortcuts ------------------------------------------------------------

# torch's code for this type of mask.
_KEY_PADDING = 1


def _additive_mask(mask, mask_type, like):
  """Convert a mask to numbers to add to the scores (batch, heads, l, s), or None."""
  if mask is None:
    return None
  if mask_type == _KEY_PADDING:
    mask = mask[:, None, None, :]
  if mask.dtype is not torch.bool:
    return mask
  return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))


@op(aten._native_multi_head_attention, kind=Kind.TENSORS)
def _aten__native_multi_head_attention(
  query,
  key,
  value,
  embed_dim,
  num_head,
  qkv_weight,
  qkv_bias,
  proj_weight,
  proj_bias,
  mask=None,
  need_weights=True,
  average_attn_weights=True,
  mask_type=None,
):
  projections = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3))
  projected = (F.linear(x, w, b) for x, w, b in projections)
  # (batch, length, width) as (batch, heads, length, width / heads).
  q, k, v = (p.unflatten(-1, (num_head, -1)).transpose(1, 2) for p in projected)
  scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
  mask_scores = _additive_mask(mask, mask_type, scores)
  weights = torch.softmax(
    scores if mask_scores is None else scores + mask_scores, dim=-1
  )
  mixed = (weights @ v).transpose(1, 2).flatten(-2)
  output = F.linear(mixed, proj_weight, proj_bias)
  if not need_weights:
    return output, None
  return output, weights.mean(dim=1) if average_attn_weights else weights


@op(aten._transformer_encoder_layer_fwd, kind=Kind.TENSORS)
def _aten__transformer_encoder_layer_fwd(
  src,
  embed_dim,
  num_heads,
  qkv_weight,
  qkv_bias,
  proj_weight,
  proj_bias,
  use_gelu,
  norm_first,
  eps,
  norm_weight_1,
  norm_bias_1,
  norm_weight_2,
  norm_bias_2,
  ffn_weight_1,
  ffn_bias_1,
  ffn_weight_2,
  ffn_bias_2,
  mask=None,
  mask_type=None,
):
  def attend(x):
    return _aten__native_multi_head_attention(
      *(x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias),
      mask=mask,
      need_weights=False,
      mask_type=mask_type,
    )[0]

  def feed(x):
    activation = F.gelu if use_gelu else F.relu
    hidden = activation(F.linear(x, ffn_weight_1, ffn_bias_1))
    return F.linear(hidden, ffn_weight_2, ffn_bias_2)

  def norm_1(x):
    return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

  def norm_2(x):
    return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

  if norm_first:
    src = src + attend(norm_1(src))
    return src + feed(norm_2(src))
  src = norm_1(src + attend(src))
  return norm_2(src + feed(src))


@op(aten._nested_tensor_from_mask_left_aligned, compiled=False)
def _aten__nested_tensor_from_mask_left_aligned(t, mask):
  """Return False: `TransformerEncoder` then computes on the padded tensor."""
  return False
