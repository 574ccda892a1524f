"""Indexing functions whose composite forms insist on 64-bit indices.

Without x64 an index tensor on jax is 32 bits wide; the numbers are the same.
"""

import math

import jax.numpy as jnp
import torch

from torchax.core import out_of_range
from torchax.functions.builtin import register_function
from torchax.registry.index_rules import along
from torchax.registry.names import functions, methods
from torchax.registry.operators import Kind


def _flat_rules(input, indices, dim=None):
  if dim is None:
    yield along(indices, math.prod(input.shape), 0, RuntimeError)


@register_function(functions.take_along_dim, methods.take_along_dim, rules=_flat_rules)
def _take_along_dim(input, indices, dim=None):
  if indices.dtype not in (jnp.int32, jnp.int64):
    raise RuntimeError(
      "torch.take_along_dim(): dtype of indices should be Long but got "
      f"{indices.dtype}."
    )
  if dim is None:
    places = out_of_range.from_start(indices.ravel(), input.size)
    return out_of_range.read(input.ravel(), places, 0)
  if input.ndim != indices.ndim:
    raise RuntimeError(
      "torch.take_along_dim(): input and indices should have the same number of "
      f"dimensions, but got {input.ndim} dimensions for input, and {indices.ndim} "
      "dimensions for indices"
    )
  # Along a dimension torch takes any number, modulo its size.
  places = indices % max(input.shape[dim], 1) if input.ndim else indices
  return out_of_range.read(input, places, dim)


@register_function(functions.unravel_index, kind=Kind.TENSORS)
def _unravel_index(indices, shape):
  """Coordinates of flat indices; torch makes a tensor of the strides on the way."""
  if indices.is_floating_point() or indices.is_complex() or indices.dtype is torch.bool:
    raise TypeError(
      f"expected 'indices' to be an integer tensor, but got one of {indices.dtype}"
    )
  sizes = [shape] if isinstance(shape, int) else list(shape)
  if any(size < 0 for size in sizes):
    raise ValueError(f"'shape' cannot have negative values, but got {tuple(sizes)}")
  coordinates = []
  for size in reversed(sizes):
    coordinates.append(indices % size)
    indices = indices.div(size, rounding_mode="floor")
  return tuple(reversed(coordinates))
