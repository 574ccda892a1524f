"""Sorting, top-k, searching sorted sequences, distinct elements.

As in torch, every sort is stable and NaN is the largest value. The shape of the
`unique` family depends on data, so it runs on concrete values, with numpy. Order
statistics that reduce (median, kthvalue) are in `reduction.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax.core import out_of_range
from torchax.core.stable_sort import sort_with_positions
from torchax.errors import TracedStateError
from torchax.ops.builtin import op
from torchax.ops.jaten._arguments import dim_of
from torchax.ops.promotion import int64
from torchax.registry.index_rules import Range
from torchax.registry.names import aten

# --- Sorting ---------------------------------------------------------------------


@op(aten.sort.default, index_results=(1,))
def _aten_sort(self, dim=-1, descending=False):
  """Return the sorted values and their former indices along `dim`."""
  dim = dim_of(dim, self.ndim)
  if self.ndim == 0:
    return self, jnp.zeros((), int64())
  values, positions = sort_with_positions(self, dim, descending)
  return values, positions.astype(int64())


@op(aten.sort.stable, index_results=(1,))
def _aten_sort_stable(self, *, stable=None, dim=-1, descending=False):
  return _aten_sort(self, dim, descending)


@op(aten.argsort, index_results=(0,))
def _aten_argsort(self, dim=-1, descending=False, *, stable=False):
  return _aten_sort(self, dim, descending)[1]


@op(aten.msort)
def _aten_msort(self):
  return _aten_sort(self, 0)[0]


def _topk_keys(values, largest):
  """Return keys whose order under `lax.top_k`, largest first, is torch's.

  `lax.top_k` orders floats by their bits, so the sign of a NaN decides its position.
  The keys give NaN the sign that makes it torch's largest value.
  """
  if values.dtype == jnp.bool_:
    values = values.astype(jnp.uint8)
  if jnp.issubdtype(values.dtype, jnp.floating):
    nan = np.copysign(np.nan, 1 if largest else -1).astype(values.dtype)
    return jnp.where(jnp.isnan(values), nan, values if largest else -values)
  return values if largest else ~values  # unlike -values, does not overflow


@op(aten.topk, index_results=(1,))
def _aten_topk(self, k, dim=-1, largest=True, sorted=True):
  """Return the k largest (or smallest) along `dim`, always sorted."""
  dim = dim_of(dim, self.ndim)
  if self.ndim == 0:
    return self, jnp.zeros((), int64())
  rows = jnp.moveaxis(self, dim, -1)
  _, indices = lax.top_k(_topk_keys(rows, largest), k)
  values = jnp.take_along_axis(rows, indices, -1, mode="promise_in_bounds")
  return (
    jnp.moveaxis(values, -1, dim),
    jnp.moveaxis(indices, -1, dim).astype(int64()),
  )


# --- Searching -------------------------------------------------------------------


def _sorter_rules(sorted_sequence, self, *, sorter=None, **named):
  if sorter is not None:
    message = "torch.searchsorted(): sorter index out of range"
    yield Range(sorter, 0, sorted_sequence.shape[-1], RuntimeError, message)


@op(aten.searchsorted, index_results=(0,), rules=_sorter_rules)
def _aten_searchsorted(
  sorted_sequence, self, *, out_int32=False, right=False, side=None, sorter=None
):
  """Return insertion indices into sorted rows, one row per leading index.

  Raises:
    ValueError: `side` is neither "left" nor "right", or contradicts `right`.
  """
  if side not in (None, "left", "right") or (side == "left" and right):
    raise ValueError(
      f"searchsorted expects side to be left or right, in accord with `right`, but "
      f"got side={side!r} and right={right}."
    )
  side = side or ("right" if right else "left")
  if sorter is not None:
    is_invalid = out_of_range.is_out_of_range(sorter, sorted_sequence.shape[-1]).any()
    sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, -1, mode="clip")
  values = jnp.asarray(self)
  if not values.size or not sorted_sequence.shape[-1]:
    indices = jnp.zeros(values.shape, int64())
  elif sorted_sequence.ndim == 1:
    indices = jnp.searchsorted(sorted_sequence, values, side)
  else:
    rows = sorted_sequence.reshape(-1, sorted_sequence.shape[-1])
    queries = values.reshape(rows.shape[0], -1)
    search = jax.vmap(lambda row, query: jnp.searchsorted(row, query, side))
    indices = search(rows, queries).reshape(values.shape)
  indices = indices.astype(jnp.int32 if out_int32 else int64())
  return indices if sorter is None else out_of_range.fill_invalid(indices, is_invalid)


@op(aten.bucketize, index_results=(0,))
def _aten_bucketize(self, boundaries, *, out_int32=False, right=False):
  if boundaries.ndim != 1:
    raise RuntimeError(
      f"bucketize expects boundaries of 1 dimension, but got shape {boundaries.shape}."
    )
  return _aten_searchsorted(boundaries, self, out_int32=out_int32, right=right)


# --- Distinct elements -----------------------------------------------------------


def _values(array, name) -> np.ndarray:
  if isinstance(array, jax.core.Tracer):
    raise TracedStateError(
      f"{name}: the number of distinct elements depends on the values of a tensor, "
      "and these are unknown inside a JAX transformation such as jax.jit. Call it "
      "outside, or sort and compare neighbours, which has a fixed shape."
    )
  values = np.asarray(array)
  # numpy's lexsort knows no bfloat16 or float8; float32 holds them exactly.
  is_narrow = jnp.issubdtype(array.dtype, jnp.floating) and values.itemsize < 4
  return values.astype(np.float32) if is_narrow else values


def _runs(rows):
  """Return the starts of the runs of equal rows, and the run of each row.

  NaN differs from itself, as in torch.
  """
  is_first = np.ones(len(rows), bool)
  is_first[1:] = (rows[1:] != rows[:-1]).any(tuple(range(1, rows.ndim)))
  return np.flatnonzero(is_first), np.cumsum(is_first) - 1


def _groups(rows, consecutive):
  """Group equal rows.

  Returns:
    The index of the first member of each group, the group of each row, and the size of
    each group.
  """
  if consecutive or not len(rows):
    order = np.arange(len(rows))
  elif rows.ndim == 1:
    order = np.argsort(rows, kind="stable")
  else:
    columns = rows.reshape(len(rows), -1).T
    order = np.lexsort(columns[::-1]) if len(columns) else np.arange(len(rows))
  starts, run = _runs(rows[order])
  group = np.empty_like(run)
  group[order] = run
  return order[starts], group, np.diff(starts, append=len(rows))


def _distinct(self, name, dim=None, consecutive=False, inverse=True, counts=True):
  """Return distinct elements (or slices along `dim`), their inverse and counts.

  As in torch, an output that is not requested is an empty tensor.
  """
  array = self.reshape(-1) if dim is None else self
  axis = 0 if dim is None else dim
  rows = np.moveaxis(_values(array, name), axis, 0)
  members, group, sizes = _groups(rows, consecutive)
  empty = np.zeros(0)
  shape = self.shape if dim is None else group.shape
  return (
    jnp.take(array, members, axis),
    jnp.asarray(group.reshape(shape) if inverse else empty, int64()),
    jnp.asarray(sizes if counts else empty, int64()),
  )


@op(aten._unique, compiled=False)
def _aten_unique(self, sorted=True, return_inverse=False):
  return _distinct(self, "unique", inverse=return_inverse)[:2]


@op(aten._unique2, compiled=False)
def _aten_unique2(self, sorted=True, return_inverse=False, return_counts=False):
  return _distinct(self, "unique", inverse=return_inverse, counts=return_counts)


@op(aten.unique_dim, compiled=False)
def _aten_unique_dim(self, dim, sorted=True, return_inverse=False, return_counts=False):
  """Return distinct slices in lexicographic order, always with inverse and counts.

  NaN is larger than any number. torch compares with `<`, so its order of slices with
  NaN depends on the other slices.
  """
  return _distinct(self, "unique", dim)


@op(aten.unique_consecutive, compiled=False)
def _aten_unique_consecutive(self, return_inverse=False, return_counts=False, dim=None):
  if dim is not None:
    return _aten_unique_dim_consecutive(self, dim, return_inverse, return_counts)
  return _distinct(
    self, "unique_consecutive", None, True, return_inverse, return_counts
  )


@op(aten.unique_dim_consecutive, compiled=False)
def _aten_unique_dim_consecutive(self, dim, return_inverse=False, return_counts=False):
  """Return the distinct runs, always with inverse and counts, as in `unique_dim`."""
  return _distinct(self, "unique_consecutive", dim, consecutive=True)
