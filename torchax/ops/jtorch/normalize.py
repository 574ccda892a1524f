"""Layer normalisation, caught above ATen to spare its two further results.

They are for the ATen backward formula; here JAX differentiates the whole.
"""

import torch
import torch.nn.functional as F

from torchax.ops.jaten.normalize import _aten_native_layer_norm
from torchax.ops.jtorch._register import register_function


@register_function(F.layer_norm, torch.layer_norm)
def _layer_norm(
  input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True
):
  return _aten_native_layer_norm(input, normalized_shape, weight, bias, eps)[0]
