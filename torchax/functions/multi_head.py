"""Lowering of `F.multi_head_attention_forward`: one function of arrays if usual.

Other calls run torch's own function, whose parts are caught one by one.
"""

import inspect
import types

import torch

from torchax import amp
from torchax.compat import torch_compat
from torchax.functions import dropout
from torchax.functions.attention import form_of
from torchax.functions.builtin import register_function
from torchax.ops.jaten import _attention_choice as choice
from torchax.ops.jaten import attention, multi_head
from torchax.registry.names import F
from torchax.registry.operators import Kind


@register_function(F.multi_head_attention_forward, kind=Kind.TENSORS, needs_env=True)
def _multi_head_attention_forward(*args, env, **kwargs):
  given = _MULTI_HEAD.bind(*args, **kwargs)
  given.apply_defaults()
  with torch_compat.with_function_overrides():
    call = _Call(**given.arguments)
    if amp.dtype_in_force() is None and call.is_usual() and call.is_plain(env):
      return call.run(env)
    return torch_compat.undispatched_attention(**given.arguments)


_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


class _Call:
  """Call of `multi_head_attention_forward` with the arguments that modules mostly use.

  Args:
    **given: all arguments. torch's own function handles unusual or wrong ones.
  """

  def __init__(self, **given):
    self.given = types.SimpleNamespace(**given)
    self.dropout_p = given["dropout_p"] if given["training"] else 0.0

  def is_usual(self) -> bool:
    """Return True if the arguments match and `run` supports them."""
    given = self.given
    if given.query.dim() != 3 or not given.query.is_floating_point():
      return False
    if given.use_separate_proj_weight or given.add_zero_attn:
      return False
    rare = (given.bias_k, given.bias_v, given.static_k, given.static_v)
    if any(each is not None for each in rare):
      return False
    if self.dropout_p and given.need_weights or not 0.0 <= self.dropout_p <= 1.0:
      return False
    if given.is_causal and given.attn_mask is None:
      return False
    return self._has_usual_shapes()

  def _has_usual_shapes(self) -> bool:
    given = self.given
    length, batch, width = given.query.shape
    heads, positions = given.num_heads, given.key.shape[0]
    if width != given.embed_dim_to_check or width % heads:
      return False
    if given.in_proj_weight is None or given.out_proj_weight is None:
      return False
    kept, masks = (given.query.dtype,), (given.query.dtype, torch.bool)
    of_scores = (length, positions), (batch * heads, length, positions)
    padding, mask = given.key_padding_mask, given.attn_mask
    if padding is not None and mask is not None:
      masks = (mask.dtype,)  # torch warns if the dtypes differ
    return (
      _matches(given.key, kept, (positions, batch, width))
      and _matches(given.value, kept, (positions, batch, width))
      and _matches(given.in_proj_weight, kept, (3 * width, width))
      and _matches(given.in_proj_bias, kept, (3 * width,))
      and _matches(given.out_proj_weight, kept, (width, width))
      and _matches(given.out_proj_bias, kept, (width,))
      and _matches(padding, masks, (batch, positions))
      and _matches(mask, (given.query.dtype, torch.bool), *of_scores)
    )

  def is_plain(self, env) -> bool:
    """Return True if attention takes its plain form: no kernel, not blockwise."""
    given, heads = self.given, self.given.num_heads
    queries, keys = (
      (array.shape[1], heads, array.shape[0], array.shape[2] // heads)
      for array in (given.query, given.key)
    )
    is_masked = given.attn_mask is not None or given.key_padding_mask is not None
    mask = ((), given.query.dtype) if is_masked else None  # torch merges both masks
    form = form_of(
      *(env, given.query, given.key, given.value, mask, self.dropout_p),
      heads=(queries, keys, keys),
    )
    return form == choice.PLAIN

  def run(self, env) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the result and the weights, or None if `need_weights` is false."""
    given, p = self.given, self.dropout_p
    length, batch, _ = given.query.shape
    keep_mask = None
    if p > 0.0:
      shape = (batch, given.num_heads, length, given.key.shape[0])
      keep_mask = dropout.keep_mask(given.query, shape, 1.0 - p)
    is_shared = given.key is given.value
    is_of_itself = is_shared and given.query is given.key
    weights = "mean" if given.average_attn_weights else "all"
    result = env.functions.call(
      multi_head.multi_head_attention,
      given.query,
      None if is_of_itself else given.key,
      None if is_shared else given.value,
      given.in_proj_weight,
      given.in_proj_bias,
      given.out_proj_weight,
      given.out_proj_bias,
      given.attn_mask,
      given.key_padding_mask,
      keep_mask,
      survivor_scale=attention.scale_of_survivors(p) if p else None,
      heads=given.num_heads,
      weights=weights if given.need_weights else None,
      numbers=("survivor_scale",),
    )
    return result if given.need_weights else (result, None)


def _matches(tensor, dtypes, *shapes) -> bool:
  """Return True for None, and for a tensor with one of the dtypes and shapes."""
  return tensor is None or (tensor.dtype in dtypes and tuple(tensor.shape) in shapes)
