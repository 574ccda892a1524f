"""Access by numpy to the memory of CPU tensors, without a copy.

The tensors stay resizable. After `Tensor.numpy()` or `torch.from_numpy`,
`untyped_storage().resize_` raises for good. `mappings.py` converts dtypes on top.
"""

import numpy as np
import torch

from torchax.compat import torch_compat

_CPU = (1, 0)  # device in DLPack: (kDLCPU, index)


class _Exported:
  """DLPack capsule of a CPU tensor; `Tensor.__dlpack__` is ten times as slow."""

  __slots__ = ("_capsule",)

  def __init__(self, tensor: torch.Tensor):
    self._capsule = torch_compat.dlpack_capsule(tensor)

  def __dlpack__(self, **options):
    return self._capsule

  def __dlpack_device__(self) -> tuple[int, int]:
    return _CPU


def array_of(tensor: torch.Tensor) -> np.ndarray:
  """Return an array that shares the memory of a detached CPU tensor.

  Resizing the storage frees that memory: do not keep the array after the call.

  Raises:
    TypeError: numpy has no such dtype.
  """
  try:
    return np.from_dlpack(_Exported(tensor))
  except (BufferError, RuntimeError) as error:
    raise TypeError(f"numpy has no dtype for {tensor.dtype}: {error}") from None


def tensor_of(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
  """Copy an array to a CPU tensor in torch's own memory.

  Args:
    values: array of any shape, in a dtype that numpy and torch share.
    dtype: the torch dtype of the same name.
  """
  with torch_compat.without_function_modes_for_reads(), torch_compat.without_dispatch():
    tensor = torch.empty(values.shape, dtype=dtype, device="cpu")
    np.copyto(array_of(tensor), values)
  return tensor
