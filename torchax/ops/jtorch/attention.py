"""Attention, caught above ATen as one function with one draw for its dropout."""

import torch

from torchax import _torch_compat
from torchax.ops.jaten import attention
from torchax.ops.jtorch._builtin import register_function
from torchax.ops.names import F, aten
from torchax.ops.ops_registry import Kind


@register_function(
  _torch_compat.scaled_dot_product_attention, kind=Kind.TENSORS, needs_env=True
)
def _scaled_dot_product_attention(
  query,
  key,
  value,
  attn_mask=None,
  dropout_p=0.0,
  is_causal=False,
  scale=None,
  enable_gqa=False,
  env=None,
):
  if not 0.0 <= dropout_p <= 1.0:
    raise RuntimeError(
      f"dropout probability has to be between 0 and 1, but got {dropout_p}"
    )
  keep_mask = None
  if dropout_p > 0.0:
    # Before a draw; otherwise where it is compiled.
    mask = None if attn_mask is None else attn_mask.shape
    attention.require_shapes(query.shape, key.shape, value.shape, mask, enable_gqa)
    shape = attention.noise_shape(query.shape, key.shape)
    noise = aten.bernoulli.p(query.detach().new_empty(shape), 1.0 - dropout_p)
    keep_mask = noise.to(torch.bool)
  return env.functions.call(
    attention.scaled_dot_product_attention,
    query,
    key,
    value,
    attn_mask,
    keep_mask,
    survivor_scale=attention.scale_of_survivors(dropout_p) if dropout_p else None,
    is_causal=is_causal,
    scale=scale,
    enable_gqa=enable_gqa,
    numbers=("scale", "survivor_scale"),
  )


@register_function(F.multi_head_attention_forward, kind=Kind.TENSORS, needs_env=True)
def _multi_head_attention_forward(*args, env, **kwargs):
  """torch's own function, with the mask itself in place of the hint `is_causal`.

  The hint would let torch make the mask on the wrapper's meta device. Its projections
  and its attention are caught in turn: they are functions of few programs.
  """
  with env.renewed():
    return _torch_compat.attention_of_heads(*args, **{**kwargs, "is_causal": False})
