"""`x[index]` and `x[index] = value` where torch's C++ alone does not get it right.

An integer tensor without dimensions, which is an index like a Python number, may have
no value yet: inside a JAX trace it becomes the start of a dynamic slice.

The choice of elements is in `ops/jaten/indexing.py`. `take_along_dim` and
`unravel_index` are here because torch's forms insist on 64-bit indices.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax.compat import jax_compat
from torchax.core import mappings, out_of_range
from torchax.core.chains import TracedIndexInfo
from torchax.core.explanations import not_assignable
from torchax.core.storage import ReadOnly, Unplaced
from torchax.dispatch.views import of_grad_mode
from torchax.functions.builtin import register_function
from torchax.registry.index_rules import along
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
  index = index_of(index, tensor)
  return read(tensor, index) if _needs_care(index) else _getitem(tensor, index)


def _setitem_handler(args, kwargs):
  tensor, index, value = args
  if not isinstance(tensor, Tensor):
    return _setitem(tensor, index, value)
  if isinstance(value, bool | int | float | complex):
    parts = index if type(index) is tuple else (index,)
    if all(type(part) in _OF_VIEWS for part in parts):
      return _fill(tensor, _getitem(tensor, index), value)
  index, value = index_of(index, tensor), _value_of(value, tensor)
  if _needs_care(index):
    return write(tensor, index, value)
  return _setitem(tensor, index, value)


# Parts of an index whose result is a view.
_OF_VIEWS = frozenset({int, slice, type(None), type(Ellipsis), torch.SymInt})


def _fill(tensor: Tensor, target: Tensor, value) -> None:
  """`target[...] = value`, where the target is a part of the tensor."""
  if type(value) is complex or not tensor.dtype.is_floating_point:
    _value_of(value, tensor)  # raises for a number that does not fit
  if 0 in target.stride():  # `copy_` refuses elements that share their memory
    target.copy_(_value_of(value, tensor))
  else:
    target.fill_(value)


def index_of(index, indexed: Tensor):
  """An index with tensors for its sequences and arrays."""
  kind = type(index)
  if kind is int or kind is slice:
    return index
  if kind is list and not all(isinstance(i, int | float | np.generic) for i in index):
    index = tuple(index)  # as torch reads it
  if not isinstance(index, tuple):
    parts = _parts_of(index, indexed)
    return parts[0] if len(parts) == 1 else tuple(parts)
  return tuple([part for given in index for part in _parts_of(given, indexed)])


def _parts_of(part, indexed: Tensor) -> list:
  """One part of an index: numbers, slices and jax tensors as they are."""
  if isinstance(part, jax.core.Tracer):
    return [new_tensor(part, indexed._env)]
  if isinstance(part, jax.Array):
    part = np.array(part)
  if isinstance(part, list | tuple | range | np.ndarray):
    part = torch.as_tensor(part, device="cpu")
    part = part if part.dtype in _MASKS else part.long()
  is_known_mask = type(part) is torch.Tensor and part.dtype in _MASKS and part.dim()
  if is_known_mask and not jax_compat.is_top_level():
    return list(part.nonzero(as_tuple=True))  # in a trace it would lose its values
  return [part]


def _needs_care(index) -> bool:
  """True for an index whose numbers or truth values torch's C++ cannot read."""
  if type(index) is tuple:
    return any(map(_needs_care, index))
  if isinstance(index, bool):
    return True
  if not isinstance(index, torch.Tensor) or index.dim():
    return False
  if index.dtype in _MASKS:
    return True
  is_number = isinstance(index, Tensor) and not index.dtype.is_floating_point
  return is_number and is_traced(index)


def _value_of(value, tensor: Tensor):
  """A number as a tensor that can be assigned to parts of `tensor`.

  Raises:
    RuntimeError: the number does not fit the dtype of `tensor`.
    TypeError: an array or a number of numpy's, which torch takes nowhere.
  """
  if isinstance(value, np.ndarray | np.generic):
    raise not_assignable(value, tensor.device)
  if not isinstance(value, bool | int | float | complex):
    return value
  number = torch.full((), value, dtype=tensor.dtype, device="cpu")
  made = new_tensor(mappings.t2j(number), tensor._env)
  made._storage.__class__ = Unplaced
  return made


class _Subscript:
  """An index with traced numbers or truth values, as steps one after the other.

  Attributes:
    basic: an index that gives a view in which nothing is chosen by tensors yet.
    places: (dimension of that view, 0-d tensor) of the traced numbers, last first.
    rest: an index for what remains of the view; None if it is all of it.
  """

  def __init__(self, index, tensor: Tensor):
    parts = index if type(index) is tuple else (index,)
    self.basic, self.places, rest = [], [], []
    for part in _without_ellipsis(parts, tensor):
      if _is_number(part) and isinstance(part, Tensor) and is_traced(part):
        self.places.insert(0, (_dims(self.basic), part))
        self.basic.append(_ALL)
      elif _is_number(part):
        self.basic.append(int(part))
      elif _is_truth_value(part):
        self.basic.append(None)
        rest.append(_chosen_of_one(part))
      elif isinstance(part, torch.Tensor):
        self.basic += [_ALL] * _covered(part)
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


def _chosen_of_one(part) -> torch.Tensor:
  """An index into a new dimension of size 1 that takes its element, or none."""
  if isinstance(part, Tensor):
    return part.reshape(1)
  return torch.zeros(int(bool(part)), dtype=torch.int64, device="cpu")


def _is_number(part) -> bool:
  """True for integer tensors without dimensions, which are indices like numbers."""
  is_tensor = isinstance(part, torch.Tensor)
  return is_tensor and not part.dim() and part.dtype not in _MASKS


def _dims(basic) -> int:
  """How many dimensions an index of numbers, slices and None leaves or makes."""
  return sum(type(part) is not int for part in basic)


def _covered(part) -> int:
  """How many dimensions of a tensor one part of an index takes."""
  if part is None or isinstance(part, bool):
    return 0
  is_mask = isinstance(part, torch.Tensor) and part.dtype in _MASKS
  return part.dim() if is_mask else 1


def _without_ellipsis(parts, tensor) -> list:
  places = [place for place, part in enumerate(parts) if part is ...]
  if not places:
    return list(parts)
  first = places[0]
  covered = sum(_covered(part) for part in parts if part is not ...)
  dims = max(0, tensor.dim() - covered)
  later = [part for part in parts[first + 1 :] if part is not ...]
  return [*parts[:first], *[_ALL] * dims, *later]


def read(tensor: Tensor, index) -> Tensor:
  """`tensor[index]` with traced numbers or truth values in the index.

  Where torch records a gradient, the result is a copy that refuses to be changed in
  place: the change could not be followed to the tensor.
  """
  subscript = _Subscript(index, tensor)
  chosen = _getitem(tensor, subscript.basic)
  for dim, place in subscript.places:
    chosen = _element(chosen, dim, place)
  return chosen if subscript.rest is None else _getitem(chosen, subscript.rest)


def _element(tensor: Tensor, dim: int, place: Tensor) -> Tensor:
  if tensor.requires_grad and torch.is_grad_enabled():
    row = tensor.index_select(dim, place.reshape(1)).squeeze(dim)
    row._storage = ReadOnly(row._storage.read())
    return row
  # torch's record of a view of any element; which one is up to the chain.
  element = tensor.select(dim, 0)
  index = place.jax().astype(jnp.int32)
  chain = tensor._chain.append(TracedIndexInfo(dim, index))
  element._chain = of_grad_mode(chain)
  return element


def slice_from(tensor: Tensor, index: tuple, dim: int, start, length: int) -> Tensor:
  """A slice that may start at a traced place.

  Where torch records a gradient, the result is a copy, as of `read`.

  Args:
    tensor: what is sliced.
    index: of numbers and slices, taken first; an empty one takes all.
    dim: of what that leaves.
    start: a number, or a tensor without dimensions; from the end where it is negative.
    length: of the slice, which lies inside.
  """
  view = _getitem(tensor, index) if index else tensor
  if not isinstance(start, Tensor) or not is_traced(start):
    return view.narrow(dim, int(start), length)
  first = start.jax().astype(jnp.int32)
  if view.requires_grad and torch.is_grad_enabled():
    first = jnp.where(first < 0, first + view.shape[dim], first)
    places = new_tensor(first + jnp.arange(length), tensor._env)
    rows = view.index_select(dim, places)
    rows._storage = ReadOnly(rows._storage.read())
    return rows
  piece = view.narrow(dim, 0, length)
  chain = view._chain.append(TracedIndexInfo(dim, first, length))
  piece._chain = of_grad_mode(chain)
  return piece


def symbolic_places(index, tensor) -> tuple[tuple, list] | None:
  """An index with symbols among its numbers, as steps one after the other.

  Returns:
    An index without them, and (dimension of its result, symbol) of each, last first;
    None for an index without symbols, or with tensors.
  """
  parts = index if type(index) is tuple else (index,)
  if not any(isinstance(part, torch.SymInt) for part in parts):
    return None
  if not all(isinstance(part, _BASIC) and part is not True for part in parts):
    return None
  basic: list = []
  places: list = []
  for part in _without_ellipsis(parts, tensor):
    if isinstance(part, torch.SymInt):
      places.insert(0, (_dims(basic), part))
    basic.append(_ALL if isinstance(part, torch.SymInt) else part)
  return tuple(basic), places


_BASIC = (int, slice, torch.SymInt, type(None), type(...))


def write(tensor: Tensor, index, value) -> None:
  """`tensor[index] = value` with traced numbers or truth values in the index."""
  subscript = _Subscript(index, tensor)
  view = _getitem(tensor, subscript.basic)
  if not subscript.places:
    _setitem(view, subscript.rest, value)
    return
  indices: list = [None] * view.dim()
  for dim, place in subscript.places:
    indices[dim] = place
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
  # As in any assignment, leading dimensions of 1 are no dimensions.
  surplus = max(0, value.dim() - (view.dim() - len(subscript.places)))
  if value.shape[:surplus].numel() == 1:
    value = value.reshape(value.shape[surplus:])
  aten.index_put_(view, indices, value)


def _tensor_split(func):
  def handler(args, kwargs):
    """Reads split points that are on jax: torch wants them on the CPU."""
    args = list(args)
    points = args[1] if len(args) > 1 else kwargs.get("tensor_indices_or_sections")
    if isinstance(args[0] if args else None, Tensor) and isinstance(points, Tensor):
      values = points.tolist()
      kwargs = {k: v for k, v in kwargs.items() if k != "tensor_indices_or_sections"}
      return func(args[0], values, *args[2:], **kwargs)
    return func(*args, **kwargs)

  return handler


def register_functions(env) -> None:
  """Adds subscripts, and what else takes places from tensors, to an environment."""
  env.functions.add(_getitem, _getitem_handler)
  env.functions.add(_setitem, _setitem_handler)
  for func in (torch.tensor_split, torch.Tensor.tensor_split):
    env.functions.add(func, _tensor_split(func))


# --- Composite forms that insist on 64-bit indices ----------------------------------
# Without x64 an index tensor on jax is 32 bits wide; the numbers are the same.


def _flat_rules(input, indices, dim=None):
  if dim is None:
    yield along(indices, math.prod(input.shape), 0, RuntimeError)


@register_function(functions.take_along_dim, methods.take_along_dim, rules=_flat_rules)
def _take_along_dim(input, indices, dim=None):
  if indices.dtype not in (jnp.int32, jnp.int64):
    raise RuntimeError(
      "torch.take_along_dim(): dtype of indices should be Long but got "
      f"{indices.dtype}."
    )
  if dim is None:
    places = out_of_range.from_start(indices.ravel(), input.size)
    return out_of_range.read(input.ravel(), places, 0)
  if input.ndim != indices.ndim:
    raise RuntimeError(
      "torch.take_along_dim(): input and indices should have the same number of "
      f"dimensions, but got {input.ndim} dimensions for input, and {indices.ndim} "
      "dimensions for indices"
    )
  # Along a dimension torch takes any number, modulo its size.
  places = indices % max(input.shape[dim], 1) if input.ndim else indices
  return out_of_range.read(input, places, dim)


@register_function(functions.unravel_index, kind=Kind.TENSORS)
def _unravel_index(indices, shape):
  """Coordinates of flat indices; torch makes a tensor of the strides on the way."""
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
