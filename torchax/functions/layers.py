"""Lowerings of layers as one operation: linear maps, normalisation, one-hot, rrelu.

`linear` contracts the weight without a transpose: torch's composite kernel transposes
it first, which XLA does not always fold into the product.
"""

import functools

import jax.numpy as jnp
import torch
from jax import lax

from torchax.compat import private, torch_compat
from torchax.core import out_of_range
from torchax.functions.builtin import register_function
from torchax.ops.builtin import op
from torchax.ops.jaten.normalize import (
  _aten__fused_rms_norm,
  _aten_native_layer_norm,
  _aten_native_layer_norm_backward,
)
from torchax.registry.index_rules import Range
from torchax.registry.names import F, aten, functions
from torchax.registry.operators import Kind
from torchax.tensor import Tensor

_BEYOND = 2**63  # larger than any integer


@register_function(torch_compat.linear)
def _linear(input, weight, bias=None):
  if input.dtype != weight.dtype:
    raise RuntimeError(
      f"linear expects input and weight of one dtype, but got {input.dtype} and "
      f"{weight.dtype}."
    )
  contracted = ((input.ndim - 1,), (weight.ndim - 1,))
  product = lax.dot_general(input, weight, (contracted, ((), ())))
  return product if bias is None else product + bias.astype(product.dtype)


@op(aten.one_hot, kind=Kind.TENSORS)
@register_function(torch_compat.one_hot, kind=Kind.TENSORS)
def _one_hot(input, num_classes=-1):
  if input.is_floating_point() or input.is_complex() or input.dtype == torch.bool:
    raise RuntimeError(f"one_hot expects integers, but got a tensor of {input.dtype}.")
  if num_classes == -1:
    if not input.numel():
      raise RuntimeError(
        "one_hot cannot tell the number of classes from an empty tensor: pass "
        "num_classes."
      )
    # As in torch, the number of classes is a shape, so wait for the data.
    num_classes = int(input.max()) + 1
  if isinstance(num_classes, torch.Tensor):
    num_classes = num_classes.item()
  return input._env.functions.call(_one_hot_of, input, num_classes, rules=_class_rules)


def _class_rules(input, num_classes):
  yield Range(input, 0, _BEYOND, RuntimeError, "Class values must be non-negative.")
  yield Range(
    input,
    -_BEYOND,
    num_classes,
    RuntimeError,
    "Class values must be smaller than num_classes.",
  )


def _one_hot_of(input, num_classes):
  classes = jnp.arange(num_classes, dtype=input.dtype)
  rows = (input[..., None] == classes).astype(input.dtype)
  return out_of_range.fill_invalid(
    rows, out_of_range.is_out_of_range(input, num_classes)[..., None]
  )


def register_kernels() -> None:
  """Register kernels for operations that torch's C++ would compose of others.

  They run while the environment is suspended too. C++ requires int64 for `one_hot`,
  which JAX lacks without its x64 mode. It rounds each step of the gradient of `mish`.
  """
  for overload in filter(None, (aten.one_hot.default, aten.mish_backward.default)):
    of_torch = torch_compat.composite_kernel(overload)
    if not isinstance(of_torch, private.Unavailable):
      kernel = functools.partial(_dispatch_or_compose, overload, of_torch)
      # The dispatch key of jax tensors above the Python key.
      torch_compat.register_kernel(overload.name(), kernel, "AutogradMeta")


def _dispatch_or_compose(overload, of_torch, tensor, *args):
  if isinstance(tensor, Tensor) and not torch_compat.is_tracing():
    return tensor._env.dispatch(overload, (), (tensor, *args), {})
  return of_torch(tensor, *args)


# --- Normalisation ------------------------------------------------------------------
# torch's layer norm has two further results for its backward formula, and its RMS norm
# is a chain of operations, except on CUDA. Here the gradient of layer norm recomputes
# the statistics and uses torch's formula, a fourth of the program of JAX's derivative;
# JAX differentiates RMS norm.


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


# --- Randomised leaky ReLU ----------------------------------------------------------
# A product with drawn slopes. torch writes the slopes into a tensor that it has already
# saved for the gradient; a checkpoint would save that tensor before the slopes are in
# it.

_slopes = aten.rrelu_with_noise_functional.default


@register_function(torch.rrelu, kind=Kind.TENSORS)
def _torch_rrelu(input, lower=1 / 8, upper=1 / 3, training=False, generator=None):
  lower, upper = float(lower), float(upper)  # may be tensors
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
