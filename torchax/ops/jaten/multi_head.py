"""Multi-head attention with its projections, as one pure function.

It is `torch.nn.functional.multi_head_attention_forward` for what
`torch.nn.MultiheadAttention` is mostly called with. One program and one gradient take
the place of a dozen of each.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from torchax.ops.jaten import attention
from torchax.ops.jaten._opmath import widen


def project(input: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
  """input weightᵀ + bias, the weight contracted as it lies."""
  contracted = ((input.ndim - 1,), (1,))
  product = lax.dot_general(input, weight, (contracted, ((), ())))
  return product if bias is None else product + bias


def _projections(query, key, value, weight, bias, heads: int):
  """Each (batch, heads, positions, width / heads); equal inputs share a product."""
  inputs = [array for array in (query, key, value) if array is not None]
  # How many of query, key and value each input stands for.
  shares = {1: (3,), 2: (1, 2), 3: (1, 1, 1)}[len(inputs)]
  width = query.shape[-1]
  done: list[jax.Array] = []
  for input, share in zip(inputs, shares):
    rows = slice(len(done) * width, (len(done) + share) * width)
    part = project(input, weight[rows], None if bias is None else bias[rows])
    part = part.reshape(*part.shape[:-1], share, heads, width // heads)
    done += [part[:, :, index].transpose(1, 2, 0, 3) for index in range(share)]
  return done


def _added(mask, padding, batch: int, heads: int, dtype):
  """Both masks as one, of (batch or 1, heads or 1, l or 1, s); None for none."""
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
  """Projections, attention in `heads` heads, and the projection of their results.

  Args:
    query: (l, batch, width).
    key: (s, batch, width); None where it is the query.
    value: as the key; None where it is the key.
    in_weight: (3 width, width), of query, key and value.
    in_bias: (3 width,).
    out_weight: (width, width).
    out_bias: (width,).
    attn_mask: (l, s) or (batch heads, l, s); bool is True for what is left out, floats
      are added to the scores.
    key_padding_mask: (batch, s), in the same way.
    keep_mask: bool (batch, heads, l, s), the weights that survive dropout.
    survivor_scale: what these are multiplied by.
    heads: divides the width.
    weights: which ones are returned: None, "mean" over the heads, or "all".

  Returns:
    (l, batch, width); with `weights` a pair of it and of (batch, l, s) or
    (batch, heads, l, s).
  """
  length, batch, width = query.shape
  q, k, v = _projections(query, key, value, in_weight, in_bias, heads)
  added = _added(attn_mask, key_padding_mask, batch, heads, q.dtype)
  if weights is None:
    mixed = attention.scaled_dot_product_attention(
      *(q, k, v, added, keep_mask), survivor_scale=survivor_scale
    )
  else:
    scores = widen(jnp.einsum(attention.PLAIN[0], q * math.sqrt(heads / width), k))
    scores = scores if added is None else scores + added
    shares = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    mixed = jnp.einsum(attention.PLAIN[1], shares, v)
  mixed = mixed.transpose(2, 0, 1, 3).reshape(length, batch, width)
  output = project(mixed, out_weight, out_bias)
  if weights is None:
    return output
  return output, shares.mean(axis=1) if weights == "mean" else shares
