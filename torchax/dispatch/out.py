"""Plans of operations with `out=`: results are written to the caller's tensors."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import torch

from torchax.compat import torch_compat
from torchax.core import mappings
from torchax.core.chains import WHOLE
from torchax.core.view_steps import contiguous_strides
from torchax.devices import placement
from torchax.dispatch import torch_checks
from torchax.dispatch.in_place import require_writable
from torchax.dispatch.lowering import require_cast
from torchax.errors import MixedDeviceError, MutationError
from torchax.registry.names import aten
from torchax.registry.schema import schema_of
from torchax.tensor import Tensor, new_tensor
from torchax.view import View

# Operations that compute in the dtype of `out=`, unless `dtype=` is given.
_IN_DTYPE_OF_OUTPUT = frozenset(
  {
    *(aten.cumsum.out, aten.cumprod.out, aten.sum.out, aten.sum.IntList_out),
    *(aten.prod.out, aten.prod.int_out),
  }
)
# Operations whose result is reshaped to an output of another shape and equal size.
_RAMPS = (aten.arange, aten.linspace, aten.logspace, aten.range)


class OutPlan:
  """Plan of `op.out`: runs the functional plan, writes its results to the outputs."""

  def __init__(self, op, functional: Callable):
    self.op = op
    self.name = str(op)
    self.in_dtype_of_output = op in _IN_DTYPE_OF_OUTPUT
    self.functional = functional
    self.outputs = schema_of(op).outputs
    self.returns = bool(op._schema.returns)
    self.names = schema_of(op).names
    self.keeps_shape = op.overloadpacket in _RAMPS

  def __call__(self, args, kwargs):
    given = args, kwargs
    kwargs = dict(kwargs or {})
    args = list(args)
    outputs = []
    for name in self.outputs:
      if name in kwargs:
        outputs.append(kwargs.pop(name))
      else:
        outputs.append(args.pop(self.names.index(name)))
    tensors = jax.tree.leaves(outputs)
    results = jax.tree.leaves(self.functional(args, self._with_dtype(kwargs, tensors)))
    if any(o.dtype != r.dtype for o, r in zip(tensors, results)):
      torch_checks.raise_as_torch(self.op, *given)
    for output, result in zip(tensors, results, strict=True):
      if self.keeps_shape and output.numel() == result.numel():
        result = result.reshape(output.shape)
      write_output(self.name, output, result)
    if not self.returns:
      return None
    return outputs[0] if len(outputs) == 1 else tuple(outputs)

  def _with_dtype(self, kwargs, outputs):
    functional = getattr(self.functional, "op", None)
    takes_dtype = functional is not None and "dtype" in schema_of(functional).names
    is_open = self.in_dtype_of_output and kwargs.get("dtype") is None
    if takes_dtype and ("dtype" not in self.names or is_open):
      return {**kwargs, "dtype": outputs[0].dtype}
    return kwargs


def write_output(name: str, output: torch.Tensor, result: Tensor) -> None:
  """Write a result to an `out=` tensor; resize the tensor to its shape.

  Raises:
    MixedDeviceError: the output is on another device.
    RuntimeError: its dtype cannot hold the result, or the base of a view is too small.
  """
  if not isinstance(output, Tensor):
    raise MixedDeviceError(
      f"{name}: out= is on {output.device}, but the inputs are on jax. "
      'Make it with device="jax".'
    )
  array = result.jax()
  require_cast(array.dtype, mappings.t2j_dtype(output.dtype))
  require_writable(output, name)
  array = mappings.to_dtype(array, output.dtype)
  if output.shape == result.shape:
    if output._chain is WHOLE:
      spread = placement.several_device_sharding(output._storage.array)
      array = array if spread is None else placement.constrain(array, spread)
    output.replace_jax(array)
    return
  if output.numel():
    warnings.warn(
      "An output with one or more elements was resized since it had shape "
      f"{list(output.shape)}, which does not match the required output shape "
      f"{list(result.shape)} of {name}. Pass an empty tensor, or one of that shape.",
      stacklevel=2,
    )
  if type(output) is View:
    _resize_view(output, array.shape)
    output.replace_jax(array)
  else:
    resize_to(output, new_tensor(array, output._env))


def _resize_view(view: View, shape: tuple[int, ...]) -> None:
  """Resize a view in place to a contiguous one with the same offset."""
  strides = contiguous_strides(shape)
  with torch.no_grad():
    resized: Any = view.as_strided(shape, strides, view.storage_offset())
  torch_compat.set_metadata(view, resized)
  view._chain = resized._chain


def resize_to(tensor: Tensor, source: Tensor) -> None:
  """Give `tensor` the shape and values of `source`, in place."""
  if tensor._chain is not WHOLE:
    raise MutationError(
      "A view cannot be resized: its base would not follow. Call `.clone()` first."
    )
  torch_compat.set_metadata(tensor, source)
  tensor._storage.write(source.jax())
