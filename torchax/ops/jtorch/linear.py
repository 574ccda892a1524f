"""Linear maps, caught above ATen to contract the weight as it lies.

torch's composite form transposes the weight first, which XLA does not always fold.
"""

import jax.numpy as jnp
from jax import lax

from torchax import _torch_compat
from torchax.ops.jtorch._register import register_function
from torchax.ops.ops_registry import Kind


@register_function(_torch_compat.linear)
def _linear(input, weight, bias=None):
  if input.dtype != weight.dtype:
    raise RuntimeError(
      f"linear expects input and weight of one dtype, but got {input.dtype} and "
      f"{weight.dtype}."
    )
  if input.shape[-1] != weight.shape[-1]:
    raise RuntimeError(
      "mat1 and mat2 shapes cannot be multiplied: linear got input of shape "
      f"{list(input.shape)} and weight of shape {list(weight.shape)}; their last "
      "dimensions must be equal."
    )
  contracted = ((input.ndim - 1,), (weight.ndim - 1,))
  product = lax.dot_general(input, weight, (contracted, ((), ())))
  return product if bias is None else product + bias.astype(product.dtype)


@register_function(_torch_compat.one_hot, kind=Kind.TENSORS)
def _one_hot(input, num_classes=-1):
  if num_classes == -1:
    # As torch: the number of classes is a shape, so the data is waited for.
    num_classes = int(input.max()) + 1 if input.numel() else 0
  return input._env.functions.call(_one_hot_of, input, num_classes)


def _one_hot_of(input, num_classes):
  classes = jnp.arange(num_classes, dtype=input.dtype)
  return (input[..., None] == classes).astype(input.dtype)
