"""The inference shortcuts of torch.nn's transformer modules.

In eval mode, without gradients and outside the environment, `TransformerEncoderLayer`
and `MultiheadAttention` call one ATen operation each. They are composed here of
torch's functions; inside the environment torch does not take these paths.
"""

import torch
import torch.nn.functional as F

from torchax.ops.builtin import Kind, op
from torchax.registry.names import aten

# torch's numbers for what a mask means.
_KEY_PADDING = 1


def _additive(mask, mask_type, like):
  """A mask as numbers to add to the scores (batch, heads, l, s); None stays None."""
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
  parts = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3))
  projected = (F.linear(x, w, b) for x, w, b in parts)
  # (batch, length, width) as (batch, heads, length, width / heads).
  q, k, v = (p.unflatten(-1, (num_head, -1)).transpose(1, 2) for p in projected)
  scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
  added = _additive(mask, mask_type, scores)
  weights = torch.softmax(scores if added is None else scores + added, dim=-1)
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
