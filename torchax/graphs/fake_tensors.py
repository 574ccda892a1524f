"""Fake jax tensors: shapes without values, for torch's tracers.

`torch.compile` runs a function once on fake tensors. The fake of a jax tensor wraps a
fake meta tensor (`FakeTensor`) of the same shape and strides. Operations run on the
wrapped tensor. Start at `Fake`; `torchax/__init__.py` registers it.
"""

import jax
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as torch_pytree

from torchax.compat import torch_compat
from torchax.core import mappings
from torchax.devices import placement
from torchax.dispatch.transfer import arguments_of_to
from torchax.environment import default_env
from torchax.errors import ConversionError, MixedDeviceError, TracedStateError
from torchax.functions import indexing
from torchax.graphs import higher_order
from torchax.registry import operators
from torchax.registry.names import aten
from torchax.registry.schema import schema_of
from torchax.tensor import META, Payload, Tensor


class NoNumbersError(TracedStateError, torch_compat.DataDependentOutputException):
  """Error for reading the values of a fake tensor; Dynamo breaks the graph there.

  Attributes:
    func: name of the operation, for Dynamo's message.
  """

  def __init__(self, func: str):
    TracedStateError.__init__(
      self,
      f"{func} asks for the numbers of a tensor while torch.compile traces, when "
      "there are none. Keep the code that needs them out of the compiled function with "
      "@torch.compiler.disable.",
    )
    self.func = func


class Fake(Tensor):
  """Jax tensor without values, used while torch traces.

  Args:
    inner: a `FakeTensor` on meta.
  """

  @staticmethod
  def __new__(cls, inner: torch.Tensor, size=None, stride=None):
    return torch_compat.make_wrapper(
      cls,
      inner.shape if size is None else size,
      strides=inner.stride() if stride is None else stride,
      storage_offset=inner.storage_offset(),
      dtype=inner.dtype,
      requires_grad=inner.requires_grad,
    )

  def __init__(self, inner: torch.Tensor, size=None, stride=None):
    torch.Tensor.__init__(self)
    self._shell = inner
    if torch_compat.is_tracing():
      torch_compat.compare_storages_of(Fake)

  @classmethod
  def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
    return _dispatch(func, args, kwargs or {})

  @classmethod
  def __torch_function__(cls, func, types, args=(), kwargs=None):
    results_of = higher_order.on_fakes(func)
    if results_of is not None and get_proxy_mode() is None:
      return results_of(*args, **(kwargs or {}))
    with torch_compat.without_function_overrides():
      if func in _SUBSCRIPTS:
        return _subscript(func, *args)
      args, kwargs = _with_long_indices(func, _admitted(func, (args, kwargs or {})))
      return func(*args, **kwargs)

  def __tensor_flatten__(self):
    return ["_shell"], Payload(None, None, None)

  @classmethod
  def __tensor_unflatten__(cls, inner_tensors, context, outer_size, outer_stride):
    shell = inner_tensors["_shell"]
    if torch_compat.is_for_backend(shell):
      # The backend "jax" handles graphs on jax tensors before it reaches this code.
      raise ConversionError(
        "This backend of torch.compile is for tensors with memory in torch, and the "
        "function was given tensors on jax. Choose the backend that is made for them: "
        '`torch.compile(f, backend="jax")`; or compile by `torchax.compile(f)`.'
      )
    return cls(shell, outer_size, outer_stride)

  def __getitem__(self, index):
    return torch.Tensor.__getitem__(self, _fake_index(index, self))

  def __setitem__(self, index, value):
    torch.Tensor.__setitem__(self, _fake_index(index, self), value)

  def _stable_hash_for_caching(self) -> str:
    """Return a constant: other backends fail before they cache anything."""
    return "jax"

  _shell = _chain = None
  # torch's tracers distinguish inputs by the storage of the wrapper.
  data_ptr = torch.Tensor.data_ptr

  def untyped_storage(self) -> torch.UntypedStorage:
    """Return the storage of the wrapper, or that of `inner` if there are no elements.

    torch's tracers resize an empty storage, which the wrapper's device does not allow.
    """
    holder = self if self.numel() else self._shell
    return torch.Tensor.untyped_storage(holder)

  @property
  def device(self) -> torch.device:
    """Current device: a fake has no values on any other device."""
    return placement.torch_device(placement.current_index())

  @property
  def _env(self):
    raise NoNumbersError("An operation on the array of a jax tensor")

  def set_(self, source, offset=0, size=None, stride=None):
    """Take a layout of a storage, as torch's tracers do for a detached slice."""
    if not isinstance(source, torch.UntypedStorage) or size is None:
      return torch.Tensor.set_(self, source)
    layout = torch_compat.make_wrapper(
      Fake, size, strides=stride, storage_offset=offset, dtype=self.dtype
    )
    torch_compat.set_metadata(self, layout)
    return self

  def jax(self):
    """Raise NoNumbersError: there is no array."""
    raise NoNumbersError("Tensor.jax")

  def tolist(self):
    raise NoNumbersError("Tensor.tolist")

  def to(self, *args, **kwargs) -> torch.Tensor:
    """Convert dtype and memory format like `torch.Tensor.to`, on jax.

    Raises:
      NoNumbersError: a move to another device needs the values.
    """
    device, dtype, memory_format, copy = arguments_of_to(args, kwargs)
    if device is not None and device.type not in (*_KINDS, "meta"):
      raise NoNumbersError(f"Tensor.to({device.type!r})")
    kwargs = {} if memory_format is None else {"memory_format": memory_format}
    return torch.Tensor.to(self, dtype or self.dtype, copy=copy, **kwargs)

  @property
  def data(self) -> torch.Tensor:
    """Detached tensor."""
    return self.detach()

  def __repr__(self, **kwargs):
    return f"Fake({self.dtype}{list(self.shape)} on {self.device})"


class FakeView(Fake):
  """Fake of a `View`: Dynamo guards on which inputs have the same class."""


# While a graph is recorded, torch adds a node to it and then asks for the results.
torch_compat.merge_branches_of(Fake)
for _operation, _row in higher_order.TABLE.items():
  if _row.on_fakes is not None:
    _operation.py_impl(Fake)(_row.on_fakes)
    _operation.py_impl(FakeView)(_row.on_fakes)


def _on_jax(tensor: torch.Tensor) -> torch.Tensor:
  return tensor if tensor.device.type == "jax" else tensor.to(META)


def _admitted(func, arguments):
  """Return arguments with CPU tensors on jax, if our `func` accepts CPU tensors."""
  if func is F.ctc_loss:  # torch would write lengths of a list to a fake CPU tensor
    args, kwargs = arguments
    arguments = [*map(_lengths, args)], {n: _lengths(v) for n, v in kwargs.items()}
  operator = operators.all_torch_functions.get(func)
  if operator is None or not operator.execution.takes_cpu:
    return arguments
  return torch_pytree.tree_map_only(torch.Tensor, _on_jax, arguments)


def _lengths(value):
  is_list = isinstance(value, tuple | list)
  return torch.empty(len(value), dtype=torch.int64, device=META) if is_list else value


def _fake_index(index, tensor: Fake):
  """Convert sequences in an index to tensors on jax, as in eager mode."""
  index = indexing.normalize_index(index, tensor)
  return torch_pytree.tree_map_only(torch.Tensor, _on_jax, index)


_SUBSCRIPTS = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def _subscript(func, tensor, index, *value):
  """Read or write at an index, and keep symbols that torch would specialize."""
  steps = indexing.indices_from_symbols(index, tensor)
  if steps is None:
    return func(tensor, index, *value)
  basic, indices = steps
  view = torch.Tensor.__getitem__(tensor, basic)
  for dim, index in indices:
    view = torch.select(view, dim, index)
  return func(view, ..., *value) if value else view


# torch refuses 32-bit indices here. JAX stores no others, except in x64 mode.
_OF_LONG_INDICES = frozenset(
  {
    torch.take_along_dim,
    torch.Tensor.take_along_dim,
    torch_compat.one_hot,
    aten.take.default,
    aten.max_unpool2d.default,
    aten.max_unpool3d.default,
  }
)


def _with_long_indices(func, arguments):
  """Return arguments with int64 in place of int32 where `func` requires it."""
  if func not in _OF_LONG_INDICES:
    return arguments
  return torch_pytree.tree_map_only(torch.Tensor, _widen, arguments)


def _widen(tensor: torch.Tensor) -> torch.Tensor:
  if tensor.dtype is not torch.int32:
    return tensor
  return Fake(tensor._shell.long()) if isinstance(tensor, Fake) else tensor.long()


# Errors of torch's meta kernels for operations whose shapes a lowering may know.
_NO_META_KERNEL = (
  NotImplementedError,
  torch_compat.DynamicOutputShapeException,
  torch_compat.UnsupportedOperatorException,
)


def _dispatch(func, args, kwargs):
  tree_map = torch_pytree.tree_map
  for value in torch_pytree.tree_leaves((args, kwargs)):
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim():
      if func is aten.copy_.default:
        raise NoNumbersError("A copy between jax and the CPU (`copy_`, `x[i] = y`)")
      raise MixedDeviceError(
        f'{func} was given tensors on "jax" and one of shape {list(value.shape)} on '
        'cpu. Move it first: `.to("jax")`.'
      )
  plain = _with_long_indices(func, tree_map(_inner, (args, kwargs)))
  plain_args, plain_kwargs = plain
  try:
    result = func(*plain_args, **plain_kwargs)
  except _NO_META_KERNEL:
    result = _by_lowering(func, plain_args, plain_kwargs)
    if result is None:
      raise
  is_view = schema_of(func).is_view and isinstance(args[0], Fake)
  cls = type(args[0]) if is_view else Fake  # as torch expects
  if is_view and func is aten.detach.default:
    # Keep the symbols of its sizes, where those of the wrapped tensor are others.
    result = cls(result, args[0].shape, args[0].stride())
  else:
    result = torch_pytree.tree_map_only(
      torch.Tensor, lambda x: cls(x.to(_stored_dtype(x.dtype))), result
    )
  return torch_compat.correct_aliasing(func, args, kwargs, result)


def _stored_dtype(dtype: torch.dtype) -> torch.dtype:
  """Return the dtype that JAX stores, as in eager mode."""
  return mappings.j2t_dtype(mappings.t2j_dtype(dtype))


def _by_lowering(func, args, kwargs):
  """Return fake results by our lowering, for operations without a meta kernel.

  None if the lowering gives no shapes either.
  """
  tree_map_only = torch_pytree.tree_map_only
  args, kwargs = tree_map_only(torch.Tensor, _shape_of, (args, kwargs))
  shapes = default_env().shapes(func, args, kwargs)
  return tree_map_only(
    jax.ShapeDtypeStruct,
    lambda x: torch.empty(x.shape, dtype=mappings.j2t_dtype(x.dtype), device=META),
    shapes,
  )


def _shape_of(value: torch.Tensor) -> jax.ShapeDtypeStruct:
  shape = tuple(map(int, value.shape))
  return jax.ShapeDtypeStruct(shape, mappings.t2j_dtype(value.dtype))


# Device types of jax tensors in Python and in C++.
_KINDS = ("jax", torch_compat.HIDDEN_DEVICE.type)


def _inner(value):
  if isinstance(value, Fake):
    return value._shell
  if isinstance(value, torch.device) and value.type in _KINDS:
    return META
  if torch_compat.is_fake(value) and value.device.type in _KINDS:
    # Created by a factory on the user's device, or by C++ next to a wrapper.
    layout, dtype = (value.shape, value.stride()), _stored_dtype(value.dtype)
    return torch.empty_strided(*layout, dtype=dtype, device=META)
  return value
