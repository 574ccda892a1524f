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
  bound = _MULTI_HEAD.bind(*args, **kwargs)
  bound.apply_defaults()
  with torch_compat.with_function_overrides():
    call = _Call(**bound.arguments)
    if amp.dtype_in_force() is None and call.is_usual() and call.is_plain(env):
      return call.run(env)
    return torch_compat.undispatched_attention(**bound.arguments)


_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


class _Call:
  """Call of `multi_head_attention_forward` with the arguments that modules mostly use.

  Args:
    **arguments: all arguments. torch's own function handles unusual or wrong ones.
  """

  def __init__(self, **arguments):
    self.arguments = types.SimpleNamespace(**arguments)
    self.dropout_p = arguments["dropout_p"] if arguments["training"] else 0.0

  def is_usual(self) -> bool:
    """Return True if the arguments match and `run` supports them."""
    args = self.arguments
    if args.query.dim() != 3 or not args.query.is_floating_point():
      return False
    if args.use_separate_proj_weight or args.add_zero_attn:
      return False
    rare = (args.bias_k, args.bias_v, args.static_k, args.static_v)
    if any(each is not None for each in rare):
      return False
    if self.dropout_p and args.need_weights or not 0.0 <= self.dropout_p <= 1.0:
      return False
    if args.is_causal and args.attn_mask is None:
      return False
    return self._has_usual_shapes()

  def _has_usual_shapes(self) -> bool:
    args = self.arguments
    length, batch, width = args.query.shape
    heads, positions = args.num_heads, args.key.shape[0]
    if width != args.embed_dim_to_check or width % heads:
      return False
    if args.in_proj_weight is None or args.out_proj_weight is None:
      return False
    same, masks = (args.query.dtype,), (args.query.dtype, torch.bool)
    of_scores = (length, positions), (batch * heads, length, positions)
    padding, mask = args.key_padding_mask, args.attn_mask
    if padding is not None and mask is not None:
      masks = (mask.dtype,)  # torch warns if the dtypes differ
    return (
      _matches(args.key, same, (positions, batch, width))
      and _matches(args.value, same, (positions, batch, width))
      and _matches(args.in_proj_weight, same, (3 * width, width))
      and _matches(args.in_proj_bias, same, (3 * width,))
      and _matches(args.out_proj_weight, same, (width, width))
      and _matches(args.out_proj_bias, same, (width,))
      and _matches(padding, masks, (batch, positions))
      and _matches(mask, (args.query.dtype, torch.bool), *of_scores)
    )

  def is_plain(self, env) -> bool:
    """Return True if attention takes its plain form: no kernel, not blockwise."""
    args, heads = self.arguments, self.arguments.num_heads
    queries, keys = (
      (array.shape[1], heads, array.shape[0], array.shape[2] // heads)
      for array in (args.query, args.key)
    )
    is_masked = args.attn_mask is not None or args.key_padding_mask is not None
    mask = ((), args.query.dtype) if is_masked else None  # torch merges both masks
    form = form_of(
      *(env, args.query, args.key, args.value, mask, self.dropout_p),
      heads=(queries, keys, keys),
    )
    return form == choice.PLAIN

  def run(self, env) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the result and the weights, or None if `need_weights` is false."""
    args, p = self.arguments, self.dropout_p
    length, batch, _ = args.query.shape
    keep_mask = None
    if p > 0.0:
      shape = (batch, args.num_heads, length, args.key.shape[0])
      keep_mask = dropout.keep_mask(args.query, shape, 1.0 - p)
    is_shared = args.key is args.value
    is_of_itself = is_shared and args.query is args.key
    weights = "mean" if args.average_attn_weights else "all"
    result = env.functions.call(
      multi_head.multi_head_attention,
      args.query,
      None if is_of_itself else args.key,
      None if is_shared else args.value,
      args.in_proj_weight,
      args.in_proj_bias,
      args.out_proj_weight,
      args.out_proj_bias,
      args.attn_mask,
      args.key_padding_mask,
      keep_mask,
      survivor_scale=attention.scale_of_survivors(p) if p else None,
      heads=args.num_heads,
      weights=weights if args.need_weights else None,
      numbers=("survivor_scale",),
    )
    return result if args.need_weights else (result, None)


def _matches(tensor, dtypes, *shapes) -> bool:
  """Return True for None, and for a tensor with one of the dtypes and shapes."""
  return tensor is None or (tensor.dtype in dtypes and tuple(tensor.shape) in shapes)
