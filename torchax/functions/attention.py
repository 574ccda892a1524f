"""Lowering of `F.scaled_dot_product_attention`: one function, one draw for its dropout.

`ops/jaten/_attention_choice.py` chooses the form of a call: plain, blockwise or a
kernel.
"""

from collections.abc import Sequence

import jax
import torch

from torchax import device_module
from torchax.compat import jax_compat, torch_compat
from torchax.core import mappings
from torchax.core.boundary import guard_on_field
from torchax.devices import placement
from torchax.functions import dropout, one_position
from torchax.functions.builtin import register_function
from torchax.ops.builtin import Kind, op
from torchax.ops.jaten import _attention_choice as choice
from torchax.ops.jaten import _attention_kernels as kernels
from torchax.ops.jaten import _blockwise_attention as blockwise
from torchax.ops.jaten import attention
from torchax.rng import positions, uniform
from torchax.tensor import Tensor

# Draws the bits of a dropout mask that blockwise attention computes part by part.
_library = torch.library.Library("torchax", "FRAGMENT")
_library.define("attention_words(Tensor query, int[] size) -> Tensor")
_words = torch.ops.torchax.attention_words.default


@op(_words, kind=Kind.SAMPLER, distribution="bernoulli")
def _attention_words(key, query, size):
  return jax.random.key_data(key)


@register_function(
  torch_compat.scaled_dot_product_attention, kind=Kind.TENSORS, needs_env=True
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
  mask = None if attn_mask is None else (attn_mask.shape, attn_mask.dtype)
  form = form_of(env, query, key, value, mask, dropout_p, is_causal, enable_gqa)
  if form == choice.BLOCKWISE:
    return _blockwise(env, query, key, value, attn_mask, dropout_p, is_causal, scale)
  if form != choice.PLAIN:
    tensors = query, key, value, attn_mask
    return env.functions.call(
      kernels.attention, *tensors, kernel=form, is_causal=is_causal, scale=scale
    )
  keep_mask = None
  if dropout_p > 0.0:
    # Check before the draw; calls without a draw are checked when compiled.
    of_mask = None if attn_mask is None else attn_mask.shape
    attention.require_shapes(query.shape, key.shape, value.shape, of_mask, enable_gqa)
    shape = attention.noise_shape(query.shape, key.shape)
    keep_mask = dropout.keep_mask(query, shape, 1.0 - dropout_p)
  if keep_mask is None and not is_causal:
    key, value, attn_mask = one_position.pad_keys(
      query, key, value, attn_mask, enable_gqa
    )
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
    effort=one_position.effort(query, key),
  )


def form_of(
  env,
  query,
  key,
  value,
  mask: tuple[tuple[int, ...], torch.dtype] | None,
  dropout_p: float,
  is_causal: bool = False,
  enable_gqa: bool = False,
  heads: Sequence[tuple[int, ...]] | None = None,
) -> str:
  """Return the name of the form of a call of attention.

  Args:
    env: the environment; `config.attention` may ask for a form.
    query, key, value, dropout_p, is_causal, enable_gqa: arguments of attention.
    mask: shape and dtype of the mask, or None.
    heads: shapes of query, key and value after the division into heads; None if they
      are already divided.
  """
  guard_on_field(env.config, "attention")
  requested = env.config.attention
  platform = placement.current_platform()
  if platform == "cpu" and requested != choice.BLOCKWISE:
    return choice.PLAIN
  tensors = query, key, value
  if not all(isinstance(tensor, Tensor) for tensor in tensors):
    return choice.PLAIN  # raises for mixed devices
  shapes = [tuple(tensor.shape) for tensor in tensors] if heads is None else heads
  steps = uniform.steps_below(1.0 - dropout_p)
  size = (*shapes[0][:-1], *shapes[1][-2:-1])
  call = choice.Call(
    *shapes,
    dtypes=tuple([mappings.t2j_dtype(tensor.dtype).name for tensor in tensors]),
    mask=None if mask is None else tuple(mask[0]),
    mask_dtype="" if mask is None else mappings.t2j_dtype(mask[1]).name,
    has_dropout=dropout_p > 0,
    has_positions=steps is not None
    and positions.is_addressable(env.rng.state.key, size),
    is_causal=is_causal,
    enable_gqa=enable_gqa,
  )
  return choice.choose(_target(platform, tensors), call, requested)


def _target(platform: str, tensors) -> choice.Target:
  arrays = [tensor._storage.read(tensor) for tensor in tensors]
  owner = jax_compat.draw_owner()
  if all(type(array) is jax_compat.ArrayImpl for array in arrays):
    devices = {d for array in arrays for d in array.sharding.device_set}
    platform = placement.platform_of(next(iter(devices)))
    may_be_partitioned = len(devices) > 1
  else:
    may_be_partitioned = jax_compat.is_divisible()
  return choice.Target(
    platform,
    device_module.get_device_capability() if platform == "cuda" else (0, 0),
    may_be_partitioned=may_be_partitioned,
    is_typed=any(map(jax_compat.varying_axes, arrays)),
    is_mapped=owner is not None and jax_compat.is_batching(owner),
    has_x64=jax.config.jax_enable_x64,
  )


def _blockwise(env, query, key, value, attn_mask, dropout_p, is_causal, scale):
  words = high = low = None
  if dropout_p > 0:
    shape = attention.noise_shape(query.shape, key.shape)
    words = _words(query.detach(), shape)
    high, low = uniform.steps_below(1.0 - dropout_p)
  return env.functions.call(
    blockwise.attention,
    query,
    key,
    value,
    attn_mask,
    words,
    high,
    low,
    survivor_scale=attention.scale_of_survivors(dropout_p),
    is_causal=is_causal,
    scale=scale,
    prng_impl=env.rng.state.impl,
    numbers=("high", "low", "scale", "survivor_scale"),
  )
