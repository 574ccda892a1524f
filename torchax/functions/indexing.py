"""Handlers of `x[index]` and `x[index] = value`.

torch's C++ cannot read a 0-d integer tensor that is traced; here such an index becomes
the start of a dynamic slice. Other indices go to torch, which calls the ATen operations
of `ops/jaten/indexing.py`. `take_along_dim` and `unravel_index` are here since torch's
kernels require 64-bit indices.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax.compat import jax_compat
from torchax.core import mappings, out_of_range
from torchax.core.chains import MovingInfo
from torchax.core.error_messages import not_assignable
from torchax.core.storage import ReadOnly, WithoutDevice
from torchax.dispatch.views import stop_without_grad
from torchax.functions.builtin import register_function
from torchax.registry.index_rules import dimension_rule
from torchax.registry.names import aten, functions, methods
from torchax.registry.operators import Kind
from torchax.tensor import Tensor, is_traced, new_tensor

_getitem, _setitem = torch.Tensor.__getitem__, torch.Tensor.__setitem__
_ALL = slice(None)
_MASKS = (torch.bool, torch.uint8)


def _getitem_handler(args, kwargs):
  tensor, index = args
  if type(index) is slice or type(index) is int or not isinstance(tensor, Tensor):
    return _getitem(tensor, index)
  index = normalize_index(index, tensor)
  return read(tensor, index) if _needs_steps(index) else _getitem(tensor, index)


def _setitem_handler(args, kwargs):
  tensor, index, value = args
  if not isinstance(tensor, Tensor):  # wrappers of `torch.func` among them
    put = write if _derives_by_mask(index, value) else _setitem
    return put(tensor, index, value)
  if isinstance(value, np.integer):
    value = int(value)  # as torch does
  if isinstance(value, bool | int | float | complex):
    parts = index if type(index) is tuple else (index,)
    if all(type(part) in _VIEW_PARTS for part in parts):
      return _fill(tensor, _getitem(tensor, index), value)
  index, value = normalize_index(index, tensor), _value_of(value, tensor)
  if _needs_steps(index) or _derives_by_mask(index, value):
    return write(tensor, index, value)
  return _setitem(tensor, index, value)


def _index_put_handler(func):
  def handler(args, kwargs):
    """Write with a gradient of known shape."""
    tensor, indices, values, accumulate = _index_put_arguments(*args, **kwargs)
    if not _derives_by_mask(tuple(indices), values):
      return func(*args, **kwargs)
    result = _put_by_mask(tensor, indices, values, accumulate)
    return tensor.copy_(result) if func in _IN_PLACE else result

  return handler


def _index_put_arguments(self, indices, values, accumulate=False):
  return self, indices, values, accumulate


_INDEX_PUT = [torch.index_put, torch.Tensor.index_put]
_IN_PLACE = [torch.index_put_, torch.Tensor.index_put_]


# Parts of an index that give a view.
_VIEW_PARTS = frozenset({int, slice, type(None), type(Ellipsis), torch.SymInt})


def _fill(tensor: Tensor, target: Tensor, value) -> None:
  """Set `target[...] = value`, where the target is a view of the tensor."""
  if isinstance(value, complex) or not tensor.dtype.is_floating_point:
    _value_of(value, tensor)  # raises for a number outside the dtype's range
  if 0 in target.stride():  # `copy_` refuses elements that share memory
    target.copy_(_value_of(value, tensor))
  else:
    target.fill_(value)


def normalize_index(index, indexed: Tensor):
  """Return an index with tensors for its sequences and arrays."""
  kind = type(index)
  if kind is int or kind is slice:
    return index
  if kind is list and not all(isinstance(i, int | float | np.generic) for i in index):
    index = tuple(index)  # as torch does
  if not isinstance(index, tuple):
    parts = _parts_of(index, indexed)
    return parts[0] if len(parts) == 1 else tuple(parts)
  return tuple([part for given in index for part in _parts_of(given, indexed)])


def _parts_of(part, indexed: Tensor) -> list:
  """Convert one part of an index; numbers, slices and jax tensors are unchanged."""
  if isinstance(part, jax.core.Tracer):
    return [new_tensor(part, indexed._env)]
  if isinstance(part, jax.Array):
    part = np.array(part)
  if isinstance(part, list | tuple | range | np.ndarray):
    part = torch.as_tensor(part, device="cpu")
    part = part if part.dtype in _MASKS else part.long()
  is_known_mask = type(part) is torch.Tensor and part.dtype in _MASKS and part.dim()
  if is_known_mask and not jax_compat.is_top_level():
    return list(part.nonzero(as_tuple=True))  # while its values are known
  return [part]


def _needs_steps(index) -> bool:
  """Return True for an index with numbers or bools that torch's C++ cannot read."""
  if type(index) is tuple:
    return any(map(_needs_steps, index))
  if isinstance(index, bool):
    return True
  if not isinstance(index, torch.Tensor) or index.dim():
    return False
  if index.dtype in _MASKS:
    return True
  is_number = isinstance(index, Tensor) and not index.dtype.is_floating_point
  return is_number and is_traced(index)


def _derives_by_mask(index, value) -> bool:
  """Return True to assign a value with a gradient where a single traced mask is True.

  torch's backward pass would read the gradient with `x[mask]`, whose shape is unknown.
  """
  needs_gradient = isinstance(value, torch.Tensor) and value.requires_grad
  if not (needs_gradient and torch.is_grad_enabled()):
    return False
  parts = index if type(index) is tuple else (index,)
  tensors = [part for part in parts if isinstance(part, torch.Tensor)]
  if len(tensors) != 1 or not isinstance(mask := tensors[0], Tensor):
    return False
  return mask.dtype in _MASKS and is_traced(mask)


def _value_of(value, tensor: Tensor):
  """Convert a number to a tensor that can be assigned to parts of `tensor`.

  Raises:
    RuntimeError: the number is outside the range of the dtype of `tensor`.
    TypeError: the value is a numpy array or number that torch does not accept.
  """
  if not isinstance(value, bool | int | float | complex):
    if isinstance(value, np.ndarray | np.generic):
      raise not_assignable(value, tensor.device)
    return value
  number = torch.full((), value, dtype=tensor.dtype, device="cpu")
  made = new_tensor(mappings.t2j(number), tensor._env)
  made._storage.__class__ = WithoutDevice
  return made


class _Subscript:
  """Index with traced numbers or bools, split into three steps.

  Attributes:
    basic: index of the first step, without tensors; gives a view.
    traced: (dimension of that view, 0-d tensor) of the traced numbers, last first.
    rest: index of the last step; None if it takes everything.
  """

  def __init__(self, index, tensor: Tensor):
    parts = index if type(index) is tuple else (index,)
    self.basic, self.traced, rest = [], [], []
    for part in _without_ellipsis(parts, tensor):
      if _is_number(part) and isinstance(part, Tensor) and is_traced(part):
        self.traced.insert(0, (_rank(self.basic), part))
        self.basic.append(_ALL)
      elif _is_number(part):
        self.basic.append(int(part))
      elif _is_truth_value(part):
        self.basic.append(None)
        rest.append(_bool_index(part))
      elif isinstance(part, torch.Tensor):
        self.basic += [_ALL] * _consumed_dims(part)
        rest.append(part)
      else:
        self.basic.append(part)
        rest += [] if type(part) is int else [_ALL]
    self.basic = tuple(self.basic)
    chooses = any(isinstance(part, torch.Tensor) for part in rest)
    self.rest = tuple(rest) if chooses else None


def _is_truth_value(part) -> bool:
  is_tensor = isinstance(part, torch.Tensor)
  return isinstance(part, bool) or (is_tensor and not part.dim())


def _bool_index(part) -> torch.Tensor:
  """Return an index into a new dimension of size 1: its element if `part`, or none."""
  if isinstance(part, Tensor):
    return part.reshape(1)
  return torch.zeros(int(bool(part)), dtype=torch.int64, device="cpu")


def _is_number(part) -> bool:
  """Return True for 0-d integer tensors, which index like Python numbers."""
  is_tensor = isinstance(part, torch.Tensor)
  return is_tensor and not part.dim() and part.dtype not in _MASKS


def _rank(basic) -> int:
  return sum(type(part) is not int for part in basic)


def _consumed_dims(part) -> int:
  """Return the number of dimensions that one part of an index consumes."""
  if part is None or isinstance(part, bool):
    return 0
  is_mask = isinstance(part, torch.Tensor) and part.dtype in _MASKS
  return part.dim() if is_mask else 1


def _without_ellipsis(parts, tensor) -> list:
  indices = [index for index, part in enumerate(parts) if part is ...]
  if not indices:
    return list(parts)
  first = indices[0]
  covered = sum(_consumed_dims(part) for part in parts if part is not ...)
  dims = max(0, tensor.dim() - covered)
  later = [part for part in parts[first + 1 :] if part is not ...]
  return [*parts[:first], *[_ALL] * dims, *later]


def read(tensor: Tensor, index) -> Tensor:
  """Return `tensor[index]` for an index with traced numbers or bools.

  If torch records a gradient, the result is a copy that refuses in-place writes: a
  write could not be propagated to the tensor.
  """
  subscript = _Subscript(index, tensor)
  chosen = _getitem(tensor, subscript.basic)
  for dim, number in subscript.traced:
    chosen = _element(chosen, dim, number)
  return chosen if subscript.rest is None else _getitem(chosen, subscript.rest)


def _element(tensor: Tensor, dim: int, number: Tensor) -> Tensor:
  if tensor.requires_grad and torch.is_grad_enabled():
    row = tensor.index_select(dim, number.reshape(1)).squeeze(dim)
    row._storage = ReadOnly(row._storage.read())
    return row
  # For torch a view of element 0; the chain has the traced index.
  element = tensor.select(dim, 0)
  index = number.jax().astype(jnp.int32)
  chain = tensor._chain.append(MovingInfo(dim, None, True, index))
  element._chain = stop_without_grad(chain)
  return element


def slice_from(tensor: Tensor, index: tuple, dim: int, start, length: int) -> Tensor:
  """Return a slice of `tensor[index]` that may start at a traced index.

  If torch records a gradient, the result is a copy, as in `read`.

  Args:
    tensor: the tensor to slice.
    index: numbers and slices, applied first; may be empty.
    dim: dimension of `tensor[index]` to slice.
    start: a number or a 0-d tensor; a negative one counts from the end.
    length: length of the slice, which must be inside the dimension.
  """
  view = _getitem(tensor, index) if index else tensor
  if not isinstance(start, Tensor) or not is_traced(start):
    return view.narrow(dim, int(start), length)
  first = start.jax().astype(jnp.int32)
  if view.requires_grad and torch.is_grad_enabled():
    first = jnp.where(first < 0, first + view.shape[dim], first)
    indices = new_tensor(first + jnp.arange(length), tensor._env)
    rows = view.index_select(dim, indices)
    rows._storage = ReadOnly(rows._storage.read())
    return rows
  piece = view.narrow(dim, 0, length)
  chain = view._chain.append(MovingInfo(dim, length, True, first))
  piece._chain = stop_without_grad(chain)
  return piece


def indices_from_symbols(index, tensor) -> tuple[tuple, list] | None:
  """Split an index with symbolic numbers into two steps.

  Returns:
    An index without symbols, and (dimension of its result, symbol) of each, last
    first; None for an index without symbols, or with tensors.
  """
  parts = index if type(index) is tuple else (index,)
  if not any(isinstance(part, torch.SymInt) for part in parts):
    return None
  if not all(isinstance(part, _BASIC) and part is not True for part in parts):
    return None
  basic: list = []
  symbols: list = []
  for part in _without_ellipsis(parts, tensor):
    if isinstance(part, torch.SymInt):
      symbols.insert(0, (_rank(basic), part))
    basic.append(_ALL if isinstance(part, torch.SymInt) else part)
  return tuple(basic), symbols


_BASIC = (int, slice, torch.SymInt, type(None), type(...))


def write(tensor: Tensor, index, value) -> None:
  """Set `tensor[index] = value` for an index with traced numbers or bools."""
  subscript = _Subscript(index, tensor)
  view = _getitem(tensor, subscript.basic)
  if not subscript.traced:
    if _derives_by_mask(subscript.rest, value):
      indices = [None if part is _ALL else part for part in subscript.rest]
      value = _without_leading_ones(value, len(indices))
      view.copy_(_put_by_mask(view, indices, value))
    else:
      _setitem(view, subscript.rest, value)
    return
  indices: list = [None] * view.dim()
  for dim, number in subscript.traced:
    indices[dim] = number
  if subscript.rest is not None:
    row = aten.index(view, indices)
    _setitem(row, subscript.rest, value)
    value = row
  if not isinstance(value, torch.Tensor):
    raise TypeError(
      "`x[index] = value` expects a tensor or a number as its value, but got "
      f"{type(value).__name__}."
    )
  value = value.to(tensor.device, tensor.dtype)
  value = _without_leading_ones(value, view.dim() - len(subscript.traced))
  aten.index_put_(view, indices, value)


def _without_leading_ones(value: torch.Tensor, dims: int) -> torch.Tensor:
  """Drop leading dimensions of size 1 beyond `dims`, as in any assignment."""
  surplus = max(0, value.dim() - dims)
  if value.shape[:surplus].numel() == 1:
    return value.reshape(value.shape[surplus:])
  return value


def _put_by_mask(tensor: Tensor, indices, values: Tensor, accumulate=False) -> Tensor:
  """Return a copy of a tensor with values where the mask among its indices is True.

  The k-th True takes the k-th row of the values; a single row is broadcast. All shapes
  are fixed, in the backward pass too.
  """
  with torch.no_grad():
    aten.index_put(tensor, indices, values, accumulate)  # raises torch's errors
  axis = next(n for n, index in enumerate(indices) if index is not None)
  mask = indices[axis].bool()
  before, after = tensor.shape[:axis], tensor.shape[axis + mask.dim() :]
  rows = values.shape[-1 - len(after)] if values.dim() > len(after) else 1
  values = values.to(tensor.dtype).expand(*before, rows, *after)
  if not rows:
    return tensor + values.sum()  # adds 0, with an empty gradient
  shape = torch.Size([1] * mask.dim())
  if rows > 1:
    order = mask.flatten().cumsum(0) - 1
    values = values.index_select(axis, order.clamp(0, rows - 1))
    shape = mask.shape
  values = values.reshape(*before, *shape, *after)
  mask = mask.reshape(*mask.shape, *[1] * len(after))
  return torch.where(mask, tensor + values if accumulate else values, tensor)


def _tensor_split(func):
  def handler(args, kwargs):
    """Pass split points on jax as Python numbers: torch wants them on the CPU."""
    args = list(args)
    points = args[1] if len(args) > 1 else kwargs.get("tensor_indices_or_sections")
    if isinstance(args[0] if args else None, Tensor) and isinstance(points, Tensor):
      values = points.tolist()
      kwargs = {k: v for k, v in kwargs.items() if k != "tensor_indices_or_sections"}
      return func(args[0], values, *args[2:], **kwargs)
    return func(*args, **kwargs)

  return handler


def register_functions(env) -> None:
  """Add the handlers of subscripts and of `tensor_split` to an environment."""
  env.functions.add(_getitem, _getitem_handler)
  env.functions.add(_setitem, _setitem_handler)
  for func in (*_INDEX_PUT, *_IN_PLACE):
    env.functions.add(func, _index_put_handler(func))
  for func in (torch.tensor_split, torch.Tensor.tensor_split):
    env.functions.add(func, _tensor_split(func))


# --- Composite kernels that require 64-bit indices ------------------------------------
# Without x64 an index tensor on jax is 32 bits wide, with the same values.


def _flat_rules(input, indices, dim=None):
  if dim is None:
    yield dimension_rule(indices, math.prod(input.shape), 0, RuntimeError)


@register_function(functions.take_along_dim, methods.take_along_dim, rules=_flat_rules)
def _take_along_dim(input, indices, dim=None):
  if indices.dtype not in (jnp.int32, jnp.int64):
    raise RuntimeError(
      "torch.take_along_dim(): dtype of indices should be Long but got "
      f"{indices.dtype}."
    )
  if dim is None:
    indices = out_of_range.negative_to_size(indices.ravel(), input.size)
    return out_of_range.read(input.ravel(), indices, 0)
  # Along a dimension torch takes any index, modulo its size.
  indices = indices % max(input.shape[dim], 1) if input.ndim else indices
  return out_of_range.read(input, indices, dim)


@register_function(functions.unravel_index, kind=Kind.TENSORS)
def _unravel_index(indices, shape):
  """Return coordinates of flat indices; torch's kernel creates a tensor of strides."""
  if indices.is_floating_point() or indices.is_complex() or indices.dtype is torch.bool:
    raise TypeError(
      f"expected 'indices' to be an integer tensor, but got one of {indices.dtype}"
    )
  sizes = [shape] if isinstance(shape, int) else list(shape)
  if any(size < 0 for size in sizes):
    raise ValueError(f"'shape' cannot have negative values, but got {tuple(sizes)}")
  coordinates = []
  for size in reversed(sizes):
    coordinates.append(indices % size)
    indices = indices.div(size, rounding_mode="floor")
  return tuple(reversed(coordinates))
