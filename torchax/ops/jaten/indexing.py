"""Reads and writes by index tensors and masks.

An index out of range raises if its value is known. Otherwise it makes the elements read
or written invalid (`core/out_of_range.py`). Negative indices count from the end. If
indices repeat, any of the written values may remain, as in torch. Indexing along one
dimension is in `gather.py`.

The result's shape depends on the values of a boolean mask, so such operations run on
concrete arrays. A write through one mask has a fixed shape and compiles.
"""

import itertools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torchax.core import mappings, out_of_range
from torchax.errors import TracedStateError
from torchax.ops.builtin import op
from torchax.ops.jaten import _on_host
from torchax.ops.promotion import int64
from torchax.registry.index_rules import Condition, dimension_rule
from torchax.registry.names import aten

# --- ways to write: (array, indices, values) -> array --------------------------------
# JAX does not add or multiply bools; `max` is "or" for them and `min` is "and".


def set_at(array, indices, values):
  """Replace the elements at the indices by the values."""
  return array.at[indices].set(values)


def add_at(array, indices, values):
  """Add all values to the elements at their indices."""
  at = array.at[indices]
  return at.max(values) if values.dtype == jnp.bool_ else at.add(values)


def multiply_at(array, indices, values):
  """Multiply the elements by all values at their indices."""
  at = array.at[indices]
  return at.min(values) if values.dtype == jnp.bool_ else at.multiply(values)


_MASK_DTYPES = (torch.bool, torch.uint8, jnp.dtype(jnp.bool_), jnp.dtype(jnp.uint8))


def _is_mask(index) -> bool:
  """Return True for bool and uint8 indices, of torch or JAX."""
  return index is not None and index.dtype in _MASK_DTYPES


def _concrete(array, name) -> np.ndarray:
  """Return the values of an array that determines a shape.

  Raises:
    TracedStateError: the array is traced.
  """
  if isinstance(array, jax.core.Tracer):
    raise TracedStateError(
      f"{name}: the shape of the result depends on the values of a tensor, and these "
      "are unknown inside a JAX transformation such as jax.jit. Use torch.where(mask, "
      "x, y), masked_fill or nonzero_static, whose results have a fixed shape."
    )
  return np.asarray(array)


# --- index -----------------------------------------------------------------------


def _has_no_mask(args, kwargs) -> bool:
  indices = args[1] if len(args) > 1 else kwargs["indices"]
  return not any(_is_mask(index) for index in indices)


def _without_masks(indices, name) -> tuple:
  """Return indices for an array; a mask of n dimensions becomes n index arrays."""
  result = []
  for index in indices:
    if index is None:
      result.append(slice(None))
    elif _is_mask(index):
      result.extend(np.nonzero(_concrete(index, name)))
    else:
      result.append(index)
  _require_common_shape([index.shape for index in result if hasattr(index, "shape")])
  return tuple(result)


def _check_masks(self, indices):
  """Raise IndexError for too many indices, or a mask that does not fit the shape."""
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
  """Check dtypes and shapes of indices without waiting for the device.

  Raises:
    IndexError: an index of another dtype, or shapes that do not broadcast.
  """
  shapes = []
  for index in indices:
    if index is None:
      continue
    if index.dtype not in _INDEX_DTYPES:
      raise IndexError(
        "tensors used as indices must be long, int, byte or bool tensors, but got "
        f"{index.dtype}. Convert it with `.long()`."
      )
    if index.dtype == torch.uint8:
      warnings.warn(
        "indexing with dtype torch.uint8 is now deprecated, please use a dtype "
        "torch.bool instead.",
        stacklevel=2,
      )
    if index.dtype not in _MASK_DTYPES:
      shapes.append(index.shape)
  _require_common_shape(shapes)


def _can_broadcast(shapes) -> bool:
  aligned = itertools.zip_longest(*[reversed(shape) for shape in shapes], fillvalue=1)
  return all(len({size for size in sizes if size != 1}) < 2 for sizes in aligned)


def _require_common_shape(shapes) -> None:
  if not _can_broadcast(shapes):
    raise IndexError(
      "shape mismatch: indexing tensors could not be broadcast together with shapes "
      f"{', '.join(str(list(shape)) for shape in shapes)}"
    )


def _rules(self, indices, *rest, **named):
  axis = 0
  for index in indices:
    if _is_mask(index):
      axis += index.ndim
      continue
    if index is not None and axis < self.ndim:
      yield dimension_rule(index, self.shape[axis], axis, wraps=True)
    axis += 1


@op(
  *(aten.index, aten._unsafe_index),
  compiled=_has_no_mask,
  check=_check_index,
  rules=_rules,
  takes_cpu=True,
  on_host=_on_host.index,
)
def _aten_index(self, indices):
  """Return `self[indices]`; None takes a whole dimension.

  Indexed dimensions keep their position if they are adjacent, and come first otherwise.

  Raises:
    IndexError: too many indices, or a mask of another shape than it covers.
    TracedStateError: a mask whose values are being traced.
  """
  _check_masks(self, indices)
  return out_of_range.read(self, _without_masks(indices, "index"))


# --- index_put -------------------------------------------------------------------


def _has_at_most_a_mask(args, kwargs) -> bool:
  indices = args[1] if len(args) > 1 else kwargs["indices"]
  return _has_no_mask(args, kwargs) or sum(i is not None for i in indices) == 1


def _check_index_put(self, indices, values, accumulate=False, unsafe=False):
  """Check dtypes and shapes, and the number of values for a mask.

  Raises:
    IndexError: see `_check_index`.
    RuntimeError: values of another dtype, or not one for each True of a mask.
  """
  _check_index(self, indices)
  axes = [axis for axis, index in enumerate(indices) if index is not None]
  is_by_mask = len(axes) == 1 and _is_mask(indices[axes[0]])
  if is_by_mask and values.numel() == 1 and not accumulate:
    return  # torch fills with a value of any dtype
  if values.dtype != self.dtype:
    raise RuntimeError(
      "Index put requires the source and destination dtypes match, but got "
      f"{self.dtype} for the destination and {values.dtype} for the source. Convert "
      "the source with `.to(destination.dtype)`."
    )
  if is_by_mask:
    _require_value_for_each(indices[axes[0]], axes[0], values, self)


def _require_value_for_each(mask, axis, values, indexed):
  after = indexed.dim() - axis - mask.dim()
  rows = values.shape[-1 - after] if values.dim() > after else 1
  if rows == 1:
    return
  mask = mask.jax() if mask.device.type == "jax" else mappings.host_array(mask)
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


def put_at(self, indices, values, accumulate):
  """Write at indices; negative ones count from the end."""
  _require_broadcast(values.shape, jax.eval_shape(lambda: self[indices]).shape)
  broken, inside = jnp.asarray(False), []
  for size, index in zip(self.shape, indices):
    if isinstance(index, slice):
      inside.append(index)
      continue
    broken |= jnp.any(out_of_range.is_out_of_range(index, size, wraps=True))
    inside.append(out_of_range.clip(index, size, wraps=True))
  return out_of_range.write(
    self,
    tuple(inside),
    values.astype(self.dtype),
    add_at if accumulate else set_at,
    broken,
    gathers=accumulate,
  )


def _write_masked(self, axis, mask, values, accumulate):
  """Write where the mask, which covers dimensions from `axis` on, is True.

  The k-th True takes the k-th row of `values`; a single row is broadcast.
  """
  mask = mask.astype(bool)
  rank = self.ndim - mask.ndim + 1
  before, after = self.shape[:axis], self.shape[axis + mask.ndim :]
  any_rows = values.shape[axis - rank] if values.ndim >= rank - axis else 1
  _require_broadcast(values.shape, (*before, any_rows, *after))
  values = lax.broadcast_to_rank(values, rank)
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
  *(aten.index_put, aten._index_put_impl),
  compiled=_has_at_most_a_mask,
  check=_check_index_put,
  rules=_rules,
  takes_cpu=True,
  on_host=_on_host.index_put,
)
def _aten_index_put(self, indices, values, accumulate=False, unsafe=False):
  """Return a copy of `self` with `values` written or accumulated at `indices`."""
  _check_masks(self, indices)
  axes = [axis for axis, index in enumerate(indices) if index is not None]
  if len(axes) == 1 and _is_mask(indices[axes[0]]):
    axis = axes[0]
    return _write_masked(self, axis, indices[axis], values, accumulate)
  return put_at(self, _without_masks(indices, "index_put"), values, accumulate)


@op(
  aten._unsafe_index_put,
  compiled=_has_at_most_a_mask,
  check=_check_index_put,
  rules=_rules,
)
def _aten_unsafe_index_put(self, indices, values, accumulate=False):
  return _aten_index_put(self, indices, values, accumulate)


# --- masks -----------------------------------------------------------------------


@op(aten.masked_select, compiled=False, on_host=_on_host.masked_select)
def _aten_masked_select(self, mask):
  """Return the elements where the mask is True, in one dimension."""
  if mask.dtype != bool:
    raise RuntimeError(
      f"masked_select: expected a mask of torch.bool, but got {mask.dtype}."
    )
  shape = jnp.broadcast_shapes(self.shape, mask.shape)
  chosen = np.flatnonzero(np.broadcast_to(_concrete(mask, "masked_select"), shape))
  return jnp.broadcast_to(self, shape).reshape(-1)[chosen]


def _source_rules(self, mask, source):
  count = source.numel() if isinstance(source, torch.Tensor) else source.size
  if not _can_broadcast([self.shape, mask.shape]):
    return  # the lowering raises for the shapes
  times = math.prod(np.broadcast_shapes(self.shape, mask.shape)) / max(
    1, math.prod(mask.shape)
  )
  yield Condition(
    mask,
    lambda numbers: numbers.sum() * times > count,
    RuntimeError,
    "Number of elements of source < number of ones in mask",
  )


@op(aten.masked_scatter, rules=_source_rules)
def _aten_masked_scatter(self, mask, source):
  """Replace the element at the k-th True by the k-th element of `source`."""
  if mask.dtype != jnp.bool_:
    raise RuntimeError(
      "masked_scatter only supports boolean masks, but got a mask with dtype "
      f"{mask.dtype}."
    )
  self, mask = jnp.broadcast_arrays(self, mask)
  if source.size == 0:
    return out_of_range.fill_invalid(self, mask)
  # It is -1 before the first True, where the mask excludes it.
  order = jnp.cumsum(mask.reshape(-1)) - 1
  values = out_of_range.read(source.reshape(-1).astype(self.dtype), order)
  return jnp.where(mask, values.reshape(self.shape), self)


@op(aten.masked_scatter_backward)
def _aten_masked_scatter_backward(grad_output, mask, sizes):
  """Pack the gradients where the mask is True to the front; fill up with zeros."""
  grad_output, mask = jnp.broadcast_arrays(grad_output, mask)
  flat = mask.reshape(-1)
  length = int(np.prod(sizes))
  order = jnp.where(flat, jnp.cumsum(flat) - 1, length)
  packed = jnp.zeros(length, grad_output.dtype)
  return packed.at[order].set(grad_output.reshape(-1), mode="drop").reshape(sizes)


@op(aten.nonzero, aten.argwhere, compiled=False, index_results=(0,))
def _aten_nonzero(self):
  """Return the coordinates of the nonzero elements, shape (n, ndim)."""
  values = _concrete(self, "nonzero")
  rows = np.argwhere(values != 0) if values.ndim else np.zeros((int(values != 0), 0))
  return jnp.asarray(rows, int64())


@op(aten.nonzero_static, index_results=(0,))
def _aten_nonzero_static(self, *, size, fill_value=-1):
  """Return the first `size` rows of `nonzero`, padded with `fill_value`."""
  if self.ndim == 0:
    return jnp.zeros((size, 0), int64())
  if not self.size:
    return jnp.full((size, self.ndim), fill_value, int64())
  coordinates = jnp.nonzero(self, size=size, fill_value=fill_value)
  return jnp.stack(coordinates, 1).astype(int64())


@op(aten.is_nonzero, compiled=False)
def _aten_is_nonzero(self):
  return bool(_concrete(self, "is_nonzero").reshape(()))
