"""transformers: `use_jax()` lets models with `"flex_attention"` run on jax.

transformers compiles `flex_attention` and its masks by torch's default backend, which
takes no jax tensors. On jax, this module leaves them uncompiled inside of the model.
"""

import functools
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from torchax.compat import extras

_USER = "torchax.integrations.flex_attention"
_attention = extras.load("transformers.integrations.flex_attention", _USER)
_masks = extras.load("transformers.masking_utils", _USER)
_compiled_attention = _attention.compile_friendly_flex_attention


@functools.wraps(_compiled_attention)
def _flex_attention(query, key, value, training=False, **kwargs):
  if query.device.type == "jax":
    return flex_attention(query, key, value, **kwargs)
  return _compiled_attention(query, key, value, training=training, **kwargs)


@functools.wraps(create_block_mask)
def _create_block_mask(*args, device: Any = None, _compile: bool = False, **kwargs):
  is_on_jax = device is not None and torch.device(device).type == "jax"
  compiles = _compile and not is_on_jax
  return create_block_mask(*args, device=device, _compile=compiles, **kwargs)


def use_jax() -> None:
  """Make `attn_implementation="flex_attention"` of transformers work on jax.

  Eager models and those of `jax_jit` need it. A model that
  `torch.compile(backend="jax")` compiles as a whole does not. transformers branches on
  the values of an attention mask, so pass none in `jax_jit`.

  >>> use_jax()
  """
  _attention.compile_friendly_flex_attention = _flex_attention
  _attention.create_block_mask = _masks.create_block_mask = _create_block_mask


__all__ = ["use_jax"]
