"""Rules for gather and scatter.

Indices count from the start of the true elements. An index at or beyond the true size
is out of range, as it is without padding.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax.tracing.padded.program import (
  Dims,
  Operation,
  Size,
  is_sized,
  is_true,
  rule,
  true,
)

_FILL = lax.GatherScatterMode.FILL_OR_DROP
_CLIP = lax.GatherScatterMode.CLIP
_BEYOND = np.iinfo(np.int32).max // 2


@rule("gather", sized=("slice_sizes",))
def _gather(operation: Operation, operand, indices) -> list:
  params, shape = operation.params, operation.inputs[0]
  numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
  axes = numbers.start_index_map
  mode = lax.GatherScatterMode.from_any(params["mode"])
  indices = _checked(operation, indices, axes, shape, sizes, mode)
  return [
    lax.gather(
      operand,
      indices,
      numbers,
      tuple(map(int, sizes)),
      unique_indices=params["unique_indices"],
      indices_are_sorted=False,
      mode=mode,
      fill_value=params["fill_value"],
    )
  ]


def _checked(
  operation: Operation, indices, axes, shape: Dims, sizes, mode
) -> jax.Array:
  """Clamp indices to the true sizes, or move those out of range beyond all elements."""
  for axis in axes:
    if isinstance(sizes[axis], Size) and not _is_whole(sizes[axis], shape[axis]):
      raise operation.refuse("the slices that it moves are padded")
  if not any(isinstance(shape[axis], Size) for axis in axes):
    return indices
  columns = []
  for column, axis in enumerate(axes):
    index = indices[..., column]
    if isinstance(shape[axis], Size):
      last = true(shape[axis]) - true(sizes[axis])
      last = jnp.asarray(last, index.dtype)
      if mode == _CLIP:
        index = jnp.clip(index, 0, last)
      elif mode == _FILL:
        index = jnp.where(index > last, np.asarray(_BEYOND, index.dtype), index)
    columns.append(index)
  if indices.dtype.itemsize < 4 and mode == _FILL:
    raise operation.refuse(f"its indices are {indices.dtype}")
  return jnp.stack(columns, -1)


@rule("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(operation: Operation, operand, indices, updates) -> list:
  params, (shape, of_indices, of_updates) = operation.params, operation.inputs
  numbers = params["dimension_numbers"]
  mode = lax.GatherScatterMode.from_any(params["mode"])
  windows = _window_sizes(numbers, shape, of_updates)
  for size, whole in zip(windows, shape):
    if isinstance(size, Size) and not _is_whole(size, whole):
      raise operation.refuse("the slices that it writes are padded")
  axes = numbers.scatter_dims_to_operand_dims
  indices = _checked(operation, indices, axes, shape, windows, mode)
  if is_sized(of_indices[:-1]):
    if indices.dtype.itemsize < 4:
      raise operation.refuse(f"its indices are {indices.dtype}")
    if mode == _CLIP:
      # Clamp first, since the scatter below drops indices that are out of range.
      lasts = [int(shape[axis]) - int(windows[axis]) for axis in axes]
      indices = jnp.clip(indices, 0, jnp.asarray(lasts, indices.dtype))
    beyond = np.asarray(_BEYOND, indices.dtype)
    for axis in range(indices.ndim - 1):
      if isinstance(of_indices[axis], Size):
        keep = is_true(of_indices, axis, indices.shape)
        indices = jnp.where(keep, indices, beyond)
    mode = _FILL
  order = {"indices_are_sorted": False, "unique_indices": False}
  return operation.bind(operand, indices, updates, mode=mode, **order)


def _window_sizes(numbers, shape: Dims, of_updates: Dims) -> list:
  """Return the size of a written window along each axis of the operand."""
  left_out = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
  windows = iter([of_updates[dim] for dim in numbers.update_window_dims])
  return [1 if axis in left_out else next(windows) for axis in range(len(shape))]


def _is_whole(size: Size, whole) -> bool:
  return isinstance(whole, Size) and whole.group == size.group
