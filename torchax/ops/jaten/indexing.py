"""Elements chosen by index tensors and masks, and writes at such places.

Index values on jax are data, so an index outside of the tensor cannot raise as in
torch: a read gives the nearest element, a write is dropped. Lists and CPU tensors are
looked at before, and raise. Negative indices count from the end. Where indices repeat,
which of the written values stays is open, as in torch.

A boolean mask that decides the result's shape needs its values: those operations
run on concrete arrays. A write through one mask has a fixed shape and compiles.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax.ops import mappings
from torchax.ops.builtin import op
from torchax.ops.jaten._arguments import dim_of
from torchax.ops.names import aten

_MASK_DTYPES = (torch.bool, torch.uint8, jnp.dtype(jnp.bool_), jnp.dtype(jnp.uint8))


def _int64():
  return mappings.t2j_dtype(torch.int64)


def _is_mask(index) -> bool:
  """uint8 indices are masks, for torch and for arrays alike."""
  return index is not None and index.dtype in _MASK_DTYPES


def _concrete(array, name) -> np.ndarray:
  """The values of an array that decides a shape.

  Raises:
    TypeError: they are being traced.
  """
  if isinstance(array, jax.core.Tracer):
    raise TypeError(
      f"{name}: the shape of the result depends on the values of a tensor, and these "
      "are unknown inside a JAX transformation such as jax.jit. Use torch.where(mask, "
      "x, y), masked_fill or nonzero_static, whose results have a fixed shape."
    )
  return np.asarray(array)


# --- index -----------------------------------------------------------------------


def _has_no_mask(args, kwargs) -> bool:
  indices = args[1] if len(args) > 1 else kwargs["indices"]
  return not any(_is_mask(index) for index in indices)


def _places(indices, name) -> tuple:
  """What to index an array with; a mask of n dimensions becomes n index arrays."""
  places = []
  for index in indices:
    if index is None:
      places.append(slice(None))
    elif _is_mask(index):
      places.extend(np.nonzero(_concrete(index, name)))
    else:
      places.append(index)
  return tuple(places)


def _check_masks(self, indices):
  """Raises IndexError unless indices fit and each mask has the shape it covers."""
  axis = 0
  for index in indices:
    width = index.ndim if _is_mask(index) else 1
    covered = self.shape[axis : axis + width]
    if len(covered) < width or (_is_mask(index) and index.shape != covered):
      raise IndexError(
        f"The mask or index of shape {getattr(index, 'shape', None)} does not fit a "
        f"tensor of shape {self.shape} from dimension {axis} on."
      )
    axis += width


_INDEX_DTYPES = (torch.int64, torch.int32, torch.bool, torch.uint8)


def _check_index(self, indices):
  """Looks at what is known of torch's arguments without waiting for the device.

  Raises:
    IndexError: an index of another dtype, one on the CPU outside of the dimension, or
      shapes that do not broadcast.
  """
  axis, shapes = 0, []
  for index in indices:
    if index is None:
      axis += 1
      continue
    if index.dtype not in _INDEX_DTYPES:
      raise IndexError(
        "tensors used as indices must be long, int, byte or bool tensors, but got "
        f"{index.dtype}. Convert it with `.long()`."
      )
    if index.dtype in _MASK_DTYPES:
      axis += index.dim()
      continue
    if index.device.type == "cpu" and index.numel() and axis < self.dim():
      _require_in_range(index, axis, self.shape[axis])
    shapes.append(tuple(index.shape))
    axis += 1
  if len(shapes) > 1 and not _can_broadcast(shapes):
    raise IndexError(
      "shape mismatch: indexing tensors could not be broadcast together with shapes "
      f"{', '.join(map(str, shapes))}"
    )


def _can_broadcast(shapes) -> bool:
  aligned = itertools.zip_longest(*[reversed(shape) for shape in shapes], fillvalue=1)
  return all(len({size for size in sizes if size != 1}) < 2 for sizes in aligned)


def _require_in_range(index, axis, size):
  for extreme in map(int, index.aminmax()):
    if not -size <= extreme < size:
      raise IndexError(
        f"index {extreme} is out of bounds for dimension {axis} with size {size}"
      )


@op(
  *(aten.index, aten._unsafe_index),
  compiled=_has_no_mask,
  check=_check_index,
  takes_cpu=True,
)
def _aten_index(self, indices):
  """`self[indices]`: None takes a whole dimension.

  The indexed dimensions stay in place where they are neighbours, else come first.

  Raises:
    IndexError: too many indices, or a mask of another shape than it covers.
    TypeError: a mask whose values are being traced.
  """
  _check_masks(self, indices)
  return self.at[_places(indices, "index")].get(mode="clip")


# --- index_put -------------------------------------------------------------------


def _has_at_most_a_mask(args, kwargs) -> bool:
  indices = args[1] if len(args) > 1 else kwargs["indices"]
  return _has_no_mask(args, kwargs) or sum(i is not None for i in indices) == 1


def _check_index_put(self, indices, values, accumulate=False, unsafe=False):
  """Looks at what is known of torch's arguments.

  Raises:
    IndexError: as for reading.
    RuntimeError: another dtype, or other than one value for each true place of a mask.
  """
  _check_index(self, indices)
  given = [axis for axis, index in enumerate(indices) if index is not None]
  is_by_mask = len(given) == 1 and _is_mask(indices[given[0]])
  if is_by_mask and values.numel() == 1 and not accumulate:
    return  # torch fills, with any dtype
  if values.dtype != self.dtype:
    raise RuntimeError(
      "Index put requires the source and destination dtypes match, but got "
      f"{self.dtype} for the destination and {values.dtype} for the source. Convert "
      "the source with `.to(destination.dtype)`."
    )
  if is_by_mask:
    _require_value_for_each(indices[given[0]], given[0], values, self)


def _require_value_for_each(mask, axis, values, indexed):
  after = indexed.dim() - axis - mask.dim()
  rows = values.shape[-1 - after] if values.dim() > after else 1
  if rows == 1:
    return
  mask = mask.jax() if mask.device.type == "jax" else mask.numpy()
  if isinstance(mask, jax.core.Tracer):
    return
  count = np.count_nonzero(np.asarray(mask))
  if count != rows:
    shape = (*indexed.shape[:axis], count, *indexed.shape[indexed.dim() - after :])
    raise _mismatch(values.shape, shape)


def _mismatch(values_shape, shape) -> RuntimeError:
  return RuntimeError(
    f"shape mismatch: value tensor of shape {list(values_shape)} cannot be broadcast "
    f"to indexing result of shape {list(map(int, shape))}"
  )


def _require_broadcast(values_shape, shape):
  lead = len(shape) - len(values_shape)
  if lead < 0 or any(v not in (1, s) for v, s in zip(values_shape, shape[lead:])):
    raise _mismatch(values_shape, shape)


def _add(at, values):
  """Adds at places of an array; bools, which JAX does not add, become true."""
  return at.max(values) if values.dtype == jnp.bool_ else at.add(values)


def _multiply(at, values):
  return at.min(values) if values.dtype == jnp.bool_ else at.multiply(values)


def _write(self, places, values, accumulate):
  _require_broadcast(values.shape, jax.eval_shape(lambda: self[places]).shape)
  values = values.astype(self.dtype)
  if not accumulate:
    return self.at[places].set(values)
  return _add(self.at[places], values)


def _write_masked(self, axis, mask, values, accumulate):
  """Writes where the mask, which covers dimensions from `axis` on, is true.

  The k-th true place takes the k-th row of `values`, or all take its only row.
  """
  mask = mask.astype(bool)
  rank = self.ndim - mask.ndim + 1
  before, after = self.shape[:axis], self.shape[axis + mask.ndim :]
  any_rows = values.shape[axis - rank] if values.ndim >= rank - axis else 1
  _require_broadcast(values.shape, (*before, any_rows, *after))
  values = values.reshape((1,) * (rank - values.ndim) + values.shape)
  rows = values.shape[axis]
  if rows == 0:
    return self
  if rows > 1:
    order = jnp.cumsum(mask.reshape(-1)) - 1
    values = jnp.take(values, order, axis, mode="clip")
  spread = mask.shape if rows > 1 else (1,) * mask.ndim
  values = values.reshape(values.shape[:axis] + spread + values.shape[axis + 1 :])
  values = values.astype(self.dtype)
  mask = mask.reshape(mask.shape + (1,) * (self.ndim - axis - mask.ndim))
  return jnp.where(mask, self + values if accumulate else values, self)


@op(
  aten.index_put,
  compiled=_has_at_most_a_mask,
  check=_check_index_put,
  takes_cpu=True,
)
def _aten_index_put(self, indices, values, accumulate=False):
  """A copy of `self` with `values` written (added with `accumulate`) at `indices`."""
  _check_masks(self, indices)
  given = [axis for axis, index in enumerate(indices) if index is not None]
  if len(given) == 1 and _is_mask(indices[given[0]]):
    axis = given[0]
    return _write_masked(self, axis, indices[axis], values, accumulate)
  return _write(self, _places(indices, "index_put"), values, accumulate)


@op(aten._unsafe_index_put, compiled=_has_at_most_a_mask, check=_check_index_put)
def _aten_unsafe_index_put(self, indices, values, accumulate=False):
  return _aten_index_put(self, indices, values, accumulate)


@op(
  aten._index_put_impl,
  compiled=_has_at_most_a_mask,
  check=_check_index_put,
  takes_cpu=True,
)
def _aten__index_put_impl(self, indices, values, accumulate=False, unsafe=False):
  return _aten_index_put(self, indices, values, accumulate)


# --- along one dimension ---------------------------------------------------------


def _along(dim, ndim, index) -> tuple:
  """Indexes dimension `dim` alone."""
  return (slice(None),) * (dim % ndim) + (index,)


@op(aten.index_select)
def _aten_index_select(self, dim, index):
  if self.ndim == 0:
    return self
  return self.at[_along(dim, self.ndim, index.reshape(-1))].get(mode="clip")


def _write_along(self, dim, index, write):
  """Applies `write(array, places)`; a 0-d tensor counts as having one dimension."""
  dim = dim_of(dim, self.ndim)
  array = self.reshape(self.shape or (1,))
  places = _along(dim, array.ndim, index.reshape(-1))
  return write(array, places).reshape(self.shape)


def _check_rows(name, self, dim, index, source) -> None:
  """Raises unless `source` has the shape of `self`, and a row for each index."""
  array, rows = self.shape or (1,), source.shape or (1,)
  dim = dim % len(array)
  fits = len(rows) == len(array) and all(
    size == (index.size if axis == dim else array[axis])
    for axis, size in enumerate(rows)
  )
  if not fits:
    raise RuntimeError(
      f"{name}: source tensor shape must match self tensor shape, with as many rows as "
      f"there are indices along dimension {dim}. Got self.shape = {list(self.shape)}, "
      f"source.shape = {list(source.shape)} and {index.size} indices."
    )


@op(aten.index_add)
def _aten_index_add(self, dim, index, source, *, alpha=1):
  _check_rows("index_add", self, dim, index, source)
  addend = (source * alpha).astype(self.dtype)
  return _write_along(self, dim, index, lambda x, at: _add(x.at[at], addend))


@op(aten.index_copy)
def _aten_index_copy(self, dim, index, source):
  _check_rows("index_copy", self, dim, index, source)
  rows = source.astype(self.dtype)
  return _write_along(self, dim, index, lambda x, at: x.at[at].set(rows))


@op(aten.index_fill)
def _aten_index_fill(self, dim, index, value):
  filler = jnp.asarray(value).astype(self.dtype)
  return _write_along(self, dim, index, lambda x, at: x.at[at].set(filler))


@op(aten.index_reduce)
def _aten_index_reduce(self, dim, index, source, reduce, *, include_self=True):
  return _write_along(
    self,
    dim,
    index,
    lambda x, at: _reduce_into(x, at, source.astype(x.dtype), reduce, include_self),
  )


# --- gather and scatter ----------------------------------------------------------


def _check_covers(name, self, dim, index) -> None:
  """Raises unless `index` is no larger than `self` except along `dim`."""
  fits = self.ndim == index.ndim and all(
    axis == dim or size <= self.shape[axis] for axis, size in enumerate(index.shape)
  )
  if not fits:
    raise RuntimeError(
      f"{name}: Expected index {list(index.shape)} to be no larger than self "
      f"{list(self.shape)} apart from dimension {dim}"
    )


@op(aten.gather)
def _aten_gather(self, dim, index, *, sparse_grad=False):
  """`self[i][index[i][j]]` along `dim`; `index` may be smaller in the others."""
  dim = dim_of(dim, self.ndim)
  if self.ndim == 0:
    return jnp.broadcast_to(self, index.shape)
  if index.ndim == 0:
    return self.at[index].get(mode="clip")
  if not index.size:
    return jnp.zeros(index.shape, self.dtype)
  _check_covers("gather", self, dim, index)
  window = tuple(
    slice(None) if axis == dim else slice(size) for axis, size in enumerate(index.shape)
  )
  return jnp.take_along_axis(self[window], index, dim, mode="clip")


def _grid(index, dim) -> tuple:
  """Places of all elements of `index`, with its values along `dim`."""
  grid = list(jnp.ogrid[tuple(slice(size) for size in index.shape)])
  grid[dim] = index
  return tuple(grid)


def _scatter(self, dim, index, src, write):
  """Applies `write(array, places, values)`; `index` may cover but a part of `src`."""
  array = self.reshape(self.shape or (1,))
  index = index.reshape(index.shape or (1,))
  if index.size and array.ndim != index.ndim:
    raise RuntimeError(
      "scatter: Index tensor must have the same number of dimensions as self tensor, "
      f"but got shapes {list(index.shape)} and {list(self.shape)}."
    )
  if not getattr(src, "weak_type", True) and src.dtype != self.dtype:
    raise RuntimeError(
      "scatter(): Expected self.dtype to be equal to src.dtype, but got "
      f"{self.dtype} and {src.dtype}."
    )
  if jnp.ndim(src):
    src = src[tuple(slice(size) for size in index.shape)]
  values = jnp.asarray(src).astype(self.dtype)
  if index.size == 0:
    return self
  places = _grid(index, dim)
  written = write(array, places, jnp.broadcast_to(values, index.shape))
  return written.reshape(self.shape)


@op(aten.scatter.src)
def _aten_scatter_src(self, dim, index, src):
  return _scatter(self, dim, index, src, lambda x, at, v: x.at[at].set(v))


@op(aten.scatter.value)
def _aten_scatter(self, dim, index, value):
  return _scatter(self, dim, index, value, lambda x, at, v: x.at[at].set(v))


@op(aten.scatter_add)
def _aten_scatter_add(self, dim, index, src):
  return _scatter(self, dim, index, src, lambda x, at, v: _add(x.at[at], v))


@op(aten.scatter.reduce)
def _aten_scatter_with_reduce(self, dim, index, src, *, reduce):
  """The older form, whose reductions are called add and multiply."""
  return _aten_scatter_reduce(self, dim, index, src, _OLD_NAMES.get(reduce, reduce))


@op(aten.scatter.value_reduce)
def _aten_scatter_value_reduce(self, dim, index, value, *, reduce):
  return _aten_scatter_reduce(self, dim, index, value, _OLD_NAMES.get(reduce, reduce))


@op(aten.scatter_reduce)
def _aten_scatter_reduce(self, dim, index, src, reduce, *, include_self=True):
  """Reduces `src` into `self`: sum, prod, mean, amax or amin.

  Without `include_self` a place that receives values forgets its own.
  """
  return _scatter(
    self,
    dim,
    index,
    src,
    lambda x, at, values: _reduce_into(x, at, values, reduce, include_self),
  )


_OLD_NAMES = {"add": "sum", "multiply": "prod"}
_REDUCERS = {
  "sum": _add,
  "mean": _add,
  "prod": _multiply,
  "amax": lambda at, values: at.max(values),
  "amin": lambda at, values: at.min(values),
}


def _neutral(reduce, dtype):
  """The value that the reduction does not notice."""
  if reduce in ("sum", "mean"):
    return 0
  if reduce == "prod":
    return 1
  if jnp.issubdtype(dtype, jnp.floating):
    return -jnp.inf if reduce == "amax" else jnp.inf
  if dtype == jnp.bool_:
    return reduce == "amin"
  limits = jnp.iinfo(dtype)
  return limits.min if reduce == "amax" else limits.max


def _reduce_into(array, places, values, reduce, include_self):
  if reduce not in _REDUCERS:
    raise RuntimeError(
      f"reduce expects one of {', '.join(_REDUCERS)}, but got {reduce!r}."
    )
  start = array
  if not include_self:
    touched = jnp.zeros(array.shape, bool).at[places].set(True)
    neutral = jnp.asarray(_neutral(reduce, array.dtype), array.dtype)
    start = jnp.where(touched, neutral, array)
  reduced = _REDUCERS[reduce](start.at[places], values)
  if reduce != "mean":
    return reduced
  own = jnp.full(array.shape, int(include_self), jnp.int32)
  count = jnp.maximum(own.at[places].add(1), 1).astype(array.dtype)
  if jnp.issubdtype(array.dtype, jnp.integer):
    return reduced // count
  return reduced / count


# --- flat positions --------------------------------------------------------------


@op(aten.take)
def _aten_take(self, index):
  return self.reshape(-1).at[index].get(mode="clip")


@op(aten.put)
def _aten_put(self, index, source, accumulate=False):
  flat = self.reshape(-1)
  values = source.reshape(index.shape)
  return _write(flat, index, values, accumulate).reshape(self.shape)


def unravel_index(indices, shape):
  """The coordinates of flat positions in an array of the given shape.

  Args:
    indices: an integer array of flat positions.
    shape: one size, or the sizes of all dimensions.

  Returns:
    One array for each dimension, in the shape and dtype of `indices`.
  """
  sizes = (shape,) if isinstance(shape, int) else tuple(shape)
  coordinates = []
  for size in reversed(sizes):
    coordinates.append(indices % size)
    indices = indices // size
  return tuple(reversed(coordinates))


# --- masks -----------------------------------------------------------------------


@op(aten.masked_select, compiled=False)
def _aten_masked_select(self, mask):
  """The elements where the mask is true, in one dimension."""
  shape = jnp.broadcast_shapes(self.shape, mask.shape)
  chosen = np.flatnonzero(np.broadcast_to(_concrete(mask, "masked_select"), shape))
  return jnp.broadcast_to(self, shape).reshape(-1)[chosen]


@op(aten.masked_scatter)
def _aten_masked_scatter(self, mask, source):
  """The k-th true place takes the k-th element of `source`."""
  if mask.dtype != jnp.bool_:
    raise RuntimeError(
      "masked_scatter only supports boolean masks, but got a mask with dtype "
      f"{mask.dtype}."
    )
  self, mask = jnp.broadcast_arrays(self, mask)
  if source.size == 0:
    return self
  order = jnp.cumsum(mask.reshape(-1)) - 1
  values = source.reshape(-1).astype(self.dtype).at[order].get(mode="clip")
  return jnp.where(mask, values.reshape(self.shape), self)


@op(aten.masked_scatter_backward)
def _aten_masked_scatter_backward(grad_output, mask, sizes):
  """The gradients at true places, moved to the front; zeros behind them."""
  grad_output, mask = jnp.broadcast_arrays(grad_output, mask)
  flat = mask.reshape(-1)
  length = int(np.prod(sizes))
  order = jnp.where(flat, jnp.cumsum(flat) - 1, length)
  packed = jnp.zeros(length, grad_output.dtype)
  return packed.at[order].set(grad_output.reshape(-1), mode="drop").reshape(sizes)


@op(aten.nonzero, aten.argwhere, compiled=False, index_results=(0,))
def _aten_nonzero(self):
  """Coordinates of the nonzero elements, one in a row: shape (n, ndim)."""
  values = _concrete(self, "nonzero")
  rows = np.argwhere(values != 0) if values.ndim else np.zeros((int(values != 0), 0))
  return jnp.asarray(rows, _int64())


@op(aten.nonzero_static, index_results=(0,))
def _aten_nonzero_static(self, *, size, fill_value=-1):
  """The first `size` rows of `nonzero`, filled up with `fill_value`."""
  if self.ndim == 0:
    return jnp.zeros((size, 0), _int64())
  if not self.size:
    return jnp.full((size, self.ndim), fill_value, _int64())
  coordinates = jnp.nonzero(self, size=size, fill_value=fill_value)
  return jnp.stack(coordinates, 1).astype(_int64())


@op(aten.is_nonzero, compiled=False)
def _aten_is_nonzero(self):
  if self.size != 1:
    raise RuntimeError(
      f"The truth value of a tensor with {self.size} elements is ambiguous."
    )
  return bool(_concrete(self, "is_nonzero").reshape(()))
