"""Views and changes of shape in place: operations that share or move storage.

Shape, strides and offset of a view come from torch's own kernel, run on the wrapper's
metadata, so legality and errors are torch's. The step that reads and writes the array
is one of `view_info.py`; where none fits, the view is strided over the flat base.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
import torch

from torchax import _jax_compat, _torch_compat, grad_mode
from torchax.errors import MutationError
from torchax.ops import mappings
from torchax.ops.schema import functional_form
from torchax.plans import resize_to
from torchax.tensor import Tensor, like, new_tensor, rebind
from torchax.view import new_view
from torchax.view_info import (
  AsStridedInfo,
  Chain,
  ComplexAsRealInfo,
  DiagonalInfo,
  DtypeInfo,
  ExpandInfo,
  IndexInfo,
  PermuteInfo,
  RealAsComplexInfo,
  ReshapeInfo,
  StopGradientInfo,
  ViewInfoType,
  chain_of,
  slice_of,
)

aten = torch.ops.aten


def _reshape(source, layout, *args):
  return ReshapeInfo(tuple(layout.shape))


def _expand(source, layout, *args, **kwargs):
  return ExpandInfo(tuple(layout.shape))


def _permute(source, layout, dims):
  return PermuteInfo(tuple(dim % source.dim() for dim in dims))


def _transpose(source, layout, dim0, dim1):
  dims = list(range(source.dim()))
  if dims:
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
  return PermuteInfo(tuple(dims))


def _t(source, layout):
  return PermuteInfo(tuple(reversed(range(source.dim()))))


def _slice(source, layout, dim=0, start=None, end=None, step=1):
  dim %= source.dim()
  start, stop, step = slice(start, end, step).indices(source.shape[dim])
  return slice_of(dim, start, max(start, stop), step)


def _select(source, layout, dim, index):
  dim %= source.dim()
  return IndexInfo(dim, index % source.shape[dim])


def _diagonal(source, layout, offset=0, dim1=0, dim2=1):
  return DiagonalInfo(offset, dim1 % source.dim(), dim2 % source.dim())


def _view_dtype(source, layout, dtype):
  return DtypeInfo(mappings.t2j_dtype(dtype))


# Overload -> step of one view; None is the same view again.
STEPS: dict = {
  aten.alias.default: None,
  aten.detach.default: None,
  aten.lift_fresh.default: None,
  aten.view.default: _reshape,
  aten._reshape_alias.default: _reshape,
  aten.squeeze.default: _reshape,
  aten.squeeze.dim: _reshape,
  aten.squeeze.dims: _reshape,
  aten.unsqueeze.default: _reshape,
  aten.expand.default: _expand,
  aten.permute.default: _permute,
  aten.transpose.int: _transpose,
  aten.t.default: _t,
  aten.slice.Tensor: _slice,
  aten.select.int: _select,
  aten.diagonal.default: _diagonal,
  aten.view.dtype: _view_dtype,
  aten.view_as_real.default: lambda source, layout: ComplexAsRealInfo(),
  aten.view_as_complex.default: lambda source, layout: RealAsComplexInfo(),
}


def _pieces(source, layouts, dim: int):
  """Steps for consecutive slices along `dim`."""
  start = 0
  for layout in layouts:
    yield slice_of(dim, start, start + layout.shape[dim], 1)
    start += layout.shape[dim]


def _split(source, layouts, _sizes, dim=0):
  return list(_pieces(source, layouts, dim % source.dim()))


def _unbind(source, layouts, dim=0):
  return [IndexInfo(dim % source.dim(), i) for i in range(len(layouts))]


# Overload -> steps of several views.
MULTIPLE_STEPS: dict = {
  aten.split.Tensor: _split,
  aten.split.sizes: _split,
  aten.split_with_sizes.default: _split,
  aten.unbind.int: _unbind,
}

# Views whose elements are other numbers than the base's; they are computed instead.
NOT_STRIDED = frozenset({aten._conj.default, aten._neg_view.default})


def _slice_layout(source, dim=0, start=None, end=None, step=1):
  """Shape, strides and offset of a slice; None where torch has to say."""
  shape, stride = list(source.shape), list(source.stride())
  if not (0 <= dim < len(shape) and step > 0):
    return None
  start, stop, step = slice(start, end, step).indices(shape[dim])
  offset = source.storage_offset() + start * stride[dim]
  shape[dim] = max(0, (stop - start + step - 1) // step)
  stride[dim] *= step
  return shape, stride, offset


def _select_layout(source, dim, index):
  """Shape, strides and offset of one element along `dim`."""
  shape, stride = list(source.shape), list(source.stride())
  if not (0 <= dim < len(shape) and -shape[dim] <= index < shape[dim]):
    return None
  offset = source.storage_offset() + index % shape[dim] * stride[dim]
  del shape[dim], stride[dim]
  return shape, stride, offset


def _view_layout(source, size):
  """Shape, strides and offset of a contiguous tensor under another shape."""
  size = list(size)
  if not source.is_contiguous() or not source.numel():
    return None
  if -1 in size:
    place = size.index(-1)
    size[place] = 1
    size[place] = source.numel() // max(1, math.prod(size))
  if any(length < 0 for length in size) or math.prod(size) != source.numel():
    return None
  stride = [1] * len(size)
  for place in range(len(size) - 2, -1, -1):
    stride[place] = stride[place + 1] * size[place + 1]
  return size, stride, source.storage_offset()


# Frequent views whose layout is quicker computed than asked of torch's kernel.
LAYOUTS: dict = {
  aten.slice.Tensor: _slice_layout,
  aten.select.int: _select_layout,
  aten.view.default: _view_layout,
}


class _Layout:
  """What a view takes from a layout, without a tensor that has it."""

  __slots__ = ("shape", "dtype", "_stride", "_offset")

  def __init__(self, shape, stride, offset, dtype):
    self.shape, self._stride, self._offset, self.dtype = shape, stride, offset, dtype

  def stride(self):
    return self._stride

  def storage_offset(self):
    return self._offset


class ViewPlan:
  """Runs a view operation: a new tensor on the storage of the first argument."""

  def __init__(self, op, env):
    self.op = op
    self.env = env
    self.step = STEPS.get(op, _strided)
    self.steps = MULTIPLE_STEPS.get(op)
    self.layout = LAYOUTS.get(op)

  def __call__(self, args, kwargs):
    source = args[0]
    step = self.step
    if step is None:
      return like(source, source._storage, self._unchanged(source))
    if self.layout is not None and not kwargs:
      known = self.layout(source, *args[1:])
      if known is not None:
        layout = _Layout(*known, source.dtype)
        chain = source._chain.append(step(source, layout, *args[1:]))
        return self._finish(new_view(source, layout, _of_grad_mode(chain)))
    kwargs = kwargs or {}
    with _torch_compat.without_dispatch():
      layout = self.op(*args, **kwargs)
    if isinstance(layout, torch.Tensor):
      chain = self._chain(source, layout, args, kwargs)
      return self._finish(new_view(source, layout, _of_grad_mode(chain)))
    if self.steps is None:
      return [
        self._finish(new_view(source, one, _of_grad_mode(_strided_chain(source, one))))
        for one in layout
      ]
    steps = self.steps(source, layout, *args[1:], **kwargs)
    return [
      self._finish(new_view(source, one, _of_grad_mode(source._chain.append(step))))
      for one, step in zip(layout, steps)
    ]

  def _unchanged(self, source) -> Chain:
    """The source's chain; inside JAX's transformations `detach` adds a step."""
    if _jax_compat.is_top_level():
      return source._chain
    if self.op is aten.detach.default:
      return source._chain.append(_STOP)
    return _of_grad_mode(source._chain)

  def _chain(self, source, layout, args, kwargs) -> Chain:
    if self.step is _strided:
      return _strided_chain(source, layout)
    return source._chain.append(self.step(source, layout, *args[1:], **kwargs))

  def _finish(self, view):
    if self.env.config.force_materialize_views:
      view.jax()
    return view


_STOP = StopGradientInfo()


def _of_grad_mode(chain: Chain) -> Chain:
  """The chain of a view that is made now: without a gradient under `no_grad`."""
  if _jax_compat.is_top_level() or not grad_mode.is_stopped() or _STOP in chain.infos:
    return chain
  return chain.append(_STOP)


def _strided(source, layout, *args, **kwargs):
  """Marks operations without a step of their own."""


def _strided_chain(source: Tensor, layout: torch.Tensor) -> Chain:
  if any(info.view_info_type is ViewInfoType.DTYPE for info in source._chain.infos):
    raise MutationError(
      "A strided view of a tensor that was viewed under another dtype is not "
      "available. Call `.clone()` before the second view."
    )
  info = AsStridedInfo(layout.stride(), layout.storage_offset(), layout.shape)
  return chain_of(info)


class InPlaceViewPlan:
  """Runs `t_`, `squeeze_`, …: the tensor itself becomes the view."""

  def __init__(self, op, env):
    self.op = op
    self.view = ViewPlan(functional_form(op), env)

  def __call__(self, args, kwargs):
    target = args[0]
    view = self.view(args, kwargs)
    with _torch_compat.without_dispatch():
      self.op(*args, **(kwargs or {}))
    target._chain = view._chain
    return target


def _resize_(tensor, size, memory_format=None):
  if tuple(size) == tuple(tensor.shape):
    return tensor
  flat = tensor.jax().ravel()
  wanted = 1
  for length in size:
    wanted *= length
  flat = jnp.pad(flat, (0, max(0, wanted - flat.size)))[:wanted]
  resize_to(tensor, new_tensor(flat.reshape(size), tensor._env))
  return tensor


def _set_(tensor, source, *layout):
  if not isinstance(source, Tensor):
    raise MutationError(
      "`set_` on a jax tensor expects another jax tensor as its source, but got "
      f"{type(source).__name__}."
    )
  if layout:
    source = torch.as_strided(source, layout[1], layout[2], layout[0])
  with _torch_compat.without_dispatch():
    tensor.set_(source)
  rebind(tensor, source)
  return tensor


def _set_empty(tensor):
  empty = new_tensor(jnp.zeros(0, mappings.t2j_dtype(tensor.dtype)), tensor._env)
  return _set_(tensor, empty)


_FUNCTIONS: dict[object, Callable] = {
  aten.resize_.default: _resize_,
  aten.resize_as_.default: lambda tensor, other, **_: _resize_(tensor, other.shape),
  aten.set_.source_Tensor: _set_,
  aten.set_.source_Tensor_storage_offset: _set_,
  aten.set_.default: _set_empty,
}

_IN_PLACE_VIEWS = frozenset(
  {
    aten.t_.default,
    aten.transpose_.default,
    aten.squeeze_.default,
    aten.squeeze_.dim,
    aten.squeeze_.dims,
    aten.unsqueeze_.default,
    aten.as_strided_.default,
  }
)


def plan(op, schema, plan_by_registry, env) -> Callable | None:
  """The plan of a view or resizing operation, None for any other."""
  function = _FUNCTIONS.get(op)
  if function is not None:
    return lambda args, kwargs: function(*args, **(kwargs or {}))
  if op in _IN_PLACE_VIEWS:
    return InPlaceViewPlan(op, env)
  # Views of other libraries are what their lowerings say.
  if not schema.is_view or op in NOT_STRIDED or op.namespace != "aten":
    return None
  if _torch_compat.is_composite(op):
    # It arrives whole where autograd is off; only its parts know whether it copies.
    return lambda args, kwargs: op.decompose(*args, **(kwargs or {}))
  return ViewPlan(op, env)
