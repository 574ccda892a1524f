"""`varlen_attn`: attention of sequences that are packed in one dimension.

A query attends to one interval of the packed keys, which its sequence, the window and
the used part of the keys determine. Blocks outside of all intervals are skipped, see
`_blockwise_attention.py`. The operators are registered by name: torch defines them
once `torch.nn.attention.varlen` is imported.
"""

import functools
import math

import jax
import jax.numpy as jnp
import torch

from torchax.ops.builtin import Kind, op
from torchax.ops.jaten import _blockwise_attention as blockwise

# Lengths that only size the kernels of GPUs: other ones compile nothing.
_LENGTHS = ("max_q", "max_k", "num_splits")


@op("torch_attn::_varlen_attn", dynamic=_LENGTHS)
def _varlen_attn(
  query,
  key,
  value,
  cu_seq_q,
  cu_seq_k,
  max_q,
  max_k,
  is_causal=False,
  scale=None,
  window_size=None,
  enable_gqa=False,
  seqused_k=None,
  block_table=None,
  num_splits=None,
):
  """Return attention (tq, heads, v), logsumexp (heads, tq), and an unused state."""
  if block_table is not None:
    # Pages (pages, page size, key heads, e) become one run of keys per sequence.
    count = block_table.shape[0]
    key, value = (t[block_table].reshape(-1, *t.shape[2:]) for t in (key, value))
    cu_seq_k = jnp.arange(count + 1) * (key.shape[0] // count)
  if cu_seq_k is None:
    raise RuntimeError(
      "varlen_attn expects cu_seq_k or block_table, but got None for both. Pass "
      "cu_seq_k, the first positions of the sequences of keys and their end."
    )
  intervals = _intervals(
    query.shape[0], cu_seq_q, cu_seq_k, seqused_k, window_size, is_causal
  )
  output, logsumexp = _attend(query, key, value, intervals, scale)
  return output, logsumexp, jnp.zeros(2, jnp.uint32)


@op("torch_attn::_varlen_attn_out", kind=Kind.TENSORS)
def _varlen_attn_out(out, *args):
  result, logsumexp, _ = torch.ops.torch_attn._varlen_attn(*args)
  out.copy_(result)
  return logsumexp


@op("torch_attn::_varlen_attn_backward", dynamic=_LENGTHS)
def _varlen_attn_backward(
  grad_out,
  query,
  key,
  value,
  out,
  lse,
  cu_seq_q,
  cu_seq_k,
  max_q,
  max_k,
  is_causal,
  rng_state,
  scale=None,
  window_size=None,
):
  """Compute the gradients; `out` is rounded, so recompute the forward pass."""
  intervals = _intervals(
    query.shape[0], cu_seq_q, cu_seq_k, None, window_size, is_causal
  )
  attend = lambda *arrays: _attend(*arrays, intervals, scale)[0]  # noqa: E731
  return jax.vjp(attend, query, key, value)[1](grad_out)


def _intervals(queries: int, starts_q, starts_k, used, window_size, is_causal):
  """Return the first and last packed key of each query (tq,); last < first for none.

  As in flash attention, the last query of a sequence is aligned with its last key, and
  a negative window is unlimited.
  """
  left, right = (-1, -1) if window_size is None else window_size
  right = 0 if is_causal else right
  lengths_q = jnp.diff(starts_q)
  lengths_k = jnp.diff(starts_k) if used is None else used
  positions = jnp.arange(queries)
  sequence = jnp.searchsorted(starts_q, positions, side="right") - 1
  is_outside = (sequence < 0) | (sequence >= lengths_q.size)
  sequence = jnp.clip(sequence, 0, lengths_q.size - 1)
  start, length = starts_k[sequence], lengths_k[sequence]
  aligned = positions - starts_q[sequence] + length - lengths_q[sequence]
  first = start + (0 if left < 0 else jnp.maximum(aligned - left, 0))
  last = start + (length - 1 if right < 0 else jnp.minimum(aligned + right, length - 1))
  return first, jnp.where(is_outside, -1, last)


def _hide(scores, rows, columns, intervals):
  first, last = (t[rows][:, None] for t in intervals)
  return jnp.where((first <= columns) & (columns <= last), scores, -jnp.inf)


def _attend(query, key, value, intervals, scale):
  """Return attention (tq, heads, v) and logsumexp (heads, tq) of packed sequences."""
  scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
  block = blockwise.BLOCK
  first, last = (
    jnp.pad(t, (0, -t.size % block), "edge").reshape(-1, block) for t in intervals
  )
  starts = jnp.arange(0, key.shape[0], block)
  visible = jnp.min(first, 1, keepdims=True) < starts + block
  visible &= starts <= jnp.max(last, 1, keepdims=True)
  by_head = functools.partial(jnp.swapaxes, axis1=0, axis2=1)
  output, logsumexp, _ = blockwise.modified_attention(
    *map(by_head, (query, key, value)),
    _hide,
    intervals,
    scale,
    block if visible.size > 1 else None,
    visible,
    block,
  )
  return by_head(output), logsumexp.astype(jnp.float32)
