"""Reads and writes by index along one dimension or in the flat tensor.

`indexing.py` documents indices out of range, and has indexing by several tensors and
by masks.
"""

import functools
import math

import jax.numpy as jnp
import torch

from torchax.core import out_of_range
from torchax.core.mappings import limits
from torchax.ops.builtin import op
from torchax.ops.casting import require_fit
from torchax.ops.jaten import _on_host
from torchax.ops.jaten._arguments import dim_of, require_one_dtype
from torchax.ops.jaten.indexing import add_at, multiply_at, put_at, set_at
from torchax.registry.index_rules import Range, dimension_rule
from torchax.registry.names import aten

# --- along one dimension ---------------------------------------------------------


def _along(dim, ndim, index) -> tuple:
  """Return the index tuple that applies `index` to dimension `dim`."""
  return (slice(None),) * (dim % ndim) + (index,)


_NO_ROW = "index out of range in self"


def _size(self, dim) -> int:
  """Return the size of a dimension; 1 for a 0-d tensor."""
  dim = dim_of(dim, self.ndim)
  return self.shape[dim] if self.ndim else 1


def _row_rules(self, dim, index, *rest, **named):
  yield Range(index, 0, _size(self, dim), IndexError, _NO_ROW)


@op(aten.index_select, rules=_row_rules, on_host=_on_host.index_select)
def _aten_index_select(self, dim, index):
  array = jnp.atleast_1d(self)
  dim = dim_of(dim, self.ndim)
  index = out_of_range.negative_to_size(index.reshape(-1), _size(self, dim))
  rows = out_of_range.read(array, _along(dim, array.ndim, index))
  return rows if self.ndim else rows.reshape(self.shape)


def _write_along(self, dim, index, values, how, gathers=False, wraps=False):
  """Write rows by `how(array, indices, values)`; a 0-d tensor counts as 1-d."""
  dim = dim_of(dim, self.ndim)
  array, index = jnp.atleast_1d(self), index.reshape(-1)
  size = array.shape[dim]
  indices = _along(dim, array.ndim, out_of_range.clip(index, size, wraps))
  broken = out_of_range.is_out_of_range(index, size, wraps)
  written = out_of_range.write(array, indices, values, how, broken, gathers)
  return written.reshape(self.shape)


def _check_rows(name, self, dim, index, source) -> None:
  """Raise unless `source` has the shape of `self`, with one row per index."""
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


def _add_rules(self, dim, index, source, *, alpha=1):
  size = _size(self, dim)
  if self.ndim > 1:
    yield dimension_rule(index, size, dim_of(dim, self.ndim), RuntimeError)
  else:
    yield Range(index, 0, size, IndexError, _NO_ROW)


def _require_rank(self, source) -> None:
  if max(self.ndim, source.ndim) > 1 or not source.ndim < self.ndim:
    return
  raise RuntimeError(
    "source tensor shape must match self tensor shape, excluding the specified "
    f"dimension. Got self.shape = {list(self.shape)} and source.shape = "
    f"{list(source.shape)}."
  )


@op(aten.index_add, rules=_add_rules, on_host=_on_host.index_add)
def _aten_index_add(self, dim, index, source, *, alpha=1):
  _require_rank(self, source)
  _check_rows("index_add", self, dim, index, source)
  require_one_dtype("index_add", self, source)
  addend = (source * alpha).astype(self.dtype)
  return _write_along(self, dim, index, addend, add_at, gathers=True)


_NO_COPY = (
  "index_copy_(): index {number} is out of bounds for dimension {dim} with size {high}"
)


def _copy_rules(self, dim, index, source):
  dim = dim_of(dim, self.ndim)
  yield Range(index, 0, _size(self, dim), IndexError, _NO_COPY, dim=dim)


@op(aten.index_copy, rules=_copy_rules, on_host=_on_host.index_copy)
def _aten_index_copy(self, dim, index, source):
  require_one_dtype("index_copy", self, source)
  return _write_along(self, dim, index, source, set_at)


def _fill_rules(self, dim, index, value):
  yield dimension_rule(index, _size(self, dim), dim_of(dim, self.ndim), wraps=True)


def _check_number(self, dim, index, value, **_ignored):
  require_fit(value, self.dtype)


def _check_filler(self, dim, index, value):
  is_tensor = isinstance(value, torch.Tensor)
  is_complex = value.is_complex() if is_tensor else isinstance(value, complex)
  if is_complex and not self.dtype.is_complex:
    raise RuntimeError(
      "index_fill_(): Converting complex Scalar to non-complex type is not supported: "
      f"expected a number for {self.dtype}, but got {value}. Pass its real part."
    )
  require_fit(value, self.dtype)


@op(aten.index_fill, check=_check_filler, rules=_fill_rules)
def _aten_index_fill(self, dim, index, value):
  filler = jnp.asarray(value).astype(self.dtype)
  return _write_along(self, dim, index, filler, set_at, wraps=True)


@op(aten.index_reduce, rules=_row_rules)
def _aten_index_reduce(self, dim, index, source, reduce, *, include_self=True):
  _require_rank(self, source)
  _check_rows("index_reduce", self, dim, index, source)
  require_one_dtype("index_reduce", self, source)
  how = functools.partial(_reduce_into, reduce, include_self)
  return _write_along(self, dim, index, source, how, gathers=True)


# --- gather and scatter ----------------------------------------------------------


def _place_rules(self, dim, index, *rest, **named):
  yield dimension_rule(index, _size(self, dim), dim_of(dim, self.ndim), RuntimeError)


@op(aten.gather, rules=_place_rules, on_host=_on_host.gather)
def _aten_gather(self, dim, index, *, sparse_grad=False):
  """Return `self[i][index[i][j]]` along `dim`; other dims of `index` may be smaller."""
  dim = dim_of(dim, self.ndim)
  index = out_of_range.negative_to_size(index, _size(self, dim))
  if self.ndim == 0 or index.ndim == 0:
    return out_of_range.read(jnp.atleast_1d(self), index)
  if not index.size:
    return jnp.zeros(index.shape, self.dtype)
  window = tuple(
    slice(None) if axis == dim else slice(size) for axis, size in enumerate(index.shape)
  )
  return out_of_range.read(self[window], index, dim)


def _scatter(self, dim, index, src, how, gathers=False):
  """Write by `how(array, indices, values)`; `index` may be smaller than `src`."""
  array, index = jnp.atleast_1d(self, index)
  if jnp.ndim(src):
    src = src[tuple(slice(size) for size in index.shape)]
  values = jnp.asarray(src).astype(self.dtype)
  if index.size == 0:
    return self
  size = array.shape[dim]
  grid = list(jnp.ogrid[tuple(slice(extent) for extent in index.shape)])
  grid[dim] = out_of_range.clip(index, size)
  values = jnp.broadcast_to(values, index.shape)
  broken = out_of_range.is_out_of_range(index, size)
  written = out_of_range.write(array, tuple(grid), values, how, broken, gathers)
  return written.reshape(self.shape)


@op(aten.scatter.src, rules=_place_rules, on_host=_on_host.scatter)
def _aten_scatter_src(self, dim, index, src):
  return _scatter(self, dim, index, src, set_at)


@op(
  aten.scatter.value,
  check=_check_number,
  rules=_place_rules,
  on_host=_on_host.scatter_value,
)
def _aten_scatter(self, dim, index, value):
  return _scatter(self, dim, index, value, set_at)


@op(aten.scatter_add, rules=_place_rules, on_host=_on_host.scatter_add)
def _aten_scatter_add(self, dim, index, src):
  return _scatter(self, dim, index, src, add_at, gathers=True)


@op(aten.scatter.reduce, rules=_place_rules)
def _aten_scatter_with_reduce(self, dim, index, src, *, reduce):
  """Run `scatter_reduce` with the older names of reductions, add and multiply."""
  return _aten_scatter_reduce(self, dim, index, src, _OLD_NAMES.get(reduce, reduce))


@op(aten.scatter.value_reduce, check=_check_number, rules=_place_rules)
def _aten_scatter_value_reduce(self, dim, index, value, *, reduce):
  return _aten_scatter_reduce(self, dim, index, value, _OLD_NAMES.get(reduce, reduce))


@op(aten.scatter_reduce, rules=_place_rules)
def _aten_scatter_reduce(self, dim, index, src, reduce, *, include_self=True):
  """Reduce `src` into `self` by sum, prod, mean, amax or amin.

  Without `include_self`, the elements of `self` at the indices do not count.
  """
  how = functools.partial(_reduce_into, reduce, include_self)
  return _scatter(self, dim, index, src, how, gathers=True)


_OLD_NAMES = {"add": "sum", "multiply": "prod"}
_REDUCERS = {
  "sum": add_at,
  "mean": add_at,
  "prod": multiply_at,
  "amax": lambda array, indices, values: array.at[indices].max(values),
  "amin": lambda array, indices, values: array.at[indices].min(values),
}


def _identity(reduce, dtype):
  """Return the identity of a reduction."""
  if reduce in ("sum", "mean"):
    return 0
  if reduce == "prod":
    return 1
  least, largest = limits(dtype)
  return least if reduce == "amax" else largest


def _reduce_into(reduce, include_self, array, indices, values):
  start = array
  if not include_self:
    touched = jnp.zeros(array.shape, bool).at[indices].set(True)
    identity = jnp.asarray(_identity(reduce, array.dtype), array.dtype)
    start = jnp.where(touched, identity, array)
  reduced = _REDUCERS[reduce](start, indices, values)
  if reduce != "mean":
    return reduced
  own = jnp.full(array.shape, int(include_self), jnp.int32)
  count = jnp.maximum(own.at[indices].add(1), 1).astype(array.dtype)
  if jnp.issubdtype(array.dtype, jnp.integer):
    return reduced // count
  return reduced / count


# --- flat positions --------------------------------------------------------------


_NO_ELEMENT = (
  "out of range: tried to access index {number} on a tensor of {high} elements."
)


def _flat_rules(self, index, *rest, **named):
  count = math.prod(self.shape)
  yield Range(index, -count, count, IndexError, _NO_ELEMENT)


@op(aten.take, rules=_flat_rules)
def _aten_take(self, index):
  return out_of_range.read(self.reshape(-1), index)


@op(aten.put, rules=_flat_rules)
def _aten_put(self, index, source, accumulate=False):
  require_one_dtype("put", self, source)
  flat = self.reshape(-1)
  values = source.reshape(index.shape)
  return put_at(flat, (index,), values, accumulate).reshape(self.shape)
