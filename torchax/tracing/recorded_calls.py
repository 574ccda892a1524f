"""`RecordedCall`: inputs of a call of a compiled function, to run it again.

The gradient of a call is differentiated by running the function again. Tensors may have
changed in place since: torch refuses that for saved tensors, and so does this module
where it cannot give the function the values of the call.
"""

from collections.abc import Container
from typing import Any, NamedTuple

import jax
import torch

from torchax.core.storage import Storage
from torchax.tensor import Tensor, new_tensor
from torchax.tracing.specialization import ORDINARY


def bases_of(leaves: list) -> list:
  """Return the array of each tensor's storage; None for other leaves."""
  return [leaf._storage.read() if isinstance(leaf, Tensor) else None for leaf in leaves]


class RecordedCall(NamedTuple):
  """Inputs of one call.

  Attributes:
    leaves: argument leaves.
    bases: arrays of their storages when the function ran.
    args: arguments with arrays for tensors, (args, kwargs).
    operands: captured arrays, specialization and numbers (`Traced.operands`).
    tensors: captured tensors.
    rng: operands of the random streams.
    numbers: values of host numbers.
    alive: object to keep alive.
  """

  leaves: list
  bases: list
  args: tuple
  operands: tuple
  tensors: list[Tensor]
  rng: Any
  numbers: Any
  alive: Any

  @property
  def autocast(self) -> torch.dtype | None:
    """Dtype of the autocast around the call, or None."""
    return (self.operands[1] or ORDINARY).autocast

  def inputs(self, written: Container[Storage]) -> list:
    """Return the argument leaves, with the values of the call.

    Args:
      written: outer storages that the call itself has written.

    Raises:
      RuntimeError: a tensor that requires a gradient, or a captured one, has changed.
    """
    for tensor, array in zip(self.tensors, self.operands[0]):
      if tensor._storage.read() is not array and tensor._storage not in written:
        raise _changed(tensor)
    inputs = list(self.leaves)
    arrays = jax.tree.leaves(self.args)
    for index, (leaf, base) in enumerate(zip(self.leaves, self.bases)):
      if base is not None and leaf._storage.read() is not base:
        if leaf.requires_grad:
          raise _changed(leaf)
        inputs[index] = new_tensor(arrays[index], leaf._env)
    return inputs


def _changed(tensor: Tensor) -> RuntimeError:
  return RuntimeError(
    f"A tensor of shape {list(tensor.shape)} has been modified by an inplace operation "
    "after a compiled function has used it, and the derivative of a gradient needs its "
    "old values. Clone it before."
  )
