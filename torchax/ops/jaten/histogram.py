"""Histograms of one or several dimensions, and counts of integers.

A bin includes its lower edge but not its upper one; the last bin includes both. Values
outside all bins, and NaN, are not counted.
"""

import math

import jax
import jax.numpy as jnp
import torch

from torchax.core import mappings
from torchax.core.static_values import StaticValue
from torchax.errors import TracedStateError
from torchax.ops.builtin import op
from torchax.ops.jaten import _on_host
from torchax.ops.jaten._extrema import highest, lowest
from torchax.registry.index_rules import Condition
from torchax.registry.names import aten

# --- bins of equal width ---------------------------------------------------------


def _is_python_number(number) -> bool:
  return isinstance(number, int | float)


def _histc_rules(self, bins=100, min=0, max=0):
  if _is_python_number(min) and _is_python_number(max) and min == max:
    message = "torch.histc: expected finite values without a range, but got {number}"
    yield Condition(self, lambda values: values - values != 0, RuntimeError, message)


def _check_histc(self, bins=100, min=0, max=0):
  if max < min:
    raise RuntimeError(
      f"torch.histc: max must be larger than min, but got min={min} and max={max}."
    )


def _prepare_histc(arguments: dict) -> None:
  """Make equal bounds static: they select the range of the data."""
  low, high = (arguments.get(name, 0) for name in ("min", "max"))
  if low == high:
    for name in {"min", "max"} & arguments.keys():
      arguments[name] = StaticValue(arguments[name])


@op(
  aten.histc,
  check=_check_histc,
  rules=_histc_rules,
  static=("min", "max"),
  prepare=_prepare_histc,
)
def _aten_histc(self, bins=100, min=0, max=0):
  """Count values in equal bins of [min, max]; if min == max, of the data's range."""
  # Half precision would round values into a neighboring bin.
  wide = jnp.promote_types(self.dtype, jnp.float32)
  values = jnp.ravel(self).astype(wide)
  low, high = jnp.asarray(min, wide), jnp.asarray(max, wide)
  if _is_python_number(min) and _is_python_number(max) and min == max and values.size:
    low, high = lowest(values), highest(values)
  is_finite = jnp.isfinite(low) & jnp.isfinite(high)
  is_point = low == high
  low, high = jnp.where(is_point, low - 1, low), jnp.where(is_point, high + 1, high)
  is_inside = (values >= low) & (values <= high)
  bin_index = jnp.floor((values - low) / (high - low) * bins).astype(jnp.int32)
  # The last bin includes the upper bound; index `bins` drops values outside.
  bin_index = jnp.where(is_inside, jnp.minimum(bin_index, bins - 1), bins)
  counts = jnp.zeros(bins, wide).at[bin_index].add(1, mode="drop")
  return jnp.where(is_finite, counts, jnp.nan).astype(self.dtype)


@op(aten.bincount, compiled=False, on_host=_on_host.bincount)
def _aten_bincount(self, weights=None, minlength=0):
  if isinstance(self, jax.core.Tracer):
    raise TracedStateError(
      "bincount: the length of the result depends on values of the tensor, and these "
      "are unknown inside a JAX transformation such as jax.jit. Add ones with "
      "`scatter_add` to zeros of a known length instead."
    )
  is_valid = self.ndim == 1 and not jnp.issubdtype(self.dtype, jnp.inexact)
  low, high = 0, -1
  if is_valid and self.size:
    with jax.ensure_compile_time_eval():  # also while JAX traces another tensor
      low, high = int(jnp.min(self)), int(jnp.max(self))
  if not is_valid or low < 0:
    raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
  length = max(minlength, high + 1)
  if weights is None:
    return jnp.bincount(self, length=length).astype(mappings.t2j_dtype(torch.int64))
  double = mappings.t2j_dtype(torch.float64)
  weights = weights if weights.dtype == jnp.float32 else weights.astype(double)
  return jnp.bincount(self, weights, length=length)


# --- edges -----------------------------------------------------------------------


def _linspace_edges(low, high, bins, dtype):
  """Return bins + 1 edges, computed from both ends as in `torch.linspace`."""
  index = jnp.arange(bins + 1)
  step = (high - low) / bins
  from_low, from_high = low + index * step, high - (bins - index) * step
  return jnp.where(index < (bins + 1) // 2, from_low, from_high).astype(dtype)


def _check_finite(name, dimension, low, high):
  if isinstance(low, jax.core.Tracer):
    return
  if not (math.isfinite(low) and math.isfinite(high)):
    raise RuntimeError(
      f"{name}: dimension {dimension}'s inferred range [{low}, {high}] is not finite. "
      "Pass `range=`."
    )


def _limits(name, points, range):
  """Return (low, high) for each dimension of points (count, dimensions)."""
  dimensions = points.shape[1]
  if range is not None:
    if len(range) != 2 * dimensions:
      raise RuntimeError(
        f"{name}: range should have {2 * dimensions} numbers, a pair for each "
        f"dimension, but got {len(range)}."
      )
    pairs = list(zip(range[::2], range[1::2]))
    for dimension, (low, high) in enumerate(pairs):
      if not (math.isfinite(low) and math.isfinite(high)) or low > high:
        raise RuntimeError(
          f"{name}: expected a finite range with min <= max for dimension {dimension}, "
          f"but got [{low}, {high}]."
        )
  elif not len(points):
    pairs = [(0.0, 1.0)] * dimensions
  else:
    pairs = list(zip(lowest(points, 0), highest(points, 0)))
    for dimension, (low, high) in enumerate(pairs):
      _check_finite(name, dimension, low, high)
  limits = []
  for low, high in pairs:
    low, high = jnp.asarray(low, points.dtype), jnp.asarray(high, points.dtype)
    is_point = low == high  # an empty range is widened to width 1
    half = jnp.asarray(0.5, points.dtype)
    limits.append(
      (jnp.where(is_point, low - half, low), jnp.where(is_point, high + half, high))
    )
  return limits


def _points(name, self, dimensions):
  """Reshape a tensor of coordinates (…, dimensions) to (count, dimensions)."""
  if not jnp.issubdtype(self.dtype, jnp.floating):
    raise NotImplementedError(
      f"{name} is not implemented for {self.dtype}: pass floating-point values."
    )
  return self.reshape(math.prod(self.shape[:-1]), dimensions)


# --- counting --------------------------------------------------------------------


def _count(points, edges, weight, density):
  """Compute the histogram of points (count, dimensions) in the bins between edges."""
  sizes = [len(axis_edges) - 1 for axis_edges in edges]
  dtype = points.dtype
  counts = jnp.ones(len(points), dtype)
  if weight is not None:
    if weight.size != len(points):
      raise RuntimeError(
        f"histogram: expected a weight for each of the {len(points)} values, but got "
        f"shape {weight.shape}."
      )
    counts = weight.reshape(-1).astype(dtype)
  indices = []
  for column, axis_edges in zip(points.T, edges):
    bins = jnp.searchsorted(axis_edges, column, side="right") - 1
    indices.append(jnp.clip(bins, 0, len(axis_edges) - 2))
    is_inside = (column >= axis_edges[0]) & (column <= axis_edges[-1])
    counts = jnp.where(is_inside, counts, 0)
  histogram = jnp.zeros(sizes, dtype).at[tuple(indices)].add(counts)
  if not density:
    return histogram
  histogram = histogram / jnp.sum(histogram)
  for axis, axis_edges in enumerate(edges):
    widths = jnp.diff(axis_edges)
    shape = [1] * len(edges)
    shape[axis] = len(widths)
    histogram = histogram / widths.reshape(shape)
  return histogram


def _edges_of(name, points, bins, range):
  if any(count <= 0 for count in bins):
    raise RuntimeError(f"{name}: bins must be > 0, but got {tuple(bins)}.")
  limits = _limits(name, points, range)
  return [_linspace_edges(*pair, n, points.dtype) for pair, n in zip(limits, bins)]


def _has_range(args, kwargs) -> bool:
  """Return False without `range`: checking the data's range needs concrete arrays."""
  return kwargs.get("range") is not None


@op(aten.histogram.bin_ct, static=("range",), compiled=_has_range)
def _aten_histogram(self, bins=100, *, range=None, weight=None, density=False):
  """Return (counts, edges) of equal bins; `range` defaults to the data's."""
  points = _points("torch.histogram", self.reshape(-1, 1), 1)
  edges = _edges_of("torch.histogram", points, [bins], range)
  return _count(points, edges, weight, density), edges[0]


@op(aten.histogram.bins_tensor)
def _aten_histogram_bins_tensor(self, bins, *, weight=None, density=False):
  """Return (counts, edges) of bins between increasing edges."""
  if bins.ndim != 1 or not bins.size or bins.dtype != self.dtype:
    raise RuntimeError(
      "torch.histogram: expected bins to be a 1-d tensor of edges with the input's "
      f"dtype {self.dtype}, but got shape {bins.shape} and {bins.dtype}."
    )
  points = _points("torch.histogram", self.reshape(-1, 1), 1)
  return _count(points, [bins], weight, density), bins


@op(aten._histogramdd_bin_edges, static=("range",), compiled=_has_range)
def _aten__histogramdd_bin_edges(self, bins, *, range=None, weight=None, density=False):
  points = _points("torch.histogramdd", self, len(bins))
  return _edges_of("torch.histogramdd", points, bins, range)


@op(aten._histogramdd_from_bin_cts, static=("range",), compiled=_has_range)
def _aten__histogramdd_from_bin_cts(
  self, bins, *, range=None, weight=None, density=False
):
  points = _points("torch.histogramdd", self, len(bins))
  edges = _edges_of("torch.histogramdd", points, bins, range)
  return _count(points, edges, weight, density)


@op(aten._histogramdd_from_bin_tensors)
def _aten__histogramdd_from_bin_tensors(self, bins, *, weight=None, density=False):
  points = _points("torch.histogramdd", self, len(bins))
  return _count(points, bins, weight, density)
