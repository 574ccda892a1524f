"""`RecordedCall`: inputs of a call of a compiled function, to run it again.

The gradient of a call is differentiated by running the function again. Tensors may have
changed in place since: torch refuses that for saved tensors, and so does this module
where it cannot give the function the values of the call.
"""

from typing import Any, NamedTuple

import jax

from torchax.tensor import Tensor, new_tensor
from torchax.tracing.effects import Change, WriteStorage


def bases_of(leaves: list) -> list:
  """Return the array of each tensor's storage; None for other leaves."""
  return [leaf._storage.read() if isinstance(leaf, Tensor) else None for leaf in leaves]


class RecordedCall(NamedTuple):
  """Inputs of one call.

  Attributes:
    leaves: argument leaves.
    bases: arrays of their storages when the function ran.
    args: arguments with arrays for tensors, (args, kwargs).
    tensors: captured tensors.
    captured: arrays of their storages when the function ran.
    changes: changes that the call made.
    rng: operands of the random streams.
    alive: object to keep alive.
    autocast: dtype of the autocast around the call, or None.
    numbers: values of host numbers.
  """

  leaves: list
  bases: list
  args: tuple
  tensors: list[Tensor]
  captured: tuple
  changes: tuple[Change, ...]
  rng: Any
  alive: Any
  autocast: Any
  numbers: Any

  def inputs(self) -> list:
    """Return the argument leaves, with the values of the call.

    Raises:
      RuntimeError: a tensor that requires a gradient, or a captured one, has changed.
    """
    written = [
      change.storage.value
      for change in self.changes
      if isinstance(change, WriteStorage)
    ]
    for tensor, array in zip(self.tensors, self.captured):
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
