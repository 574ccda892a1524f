"""Normalisation, caught above ATen, so that it is one operation.

torch's layer normalisation has two further results for its own backward formula, and
its RMS normalisation is a chain of operations, unless the device is CUDA. Here the
gradient of the first computes the statistics again and takes torch's formula, a fourth
of the program that JAX makes of it; JAX differentiates the other.
"""

from torchax.functions.builtin import register_function
from torchax.ops.jaten.normalize import (
  _aten__fused_rms_norm,
  _aten_native_layer_norm,
  _aten_native_layer_norm_backward,
)
from torchax.registry.names import F, functions


def _layer_norm_backward(
  grad, input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True
):
  _, mean, rstd = _aten_native_layer_norm(input, normalized_shape, None, None, eps)
  gradients = _aten_native_layer_norm_backward(
    grad, input, normalized_shape, mean, rstd, weight, bias, (True, True, True)
  )
  return [gradient for gradient in gradients if gradient is not None]


@register_function(
  F.layer_norm,
  functions.layer_norm,
  dynamic=("eps",),
  backward=_layer_norm_backward,
)
def _layer_norm(
  input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True
):
  return _aten_native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


@register_function(F.rms_norm, functions.rms_norm, dynamic=("eps",))
def _rms_norm(input, normalized_shape, weight=None, eps=None):
  if input.ndim < len(normalized_shape):
    raise ValueError(
      f"Input tensor must have at least {len(normalized_shape)} dimensions, but got "
      f"{input.ndim}"
    )
  return _aten__fused_rms_norm(input, normalized_shape, weight, eps)[0]
