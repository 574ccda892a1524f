"""Memory of CPU tensors, read and written by numpy.

The tensors stay resizable: `Tensor.numpy()` and `torch.from_numpy` leave a storage that
`untyped_storage().resize_` refuses for ever.
"""

import numpy as np
import torch

from torchax.compat import torch_compat

_CPU = (1, 0)  # DLPack's name of the device


class _Exported:
  """A DLPack capsule of a CPU tensor; `Tensor.__dlpack__` is ten times as slow."""

  __slots__ = ("_capsule",)

  def __init__(self, tensor: torch.Tensor):
    self._capsule = torch_compat.dlpack_capsule(tensor)

  def __dlpack__(self, **options):
    return self._capsule

  def __dlpack_device__(self) -> tuple[int, int]:
    return _CPU


def array_of(tensor: torch.Tensor) -> np.ndarray:
  """Array that shares the memory of a detached CPU tensor.

  Resizing the storage frees that memory: do not keep the array longer than the call.

  Raises:
    TypeError: numpy has no such dtype.
  """
  try:
    return np.from_dlpack(_Exported(tensor))
  except (BufferError, RuntimeError) as error:
    raise TypeError(f"numpy has no dtype for {tensor.dtype}: {error}") from None


def tensor_of(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
  """Copy of an array as a CPU tensor in memory of torch's own.

  Args:
    values: of any shape, in a dtype that numpy and torch share.
    dtype: torch's name of that dtype.
  """
  with torch_compat.unnoticed(), torch_compat.without_dispatch():
    tensor = torch.empty(values.shape, dtype=dtype, device="cpu")
    np.copyto(array_of(tensor), values)
  return tensor
