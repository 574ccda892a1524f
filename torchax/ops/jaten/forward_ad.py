"""What torch's forward-mode differentiation asks of tensors beside their numbers.

A tangent has the memory layout of its primal: torch compares the two and makes a new
one where they differ.
"""

import math

import torch

from torchax.ops.builtin import Kind, op
from torchax.registry.names import aten
from torchax.tensor import Tensor


def _elements_in_storage(tensor: torch.Tensor) -> int:
  """How many elements of its dtype the memory has; complex numbers hold two reals."""
  if isinstance(tensor, Tensor):
    return tensor._storage.read().nbytes // tensor.dtype.itemsize
  return tensor.untyped_storage().nbytes() // tensor.dtype.itemsize


@op(aten._has_same_storage_numel, kind=Kind.TENSORS)
def _aten_has_same_storage_numel(self, other):
  return _elements_in_storage(self) == _elements_in_storage(other)


@op(aten._new_zeros_with_same_feature_meta, kind=Kind.TENSORS)
def _aten_new_zeros_with_same_feature_meta(self, other, *, self_num_batch_dims=0):
  """Zeros in the layout of `other`, for each of the leading batch dimensions."""
  batch = tuple(self.shape[:self_num_batch_dims])
  extent = _elements_in_storage(other)
  if other.is_contiguous() and extent == other.numel():
    return other.new_zeros(batch + tuple(other.shape))
  steps = [extent * math.prod(batch[place + 1 :]) for place in range(len(batch))]
  flat = other.new_zeros(extent * math.prod(batch))
  return flat.as_strided(
    batch + tuple(other.shape), [*steps, *other.stride()], other.storage_offset()
  )
