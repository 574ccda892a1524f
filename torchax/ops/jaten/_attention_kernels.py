"""JAX's flash attention kernels for GPUs and TPUs, in torch's layout.

`_attention_choice.py` has the calls that each kernel supports. The kernels define
their own derivatives: first order, reverse mode only.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from torchax.compat import jax_compat
from torchax.ops.jaten._attention_choice import CUDNN, PALLAS
from torchax.ops.jaten.attention import scaled_dot_product_attention


def attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  attn_mask: jax.Array | None = None,
  kernel: str = CUDNN,
  is_causal: bool = False,
  scale: float | None = None,
) -> jax.Array:
  """Compute attention without dropout by a kernel.

  Args:
    query: (…, heads, l, e).
    key, value: (…, key heads, s, e); the number of key heads divides `heads`.
    attn_mask: bool, broadcastable to (…, heads, l, s), for "cudnn" only; True attends.
    kernel: "cudnn" or "pallas".
    is_causal: position i attends to the keys 0 … i.
    scale: factor of the scores; by default 1 / sqrt(e).

  Returns:
    (…, heads, l, e) in the dtype of `query`.
  """
  if kernel == PALLAS and jax_compat.flash_attention_of_tpus() is None:
    return scaled_dot_product_attention(
      query, key, value, is_causal=is_causal, scale=scale, enable_gqa=True
    )
  scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
  query, key, value = jax_compat.match_varying_axes(query, key, value)
  batched = [array.reshape(-1, *array.shape[-3:]) for array in (query, key, value)]
  if kernel == CUDNN:
    output = _cudnn(*batched, _as_batch(attn_mask, query, key), is_causal, scale)
  else:
    output = _pallas(*batched, is_causal, scale)
  return output.reshape(query.shape)


def _as_batch(mask, query, key):
  """Return the mask with shape (batch or 1, heads or 1, l, s)."""
  if mask is None:
    return None
  mask = lax.broadcast_to_rank(mask, query.ndim)
  *leading, heads = mask.shape[:-2]
  if set(leading) != {1}:
    leading = query.shape[:-3]
  mask = jnp.broadcast_to(mask, (*leading, heads, query.shape[-2], key.shape[-2]))
  return mask.reshape(-1, *mask.shape[-3:])


def _cudnn(query, key, value, mask, is_causal, scale):
  # cuDNN's layout is (batch, positions, heads, features).
  output = jax.nn.dot_product_attention(
    *(array.swapaxes(1, 2) for array in (query, key, value)),
    mask=mask,
    scale=scale,
    is_causal=is_causal,
    implementation="cudnn",
  ).swapaxes(1, 2)
  if mask is None:
    return output
  # A row without a visible key is zero; the kernel returns the mean of the values.
  return jnp.where(jnp.any(mask, axis=-1, keepdims=True), output, 0)


def _pallas(query, key, value, is_causal, scale):
  """Run the TPU kernel, which needs one key head per query head."""
  group = query.shape[1] // key.shape[1]
  if group > 1:
    key, value = (jnp.repeat(array, group, axis=1) for array in (key, value))
  kernel = jax_compat.flash_attention_of_tpus()
  return kernel(query, key, value, causal=is_causal, sm_scale=scale)
