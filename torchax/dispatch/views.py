"""Plans of views, and of operations that change a tensor's shape or storage in place.

Shape, strides and offset of a view come from torch's kernel, run on the wrapper's
metadata, so torch checks validity and raises its errors. A step of
`core/view_steps.py` reads and writes the array; other views are strided over the
flat base.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
import torch

from torchax.compat import jax_compat, torch_compat
from torchax.core import grad_mode, mappings
from torchax.core.chains import WHOLE, Chain, chain_of
from torchax.core.static_values import NUMBERS
from torchax.core.storage import Excerpt, Rebindings, Storage, active
from torchax.core.view_steps import (
  AsStridedInfo,
  ComplexAsRealInfo,
  ConjugateInfo,
  DiagonalInfo,
  DtypeInfo,
  ExpandInfo,
  IndexInfo,
  NegateInfo,
  PermuteInfo,
  RealAsComplexInfo,
  ReshapeInfo,
  StopGradientInfo,
  UnfoldInfo,
  ViewInfo,
  contiguous_strides,
  slice_of,
)
from torchax.errors import MutationError
from torchax.registry.names import aten
from torchax.registry.schema import functional_form
from torchax.saving.untyped_storage import UntypedStorage
from torchax.tensor import Tensor, alias, new_tensor, rebind
from torchax.view import View, new_view


def _reshape(source, layout, *args):
  return ReshapeInfo(tuple(layout.shape))


def _expand(source, layout, *args, **kwargs):
  return ExpandInfo(tuple(layout.shape))


def _transpose(source, layout, dim0, dim1):
  dims = list(range(source.dim()))
  if dims:
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
  return PermuteInfo(tuple(dims))


def _slice(source, layout, dim=0, start=None, end=None, step=1):
  dim %= source.dim()
  start, stop, step = slice(start, end, step).indices(source.shape[dim])
  return slice_of(dim, start, max(start, stop), step)


def _select(source, layout, dim, index):
  dim %= source.dim()
  return IndexInfo(dim, index % source.shape[dim])


def _strided(source, layout, *args, **kwargs):
  """Mark operations without a step of their own; never called."""


# Overload -> step of one view; None for the same view.
STEPS: dict = {
  aten.as_strided.default: _strided,
  aten.alias.default: None,
  aten.detach.default: None,
  aten.view.default: _reshape,
  aten._reshape_alias.default: _reshape,
  # Not a view for autograd, but composite `out=` variants write through it.
  aten._unsafe_view.default: _reshape,
  aten.squeeze.default: _reshape,
  aten.squeeze.dim: _reshape,
  aten.squeeze.dims: _reshape,
  aten.unsqueeze.default: _reshape,
  aten.expand.default: _expand,
  aten.permute.default: lambda source, layout, dims: PermuteInfo(
    tuple(dim % source.dim() for dim in dims)
  ),
  aten.transpose.int: _transpose,
  aten.t.default: lambda source, layout: PermuteInfo(
    tuple(reversed(range(source.dim())))
  ),
  aten.slice.Tensor: _slice,
  aten.select.int: _select,
  aten.diagonal.default: lambda source, layout, offset=0, dim1=0, dim2=1: DiagonalInfo(
    offset, dim1 % source.dim(), dim2 % source.dim()
  ),
  aten.unfold.default: lambda source, layout, dimension, size, step: UnfoldInfo(
    dimension % max(1, source.dim()), size, step
  ),
  aten.view.dtype: lambda source, layout, dtype: DtypeInfo(mappings.t2j_dtype(dtype)),
  aten.view_as_real.default: lambda source, layout: ComplexAsRealInfo(),
  aten.view_as_complex.default: lambda source, layout: RealAsComplexInfo(),
  aten._conj.default: lambda source, layout: ConjugateInfo(),
  aten._neg_view.default: lambda source, layout: NegateInfo(),
}


def _split(source, layouts, _sizes, dim=0):
  dim %= source.dim()
  start = 0
  for layout in layouts:
    yield slice_of(dim, start, start + layout.shape[dim], 1)
    start += layout.shape[dim]


# Overload -> steps of several views.
MULTIPLE_STEPS: dict = {
  aten.split.Tensor: _split,
  aten.split_with_sizes.default: _split,
  aten.unbind.int: lambda source, layouts, dim=0: [
    IndexInfo(dim % source.dim(), i) for i in range(len(layouts))
  ],
}


def _slice_layout(source, dim=0, start=None, end=None, step=1):
  """Return shape, strides and offset of a slice; None to ask torch."""
  shape, stride = list(source.shape), list(source.stride())
  if not (0 <= dim < len(shape) and step > 0):
    return None
  start, stop, step = slice(start, end, step).indices(shape[dim])
  offset = source.storage_offset() + start * stride[dim]
  shape[dim] = max(0, (stop - start + step - 1) // step)
  stride[dim] *= step
  return shape, stride, offset


def _select_layout(source, dim, index):
  shape, stride = list(source.shape), list(source.stride())
  if not (0 <= dim < len(shape) and -shape[dim] <= index < shape[dim]):
    return None
  offset = source.storage_offset() + index % shape[dim] * stride[dim]
  del shape[dim], stride[dim]
  return shape, stride, offset


def _view_layout(source, size):
  """Return shape, strides and offset of a contiguous tensor under another shape."""
  size = list(size)
  if not source.is_contiguous() or not source.numel():
    return None
  # torch may keep other strides of dimensions of size 1.
  if 1 in source.shape and list(source.stride()) != contiguous_strides(source.shape):
    return None
  if -1 in size:
    dim = size.index(-1)
    size[dim] = 1
    size[dim] = source.numel() // max(1, math.prod(size))
  if any(length < 0 for length in size) or math.prod(size) != source.numel():
    return None
  return size, contiguous_strides(size), source.storage_offset()


# Frequent views whose layout is computed here, which is faster than torch's kernel.
LAYOUTS: dict = {
  aten.slice.Tensor: _slice_layout,
  aten.select.int: _select_layout,
  aten.view.default: _view_layout,
}


class _Layout:
  """Shape, strides, offset and dtype of a view, with the methods of a tensor."""

  __slots__ = ("shape", "dtype", "_stride", "_offset")
  # Conjugation and negation bits: False, as a change of layout keeps the tensor's.
  is_conj = is_neg = staticmethod(bool)

  def __init__(self, shape, stride, offset, dtype):
    self.shape, self._stride, self._offset, self.dtype = shape, stride, offset, dtype

  def stride(self):
    return self._stride

  def storage_offset(self):
    return self._offset


class ViewPlan:
  """Plan of a view operation: a new tensor on the storage of the first argument."""

  def __init__(self, op, env):
    self.op = op
    self.env = env
    self.step = STEPS.get(op, _strided)
    self.steps = MULTIPLE_STEPS.get(op)
    self.layout = LAYOUTS.get(op)

  def __call__(self, args, kwargs):
    source = args[0]
    if type(source) in NUMBERS:
      # Graphs pass numbers for tensors; a weakly typed array promotes as a number.
      source = new_tensor(jnp.asarray(source), self.env)
      args = (source, *args[1:])
    step = self.step
    if step is None:
      # torch gives the result of a subclass its class afterwards, if it has one.
      cls = View if isinstance(source, View) else Tensor
      return alias(cls, source, source, source._storage, self._alias_chain(source))
    if self.layout is not None and not kwargs:
      known = self.layout(source, *args[1:])
      if known is not None:
        layout = _Layout(*known, source.dtype)
        chain = source._chain.append(step(source, layout, *args[1:]))
        return self._view(source, layout, chain)
    kwargs = kwargs or {}
    with torch_compat.without_dispatch():
      layout = self.op(*args, **kwargs)
    if isinstance(layout, torch.Tensor):
      return self._view(source, layout, self._chain(source, layout, args, kwargs))
    if self.steps is None:
      return [self._view(source, one, _strided_chain(source, one)) for one in layout]
    steps = self.steps(source, layout, *args[1:], **kwargs)
    return [
      self._view(source, one, source._chain.append(step))
      for one, step in zip(layout, steps)
    ]

  def _alias_chain(self, source) -> Chain:
    """Return the chain of an alias; inside JAX transformations `detach` adds a step."""
    if jax_compat.is_top_level():
      return source._chain
    if self.op is aten.detach.default:
      return source._chain.append(_STOP) if grad_mode.detaches() else source._chain
    return stop_without_grad(source._chain)

  def _chain(self, source, layout, args, kwargs) -> Chain:
    if self.step is _strided:
      if self.op is aten.as_strided.default:
        _require_strides(*args[1:3], **kwargs)
        _require_memory(source)
      return _strided_chain(source, layout)
    return source._chain.append(self.step(source, layout, *args[1:], **kwargs))

  def _view(self, source, layout, chain: Chain):
    view = new_view(source, layout, stop_without_grad(chain))
    if self.env.config.force_materialize_views:
      view.jax()
    return view


_STOP = StopGradientInfo()


def stop_without_grad(chain: Chain) -> Chain:
  """Return the chain of a new view; under `no_grad` it stops the gradient."""
  if jax_compat.is_top_level() or not grad_mode.is_stopped() or _STOP in chain.infos:
    return chain
  return chain.append(_STOP)


def _strided_chain(source: Tensor, layout) -> Chain:
  """Return the chain of a layout that addresses the whole storage."""
  if source._chain.is_traced:
    raise MutationError(
      "A strided view of an element at a traced index is not available, since the "
      "element's place is not known yet. Call `.clone()` before."
    )
  infos = _steps_over(source._storage, layout)
  # Steps that change values instead of positions are not part of a layout.
  infos += [ConjugateInfo()] if layout.is_conj() else []
  infos += [NegateInfo()] if layout.is_neg() else []
  infos += [_STOP] if _STOP in source._chain.infos else []
  return chain_of(*infos)


def _steps_over(storage: Storage, layout) -> list[ViewInfo]:
  """Return the steps from a base, as contiguous bytes, to a layout."""
  base = storage.read()
  dtype = mappings.t2j_dtype(layout.dtype)
  size = base.size * base.dtype.itemsize // dtype.itemsize
  _require_inside(layout, size)
  steps = [*_as_dtype(base.size, base.dtype, dtype), *_strided_steps(layout, size)]
  return steps[1:] if steps[:1] == [ReshapeInfo(tuple(base.shape))] else steps


def _require_strides(size=(), stride=(), **_) -> None:
  """Raise for negative strides, as newer versions of torch do."""
  if min(stride, default=0) < 0:
    raise RuntimeError(
      "as_strided: Negative strides are not supported at the moment, got strides: "
      f"{list(stride)}"
    )


def _require_memory(source: Tensor) -> None:
  if type(source._storage) is Excerpt:
    raise MutationError(
      f"A strided view of an argument of shape {list(source.shape)}, which has gaps in "
      "memory, is not available in a compiled function: it takes the elements without "
      "the memory between them. Pass the base, or call `.contiguous()` before."
    )


def _require_inside(layout, size: int) -> None:
  """Raise as torch does if a layout exceeds the storage."""
  shape, stride, offset = tuple(layout.shape), layout.stride(), layout.storage_offset()
  if 0 in shape:
    return
  last = offset + sum((length - 1) * step for length, step in zip(shape, stride))
  if last >= size or min(offset, *stride, 0) < 0:
    raise RuntimeError(
      f"setStorage: the sizes {list(shape)} and strides {list(stride)} from the offset "
      f"{offset} need a storage of {last + 1} elements, but it has {size}. Stay inside "
      "of it, or call `resize_` before."
    )


def _as_dtype(length: int, source, dtype) -> list[ViewInfo]:
  """Return the steps from a base of `length` elements to its bytes as another dtype."""
  if source == dtype:
    return []
  if jnp.issubdtype(source, jnp.complexfloating):
    real = jnp.finfo(source).dtype
    return [ComplexAsRealInfo(), *_as_dtype(2 * length, real, dtype)]
  size = length * source.itemsize // dtype.itemsize
  used = size * dtype.itemsize // source.itemsize  # an odd rest is no element
  flat = [ReshapeInfo((length,)), slice_of(0, 0, used, 1)]
  if jnp.issubdtype(dtype, jnp.complexfloating):
    real = jnp.finfo(dtype).dtype
    return [
      *flat,
      *_as_dtype(used, source, real),
      ReshapeInfo((size, 2)),
      RealAsComplexInfo(),
    ]
  return [*flat, DtypeInfo(dtype)]


def _strided_steps(layout, size: int) -> list[ViewInfo]:
  """Return the steps from `size` elements to a layout; cheaper ones if contiguous."""
  shape, offset = tuple(layout.shape), layout.storage_offset()
  numel = math.prod(shape)
  stride = list(layout.stride())
  if stride != contiguous_strides(shape):
    order = sorted(range(len(shape)), key=lambda dim: -stride[dim])
    sizes, steps = [shape[dim] for dim in order], [stride[dim] for dim in order]
    if numel != size or steps != contiguous_strides(sizes):
      return [AsStridedInfo(layout.stride(), offset, shape)]
    back = sorted(range(len(shape)), key=lambda dim: order[dim])
    return [ReshapeInfo(tuple(sizes)), PermuteInfo(tuple(back))]
  if numel == size:
    return [ReshapeInfo(shape)]
  part = slice_of(0, offset, offset + numel, 1)
  return [ReshapeInfo((size,)), part, ReshapeInfo(shape)]


class InPlaceViewPlan:
  """Plan of `t_`, `squeeze_`, …: the tensor itself becomes the view."""

  def __init__(self, op, env):
    self.op = op
    self.view = ViewPlan(functional_form(op), env)

  def __call__(self, args, kwargs):
    target = args[0]
    require_own(target, str(self.op))
    view = self.view(args, kwargs)
    with torch_compat.without_dispatch():
      self.op(*args, **(kwargs or {}))
    target._chain = view._chain
    record_reshape(target, self.op, args[1:])
    return target


def _resize_(tensor, size, memory_format=None):
  """Give a tensor another shape; grow its storage if it is too small."""
  if tuple(size) == tuple(tensor.shape):
    return tensor
  require_own(tensor, "resize_")
  base = tensor._storage.read()
  end = tensor.storage_offset() + math.prod(size) if 0 not in size else 0
  needed = -(-end * tensor.element_size() // base.dtype.itemsize)
  if needed > base.size:
    tensor._storage = _grow(tensor._storage, needed)
    Rebindings.count_one()
  layout = _Layout(
    size, contiguous_strides(size), tensor.storage_offset(), tensor.dtype
  )
  shown = new_view(tensor, layout, _strided_chain(tensor, layout))
  torch_compat.set_metadata(tensor, shown)
  tensor._chain = shown._chain
  record_reshape(tensor, aten.resize_.default, (size,))
  return tensor


def _grow(storage: Storage, size: int) -> Storage:
  """Return a storage of `size` elements that starts with those of `storage`."""
  flat = storage.read().ravel()
  grown = Storage(jnp.pad(flat, (0, size - flat.size)))
  storage.become_prefix_of(grown)
  return grown


def _set_(tensor, source, offset=0, size=None, stride=()):
  if not isinstance(source, Tensor):
    raise MutationError(
      "`set_` on a jax tensor expects another jax tensor as its source, but got "
      f"{type(source).__name__}."
    )
  require_own(tensor, "set_")
  if size is not None:
    stride = stride or contiguous_strides(size)
    source = torch.as_strided(source, size, stride, offset)
  return _show(tensor, source)


def _show(tensor, source: Tensor):
  """Make `tensor` show the elements of `source`, with its layout."""
  with torch_compat.without_dispatch():
    tensor.set_(source)
  rebind(tensor, source)
  return tensor


def _set_to_storage(tensor, source, offset=0, size=None, stride=()):
  """Make a tensor show a storage, as `torch.load` does; see `saving/torch_files.py`."""
  if not isinstance(source, UntypedStorage):
    raise MutationError(
      "`set_` on a jax tensor expects another one, or the storage of one, but got a "
      f'storage on {source.device}. Move the tensor that has it: `.to("jax")`.'
    )
  require_own(tensor, "set_")
  # A file may hold 64-bit numbers while jax holds 32 bits.
  dtype = tensor.__dict__.get("_asked_dtype", tensor.dtype)
  if size is None:
    size, stride = (source.count(dtype),), (1,)
  size = tuple(size)
  stride = stride or contiguous_strides(size)
  is_whole = (
    not offset
    and math.prod(size) == source.count(dtype)
    and list(stride) == contiguous_strides(size)
  )
  source.decide(dtype, size if is_whole else None)
  storage, layout = source.storage, _Layout(size, stride, offset, tensor.dtype)
  base = storage.read()
  if is_whole and base.shape == size and base.dtype == mappings.t2j_dtype(dtype):
    chain = WHOLE
  else:
    chain = chain_of(*_steps_over(storage, layout))
  return _show(tensor, alias(Tensor, tensor, layout, storage, chain))


def record_reshape(tensor, op, args, kwargs=None) -> None:
  """Record a change of shape of a tensor that may be an argument of a trace."""
  if active.boundary is not None:
    active.boundary.record_reshape(tensor, op, args, kwargs or {})


def require_own(tensor, name: str) -> None:
  """Raise if a traced function would change the shape of a tensor from outside."""
  boundary = active.boundary
  if boundary is not None and tensor._storage.birth is not boundary:
    raise MutationError(
      f"`{name}` changes the shape or the memory of a tensor of shape "
      f"{list(tensor.shape)} that was made outside of the function being compiled, "
      "which would happen once and not with each call. Return a new tensor instead."
    )


# Overload -> function of the same arguments that replaces it.
FUNCTIONS: dict[object, Callable] = {
  aten.resize_.default: _resize_,
  aten.resize_as_.default: lambda tensor, other, **_: _resize_(tensor, other.shape),
  aten.set_.source_Tensor: _set_,
  aten.set_.source_Tensor_storage_offset: _set_,
  aten.set_.source_Storage: _set_to_storage,
  aten.set_.source_Storage_storage_offset: _set_to_storage,
  aten.set_.default: lambda tensor: _set_(
    tensor, new_tensor(jnp.zeros(0, mappings.t2j_dtype(tensor.dtype)), tensor._env)
  ),
  aten.lift_fresh.default: lambda tensor: tensor,
  # `torch.tensor` calls it too: without autograd, in inference mode for example.
  aten.detach_.default: lambda tensor: tensor,
}

IN_PLACE_VIEWS = frozenset(
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


def _view_dtype_plan(op, env) -> Callable:
  plan = ViewPlan(op, env)

  def view(source, dtype):
    stored = mappings.j2t_dtype(mappings.t2j_dtype(dtype))
    if stored is not source.dtype:
      mappings.check_bytes(source.dtype, dtype)
    return plan((source, stored), {})

  return lambda args, kwargs: view(*args, **(kwargs or {}))


def is_view(op, schema) -> bool:
  """Return True for views of ATen; views of other libraries run their lowerings."""
  return schema.is_view and op.namespace == "aten"


def view_plan(op, default, env) -> Callable:
  """Build the plan of a view; see `special_plans.Special`."""
  if op is aten.view.dtype:
    return _view_dtype_plan(op, env)
  if op in STEPS or op in MULTIPLE_STEPS or not torch_compat.is_composite(op):
    return ViewPlan(op, env)
  # Without autograd a composite view arrives whole; only its parts know if it copies.
  decompose = torch_compat.composite_kernel(op)
  return lambda args, kwargs: decompose(*args, **(kwargs or {}))
