"""Slices and selections along a dim: their copy, scatter and backward operations.

In eager calls, start and index are operands, so that slices of one shape share a
program. A traced start or index is in range, because the caller checks it first.
"""

import jax
import jax.numpy as jnp
from jax import lax

from torchax.core.view_steps import put_slice
from torchax.ops.builtin import op
from torchax.ops.jaten import _numbers, _on_host
from torchax.ops.jaten._arguments import dim_of
from torchax.registry.names import aten


def _slice_range(length, start, end, step) -> range:
  """Return the indices of a slice, clamped as in Python."""
  if step <= 0:
    raise ValueError(f"slice expects a step > 0, but got {step}.")
  return range(*slice(start, end, step).indices(length))


@op(aten.slice_copy)
def _aten_slice(self, dim=0, start=None, end=None, step=1):
  dim = dim_of(dim, self.ndim)
  indices = _slice_range(self.shape[dim], start, end, step)
  stop = max(indices.start, indices.stop)
  return lax.slice_in_dim(self, indices.start, stop, step, dim)


def _require_source(self, src, dim, length) -> None:
  """Raise RuntimeError unless `src` has the shape of the slice that it replaces."""
  slice_shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
  if tuple(src.shape) != slice_shape:
    raise RuntimeError(
      "slice_scatter: expected src to have a size equal to the slice of self. src size "
      f"= {list(src.shape)}, slice size = {list(slice_shape)}"
    )


def _check_slice(self, src, dim=0, start=None, end=None, step=1):
  dim = dim_of(dim, self.ndim)
  indices = _slice_range(self.shape[dim], start, end, step)
  _require_source(self, src, dim, len(indices))


def _prepare_slice(arguments: dict) -> None:
  """Drop `end`: the source has the length of the slice, so `start` suffices."""
  if type(arguments.get("start")) is int and "end" in arguments:
    arguments["end"] = None


@op(
  aten.slice_scatter,
  shape_check=_check_slice,
  static=("start",),
  prepare=_prepare_slice,
)
def _aten_slice_scatter(self, src, dim=0, start=None, end=None, step=1):
  dim = dim_of(dim, self.ndim)
  if isinstance(start, jax.Array):
    return _write_at(self, src, dim, start, step)
  indices = _slice_range(self.shape[dim], start, end, step)
  _require_source(self, src, dim, len(indices))
  src = src.astype(self.dtype)
  if step == 1:
    return put_slice(self, src, dim, indices.start) if len(indices) else self
  index = (slice(None),) * dim + (slice(indices.start, indices.stop, step),)
  return self.at[index].set(src)


def _write_at(self, src, dim, start, step=1):
  """Write `src` along `dim` from a traced `start`; it must fit."""
  size, length = self.shape[dim], src.shape[dim]
  first = jnp.clip(jnp.where(start < 0, start + size, start), 0, size)
  if not length:
    return self
  src = src.astype(self.dtype)
  if step == 1:
    return put_slice(self, src, dim, first)
  indices = first + step * jnp.arange(length)
  return self.at[(slice(None),) * dim + (indices,)].set(src)


def _write_into_zeros(rows, sizes, dim, first, step):
  """Write `rows` into zeros of shape `sizes`, along `dim` from a traced `first`."""
  zeros = jnp.zeros(sizes, rows.dtype)
  if isinstance(step, int) and step == 1:
    return lax.dynamic_update_slice_in_dim(zeros, rows, first, dim)
  indices = first + step * jnp.arange(rows.shape[dim])
  return zeros.at[(slice(None),) * dim + (indices,)].set(rows)


@op(
  aten.slice_backward,
  dynamic=("start", "end"),
  static=("step",),
  prepare=_numbers.static_if("step", is_static=lambda step: step == 1),
  on_host=_on_host.slice_backward,
)
def _aten_slice_backward(grad_output, input_sizes, dim, start, end, step):
  """Return the slice's gradient with zeros around and between its elements.

  Inside a trace this is one `lax.pad`.
  """
  dim = dim_of(dim, len(input_sizes))
  if grad_output.size == 0:
    return jnp.zeros(input_sizes, grad_output.dtype)
  size = input_sizes[dim]
  if not isinstance(start, int):
    first = jnp.clip(jnp.where(start < 0, start + size, start), 0, size)
    return _write_into_zeros(grad_output, input_sizes, dim, first, step)
  # torch passes the largest int64 for no end; without x64 it arrives as a float.
  indices = _slice_range(size, start, size if end > size else end, step)
  after = size - indices[-1] - 1
  widths = [(0, 0, 0)] * grad_output.ndim
  widths[dim] = (indices.start, after, step - 1)
  return lax.pad(grad_output, jnp.zeros((), grad_output.dtype), widths)


def _check_narrow(self, dim, start, length) -> None:
  if not self.ndim:
    raise RuntimeError("narrow() cannot be applied to a 0-dim tensor.")
  if dim >= self.ndim:
    # torch raises RuntimeError, because it checks this by an assertion.
    raise RuntimeError(f"narrow expects dim < {self.ndim}, but got dim={dim}.")
  dim = dim_of(dim, self.ndim)
  size = self.shape[dim]
  if not -size <= start <= size:
    raise IndexError(
      f"start out of range (expected to be in range of [{-size}, {size}], but got "
      f"{start})"
    )
  start += size if start < 0 else 0
  if length < 0 or not 0 <= start <= size - length:
    raise RuntimeError(
      f"narrow expects start and length within a dimension of size {size}, but got "
      f"start={start} and length={length}."
    )


_START: dict = {"static": ("start",), "prepare": _numbers.as_they_are}


@op(aten.narrow_copy, shape_check=_check_narrow, **_START)
def _aten_narrow(self, dim, start, length):
  if isinstance(start, int):
    _check_narrow(self, dim, start, length)
    start += self.shape[dim] if start < 0 else 0
    return lax.slice_in_dim(self, start, start + length, axis=dim)
  start = jnp.where(start < 0, start + self.shape[dim], start)
  return lax.dynamic_slice_in_dim(self, start, length, dim)


def _wrap_index(index, length):
  if not -length <= index < length:
    raise IndexError(
      f"select expects an index in [{-length}, {length - 1}], but got {index}."
    )
  return index % length


def _check_index(self, dim, index) -> None:
  _wrap_index(index, self.shape[dim_of(dim, self.ndim)])


_INDEX: dict = {"static": ("index",), "prepare": _numbers.as_they_are}


@op(aten.select_copy, shape_check=_check_index, **_INDEX)
def _aten_select(self, dim, index):
  size = self.shape[dim]
  if isinstance(index, int):
    index = _wrap_index(index, size)
    return lax.index_in_dim(self, index, dim, keepdims=False)
  index = jnp.where(index < 0, index + size, index)
  return lax.dynamic_index_in_dim(self, index, dim, keepdims=False)


def _check_select(self, src, dim, index):
  dim = dim_of(dim, self.ndim)
  _wrap_index(index, self.shape[dim])
  row = (*self.shape[:dim], *self.shape[dim + 1 :])
  if tuple(src.shape) != row:
    raise RuntimeError(
      "expected src to have a size equal to the slice of self. src size = "
      f"{list(src.shape)}, slice size = {list(row)}"
    )


@op(aten.select_scatter, shape_check=_check_select, **_INDEX)
def _aten_select_scatter(self, src, dim, index):
  dim = dim_of(dim, self.ndim)
  row = jnp.expand_dims(src.astype(self.dtype), dim)
  if not isinstance(index, int):
    return _write_at(self, row, dim, index)
  index = _wrap_index(index, self.shape[dim])
  return _aten_slice_scatter(self, row, dim, index, index + 1)


@op(aten.select_backward, dynamic=("index",), on_host=_on_host.select_backward)
def _aten_select_backward(grad_output, input_sizes, dim, index):
  """Write the gradient of the slice at `index` into zeros."""
  dim = dim_of(dim, len(input_sizes))
  row = jnp.expand_dims(grad_output, dim)
  if not isinstance(index, int):
    first = jnp.where(index < 0, index + input_sizes[dim], index)
    return _write_into_zeros(row, input_sizes, dim, first, 1)
  index = _wrap_index(index, input_sizes[dim])
  return _aten_slice_backward(row, input_sizes, dim, index, index + 1, 1)
