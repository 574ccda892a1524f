"""Randomised leaky ReLU as a product with slopes that were drawn before.

torch writes the slopes into a tensor that it has kept for the gradient before; a
checkpoint takes what is kept as it is then, and would find no slopes in it.
"""

import torch

from torchax.functions.builtin import register_function
from torchax.registry.names import F, aten
from torchax.registry.operators import Kind

_slopes = aten.rrelu_with_noise_functional.default


@register_function(torch.rrelu, kind=Kind.TENSORS)
def _torch_rrelu(input, lower=1 / 8, upper=1 / 3, training=False, generator=None):
  if not training:
    return aten.rrelu_with_noise(input, input.detach(), lower, upper, False)
  values = input.detach()
  _, slopes = _slopes(values, torch.empty_like(values), lower, upper, True, generator)
  return input * slopes


@register_function(torch.rrelu_, kind=Kind.TENSORS)
def _torch_rrelu_(input, *args, **kwargs):
  return input.copy_(_torch_rrelu(input, *args, **kwargs))


@register_function(F.rrelu, kind=Kind.TENSORS)
def _rrelu(input, lower=1 / 8, upper=1 / 3, training=False, inplace=False):
  return (_torch_rrelu_ if inplace else _torch_rrelu)(input, lower, upper, training)
