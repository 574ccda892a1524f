"""Jagged nested tensors (`torch.nested`, `layout=torch.jagged`) whose parts are on jax.

torch's class runs operations on its parts. Its wrapper would be on torch's own device
for jax, where autograd has no thread; here it is on the hidden device of jax tensors.
"""

import torch

from torchax.compat import private
from torchax.compat.patches import patch
from torchax.compat.torch_compat.graphs import is_fake
from torchax.compat.torch_compat.wrappers import HIDDEN_DEVICE
from torchax.errors import UnsupportedDtypeError

_FEATURE = "jagged nested tensors on jax"
_MODULE = "torch.nested._internal.nested_tensor"

_class = private.find(f"{_MODULE}.NestedTensor", _FEATURE, instead=None)
# Symbolic length of the ragged dimension, one object for each tensor of offsets.
_symint_of = private.find(f"{_MODULE}.get_tensor_symint", _FEATURE, instead=None)
_symints = private.find(f"{_MODULE}._tensor_symint_registry", _FEATURE, instead=None)


class _Hidden(torch.Tensor):
  """Layout of a part of a jagged tensor, without numbers, on the hidden device."""

  device = HIDDEN_DEVICE


def hold_jagged_parts(tensor_class: type) -> None:
  """Let jagged nested tensors have parts of a class with a `_shell` on meta."""
  if None in (_class, _symint_of, _symints):
    return
  make = _class.__new__

  def new(cls, values, offsets, *, lengths=None, **options):
    if not isinstance(values, tensor_class):
      return make(cls, values, offsets, lengths=lengths, **options)
    if is_fake(values._shell):
      raise UnsupportedDtypeError(
        "torch.compile expects dense tensors on jax, but got a jagged nested one. Pass "
        "its `.values()` and `.offsets()` to a function compiled by "
        "`torchax.interop.jax_jit`, which may build it from them."
      )
    parts = [values, offsets] if lengths is None else [values, offsets, lengths]
    shells = [part._shell.as_subclass(_Hidden) for part in parts]
    _symints[shells[-1]] = _symint_of(parts[-1])  # the same ragged dimension
    if lengths is not None:
      options["lengths"] = shells.pop()
    return make(cls, *shells, **options)

  def device(tensor) -> torch.device:
    values = tensor.__dict__.get("_values")
    if isinstance(values, tensor_class):
      return values.device
    return torch.Tensor.device.__get__(tensor)

  patch(_class, "__new__", staticmethod(new), _FEATURE)
  patch(_class, "device", property(device), _FEATURE)
