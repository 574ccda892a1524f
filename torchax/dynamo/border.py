"""Plain torch tensors in and out of a compiled graph.

On the CPU nothing is copied: the graph reads the memory of its inputs, and it has been
read when the call returns, since results are waited for as CPU torch waits. So changes
of a tensor made in any way are seen by the next call, and none is seen by this one.
"""

import jax
import numpy as np
import torch

from torchax.core import mappings, narrowing
from torchax.errors import MixedDeviceError
from torchax.graphs.memory import memory_order

_NARROWED = frozenset({torch.int64, torch.uint64, torch.float64, torch.complex128})


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
  """A CPU tensor as an array of the same memory, where its dtype is one of JAX's.

  Raises:
    MixedDeviceError: not on the CPU.
    UnsupportedDtypeError: sparse, nested, quantised.
    OverflowError: an int64 value that needs x64 mode.
  """
  if tensor.device.type != "cpu":
    raise MixedDeviceError(
      'torch.compile(backend="jax") takes tensors on the CPU, or all on "jax", but got '
      f'one on {tensor.device}. Call `.cpu()` or `.to("jax")` first.'
    )
  mappings.check_layout(tensor)
  tensor = tensor.detach().resolve_conj().resolve_neg()
  if tensor.dtype is torch.float64 and not tensor.dim() and narrowing.is_on():
    # Dynamo's form of a Python float, which nobody has asked 64 bits for.
    return mappings.host_array(tensor.float())
  if tensor.dtype in _NARROWED and narrowing.is_on():
    return narrowing.narrow(tensor, mappings.t2j_dtype(tensor.dtype))
  return mappings.host_array(tensor)


class Result:
  """How one output of a graph becomes a torch tensor.

  Args:
    like: a tensor of the same dtype and strides, as torch expects it.
  """

  __slots__ = ("dtype", "order", "inverse")

  def __init__(self, like: torch.Tensor):
    self.dtype = like.dtype
    self.order = memory_order(like)
    self.inverse = None
    if self.order is not None:
      self.inverse = tuple(int(place) for place in np.argsort(self.order))

  def stored(self, array: jax.Array) -> jax.Array:
    """Inside the graph: the array with its dimensions as they lie in memory."""
    return array if self.order is None else jax.numpy.transpose(array, self.order)

  def tensor(self, array: jax.Array) -> torch.Tensor:
    """Outside: a tensor that has the array's memory."""
    if not _is_on_cpu(array):
      tensor = mappings.j2t(array)
    else:
      tensor = torch.utils.dlpack.from_dlpack(array.__dlpack__())
    if tensor.dtype is not self.dtype:
      tensor = tensor.to(self.dtype)
    return tensor if self.inverse is None else tensor.permute(self.inverse)


def _is_on_cpu(array: jax.Array) -> bool:
  return next(iter(array.devices())).platform == "cpu"
