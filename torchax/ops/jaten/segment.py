"""Segment reductions, over runs of elements whose lengths are data.

The segments of a row are given by lengths or by offsets. The dimensions before `axis`
are a batch; each row has its own segments. Elements beyond the last segment are
ignored.
"""

import math

import jax
import jax.numpy as jnp

from torchax.core import out_of_range
from torchax.ops.builtin import op
from torchax.ops.jaten._arguments import dim_of
from torchax.registry.index_rules import Condition
from torchax.registry.names import aten

# Identity of each reduction, its segment function, and the combination of two results.
_REDUCTIONS = {
  "sum": (0.0, jax.ops.segment_sum, jnp.add),
  "mean": (0.0, jax.ops.segment_sum, jnp.add),
  "prod": (1.0, jax.ops.segment_prod, jnp.multiply),
  "max": (-math.inf, jax.ops.segment_max, jnp.maximum),
  "min": (math.inf, jax.ops.segment_min, jnp.minimum),
}


def _offsets(lengths, offsets, axis):
  """Return the starts of segments and the end of the last: (*batch, segments + 1)."""
  if (lengths is None) == (offsets is None):
    raise RuntimeError(
      "segment_reduce() expects either lengths or offsets, but got "
      f"{'neither' if lengths is None else 'both'}."
    )
  if lengths is None:
    return offsets
  ends = jnp.cumsum(lengths, -1)
  return jnp.pad(ends, [(0, 0)] * axis + [(1, 0)])


def _as_rows(data, axis):
  """Reshape (*batch, size, *rest) to (batch, size, rest)."""
  batch, rest = data.shape[:axis], data.shape[axis + 1 :]
  return data.reshape(math.prod(batch), data.shape[axis], math.prod(rest))


def _segment_of(offsets, size):
  """Return the segment of each element; outside of all, -1 or the segment count."""
  return jnp.searchsorted(offsets, jnp.arange(size), side="right") - 1


def _are_invalid(offsets, size, is_partial) -> jax.Array:
  """Return True for offsets that decrease, exceed the data, or do not cover it."""
  end = offsets[-1]
  goes_down = jnp.any(jnp.diff(offsets) < 0) | (offsets[0] < 0)
  return goes_down | ((end > size) if is_partial else (end != size))


def _length_rules(data, reduce, *, lengths=None, axis=0, unsafe=False, **named):
  if lengths is None or unsafe:
    return
  size = data.shape[axis] if -data.ndim <= axis < data.ndim else 0
  yield Condition(
    lengths,
    lambda numbers: numbers < 0,
    RuntimeError,
    "lengths contains negative value!",
  )
  yield Condition(
    lengths,
    lambda numbers: numbers.sum(-1) != size,
    RuntimeError,
    "segment_reduce(): Expected all rows of lengths along axis to sum to "
    "data.size(lengths.dim()-1) when !unsafe.",
  )


def _reduce_segments(rows, segments, count, reduce, initial):
  """Reduce the segments of rows (size, rest), and combine each with `initial`."""
  nothing, by_segment, combine = _REDUCTIONS[reduce]
  start = nothing if initial is None else initial
  inside = (segments >= 0) & (segments < count)
  segment_ids = jnp.where(
    inside, segments, count
  )  # an extra segment for other elements
  result = by_segment(rows, segment_ids, count + 1)[:count]
  if reduce in ("max", "min"):
    has_nan = jax.ops.segment_max(
      jnp.isnan(rows).astype(jnp.int8), segment_ids, count + 1
    )
    result = jnp.where(has_nan[:count] > 0, math.nan, result)
  return combine(result, jnp.asarray(start, rows.dtype))


def _by_row(function, offsets, *arrays):
  """Map `function(offsets, …)` over the rows of a batch."""
  flat = offsets.reshape(-1, offsets.shape[-1])
  return jax.vmap(function)(flat, *arrays)


@op(aten.segment_reduce, rules=_length_rules)
def _aten_segment_reduce(
  data,
  reduce,
  *,
  lengths=None,
  indices=None,
  offsets=None,
  axis=0,
  unsafe=False,
  initial=None,
):
  if not jnp.issubdtype(data.dtype, jnp.floating):
    raise RuntimeError(
      f"segment_reduce() expects floating-point data, but got {data.dtype}."
    )
  axis = dim_of(axis, data.ndim)
  if indices is not None:
    raise RuntimeError("segment_reduce(): indices are not supported, pass lengths.")
  ends = _offsets(lengths, offsets, axis)
  count = ends.shape[-1] - 1
  wide = data.astype(jnp.promote_types(data.dtype, jnp.float32))

  def of_row(row_ends, rows):
    segments = _segment_of(row_ends, len(rows))
    result = _reduce_segments(rows, segments, count, reduce, initial)
    if reduce == "mean":
      sizes = jnp.diff(row_ends)[:, None]
      empty = math.nan if initial is None else result
      result = jnp.where(sizes == 0, empty, result / jnp.maximum(sizes, 1))
    is_partial = unsafe or lengths is None
    return out_of_range.fill_invalid(
      result, _are_invalid(row_ends, len(rows), is_partial)
    )

  shape = (*data.shape[:axis], count, *data.shape[axis + 1 :])
  if data.size == 0 and 0 in (*data.shape[:axis], *data.shape[axis + 1 :]):
    return jnp.zeros(shape, data.dtype)
  result = _by_row(of_row, ends, _as_rows(wide, axis))
  return result.reshape(shape).astype(data.dtype)


def _product_of_others(rows, segments, count, initial):
  """Return, per element, the product of `initial` and the others of its segment."""
  is_zero, is_nan = rows == 0, jnp.isnan(rows)
  plain = jnp.where(is_zero | is_nan, 1, rows)
  start = 1.0 if initial is None else initial
  product = _reduce_segments(plain, segments, count, "prod", start)
  zeros, nans = (
    _reduce_segments(is_special.astype(rows.dtype), segments, count, "sum", None)
    for is_special in (is_zero, is_nan)
  )
  segment_ids = jnp.clip(segments, 0, max(count - 1, 0))
  others = product[segment_ids] / plain
  others = jnp.where(zeros[segment_ids] - is_zero > 0, 0, others)
  return jnp.where(nans[segment_ids] - is_nan > 0, math.nan, others)


@op(aten._segment_reduce_backward)
def _aten__segment_reduce_backward(
  grad,
  output,
  data,
  reduce,
  *,
  lengths=None,
  offsets=None,
  axis=0,
  initial=None,
):
  """Return the gradient of `data`; equal extrema share it equally."""
  axis = dim_of(axis, data.ndim)
  ends = _offsets(lengths, offsets, axis)
  count = ends.shape[-1] - 1
  if data.size == 0 or count == 0:
    return jnp.zeros_like(data)
  wide = jnp.promote_types(data.dtype, jnp.float32)

  def of_row(row_ends, grads, results, rows):
    segments = _segment_of(row_ends, len(rows))
    is_inside = ((segments >= 0) & (segments < count))[:, None]
    segment_ids = jnp.clip(segments, 0, count - 1)
    share = grads[segment_ids]
    if reduce == "mean":
      share = share / jnp.maximum(jnp.diff(row_ends), 1)[segment_ids][:, None]
    elif reduce == "prod":
      share = share * _product_of_others(rows, segments, count, initial)
    elif reduce in ("max", "min"):
      is_extreme = (rows == results[segment_ids]) | jnp.isnan(rows)
      ties = _reduce_segments(
        is_extreme.astype(rows.dtype), segments, count, "sum", None
      )
      share = jnp.where(is_extreme, share / jnp.maximum(ties, 1)[segment_ids], 0)
    is_invalid = _are_invalid(row_ends, len(rows), is_partial=True)
    return out_of_range.fill_invalid(jnp.where(is_inside, share, 0), is_invalid)

  arrays = (_as_rows(array.astype(wide), axis) for array in (grad, output, data))
  return _by_row(of_row, ends, *arrays).reshape(data.shape).astype(data.dtype)
