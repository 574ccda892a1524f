"""Reductions and scans: sums, extrema, statistics, norms, order statistics.

A `dim` may be negative, and 0 or -1 for a 0-d tensor; no `dim`, or an empty list,
means all. Integers are summed in int64, half precision in float32. Equal extrema give
the first index, and the last one in running extrema, as in torch on the CPU.
"""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax.core import grad_mode, mappings
from torchax.core.stable_sort import sort_with_positions
from torchax.core.static_values import StaticValue
from torchax.errors import TracedStateError
from torchax.ops.builtin import op
from torchax.ops.jaten import _numbers, _on_host
from torchax.ops.jaten._arguments import dim_of, require_no_bool
from torchax.ops.jaten._extrema import highest, lowest
from torchax.ops.jaten.arithmetic import quotient
from torchax.ops.promotion import int64, is_exact, promote, to_float
from torchax.registry.names import aten, prims


def _axes(array, dim) -> tuple[int, ...]:
  """Return the axes of `dim` as sorted non-negative integers."""
  dims = (dim,) if isinstance(dim, int) else dim
  if not dims:
    return tuple(range(array.ndim))
  axes = sorted(dim_of(d, array.ndim) for d in dims)
  return tuple(axes) if array.ndim else ()


def _to_sum_dtype(array, dtype):
  """Convert the array to the dtype of its sums and products."""
  if dtype is not None:
    return array.astype(mappings.t2j_dtype(dtype))
  return array.astype(int64()) if is_exact(array) else array


def _widen(array):
  """Convert half precision to float32; reductions round once at the end."""
  wide = jnp.promote_types(array.dtype, jnp.float32)
  return array if is_exact(array) else array.astype(wide)


# --- Sums ---------------------------------------------------------------------------


def _sum(values, axes, keepdim):
  """Sum; complex numbers by parts, because XLA's CPU libraries sum real ones."""
  if jnp.iscomplexobj(values):
    parts = [
      jnp.sum(part, axes, keepdims=keepdim) for part in (values.real, values.imag)
    ]
    return lax.complex(*parts)
  return jnp.sum(values, axes, keepdims=keepdim)


@op(aten.sum)
def _aten_sum(self, dim=None, keepdim=False, dtype=None):
  terms = _to_sum_dtype(self, dtype)
  return _sum(_widen(terms), _axes(self, dim), keepdim).astype(terms.dtype)


@op(aten.nansum)
def _aten_nansum(self, dim=None, keepdim=False, dtype=None):
  terms = self if is_exact(self) else jnp.where(jnp.isnan(self), 0, self)
  return _aten_sum(terms, dim, keepdim, dtype)


def _mean(values, axes, keepdim):
  """Return the mean; that of equal numbers is exact, unlike with `jnp.mean`."""
  count = math.prod(values.shape[axis] for axis in axes)
  return quotient(_sum(values, axes, keepdim), count)


@op(aten.mean)
def _aten_mean(self, dim=None, keepdim=False, dtype=None):
  if dtype is not None:
    self = self.astype(mappings.t2j_dtype(dtype))
  return _mean(_widen(self), _axes(self, dim), keepdim).astype(self.dtype)


@op(aten.prod)
def _aten_prod(self, dim=None, keepdim=False, dtype=None):
  factors = _to_sum_dtype(self, dtype)
  product = jnp.prod(_widen(factors), axis=_axes(self, dim), keepdims=keepdim)
  return product.astype(factors.dtype)


@op(aten.trace)
def _aten_trace(self):
  return _aten_sum(jnp.diagonal(self))


@op(aten.count_nonzero)
def _aten_count_nonzero(self, dim=None):
  return jnp.sum(self != 0, axis=_axes(self, dim), dtype=int64())


@op(aten.logsumexp)
def _aten_logsumexp(self, dim, keepdim=False):
  values = to_float(self)
  total = jax.scipy.special.logsumexp(
    _widen(values), axis=_axes(self, dim), keepdims=keepdim
  )
  return total.astype(values.dtype)


# --- Truth --------------------------------------------------------------------------


def _truth(reduce, self, dim, keepdim):
  # torch keeps uint8, its former bool; an empty list of dims reduces nothing.
  axes = () if dim == () else _axes(self, dim)
  truth = reduce(self != 0, axis=axes, keepdims=keepdim)
  return truth.astype(jnp.uint8) if self.dtype == jnp.uint8 else truth


@op(aten.any, on_host=_on_host.truth(np.any))
def _aten_any(self, dim=None, keepdim=False):
  return _truth(jnp.any, self, dim, keepdim)


@op(aten.all, on_host=_on_host.truth(np.all))
def _aten_all(self, dim=None, keepdim=False):
  return _truth(jnp.all, self, dim, keepdim)


@op(aten._is_any_true)
def _aten__is_any_true(self):
  return jnp.any(self)


@op(aten._is_all_true, compiled=False)
def _aten__is_all_true(self):
  """Reduce with `all`; while tracing return True.

  torch calls it only in checks that raise on False, such as in `torch.distributions`.
  A traced value is unknown, so these checks pass, as they do under `torch.compile`.
  """
  if not isinstance(self, jax.core.Tracer):
    return jnp.all(self)
  with jax.ensure_compile_time_eval():
    return jnp.ones((), bool)


def _python_bool(name: str, array: jax.Array) -> bool:
  """Convert an array to the Python bool that torch returns.

  Raises:
    TracedStateError: the array is a tracer.
  """
  if isinstance(array, jax.core.Tracer):
    raise TracedStateError(
      f"torch.{name} returns a Python bool, but its tensors are being traced by a JAX "
      "transformation and have no values yet. Compare with tensors: "
      "`(x == y).all()`, `torch.isclose(x, y).all()`."
    )
  return bool(array)


@op(aten.equal, compiled=False)
def _aten_equal(self, other):
  if self.shape != other.shape:
    return False
  return _python_bool("equal", jnp.all(jnp.equal(*promote(self, other))))


@op(aten.allclose, compiled=False)
def _aten_allclose(self, other, rtol=1e-05, atol=1e-08, equal_nan=False):
  if self.dtype != other.dtype:
    raise RuntimeError(
      f"allclose expects operands of one dtype, but got {self.dtype} and {other.dtype}."
    )
  are_close = jnp.allclose(self, other, rtol=rtol, atol=atol, equal_nan=equal_nan)
  if grad_mode.runs_formula() and isinstance(are_close, jax.core.Tracer):
    # torch's formula for complex singular vectors raises if the loss depends on their
    # phase. A trace cannot tell; JAX's own rule has no such check.
    return True
  return _python_bool("allclose", are_close)


# --- Extrema ------------------------------------------------------------------------


@op(aten.amax)
def _aten_amax(self, dim=(), keepdim=False):
  return highest(self, _axes(self, dim), keepdim)


@op(aten.amin)
def _aten_amin(self, dim=(), keepdim=False):
  return lowest(self, _axes(self, dim), keepdim)


@op(aten.aminmax)
def _aten_aminmax(self, dim=None, keepdim=False):
  return _aten_amin(self, dim, keepdim), _aten_amax(self, dim, keepdim)


def _arg_extremum(reduce, self, dim, keepdim):
  """Return the index of the first extremum, or of the first NaN.

  The index that JAX returns for several NaN depends on the device.
  """
  if self.ndim == 0:
    return jnp.zeros((), int64())
  values = lax.stop_gradient(self)
  if dim is None:
    values = values.reshape(-1)
  axis = 0 if dim is None else _axes(self, dim)[0]
  is_found = (values == reduce(values, axis, keepdims=True)) | (values != values)
  indices = lax.broadcasted_iota(int64(), values.shape, axis)
  first = jnp.min(jnp.where(is_found, indices, jnp.iinfo(int64()).max), axis)
  if not keepdim:
    return first
  return jnp.expand_dims(first, tuple(range(self.ndim)) if dim is None else axis)


@op(aten.argmax, index_results=(0,))
def _aten_argmax(self, dim=None, keepdim=False):
  require_no_bool("argmax()", self)
  return _arg_extremum(highest, self, dim, keepdim)


@op(aten.argmin, index_results=(0,))
def _aten_argmin(self, dim=None, keepdim=False):
  require_no_bool("argmin()", self)
  return _arg_extremum(lowest, self, dim, keepdim)


def _extremum_and_index(reduce, self, dim, keepdim):
  """Return the extremum or, with `dim`, the extremum of each slice and its index."""
  if dim is None:
    return reduce(self)
  indices = _arg_extremum(reduce, self, dim, keepdim)
  return reduce(self, _axes(self, dim), keepdim), indices


@op(aten.max.default, aten.max.dim, index_results=(1,))
def _aten_max(self, dim=None, keepdim=False):
  return _extremum_and_index(highest, self, dim, keepdim)


@op(aten.min.default, aten.min.dim, index_results=(1,))
def _aten_min(self, dim=None, keepdim=False):
  return _extremum_and_index(lowest, self, dim, keepdim)


@op(aten.max.other)
def _aten_max_other(self, other):
  return jnp.maximum(*promote(self, other))


@op(aten.min.other)
def _aten_min_other(self, other):
  return jnp.minimum(*promote(self, other))


# --- Moments ------------------------------------------------------------------------


def _variance_and_mean(self, dim, correction, keepdim):
  """Compute variance and mean in two passes, in float32 at least.

  The variance of complex numbers is real.
  """
  if is_exact(self):
    raise NotImplementedError(
      "var and std expect a floating-point or complex tensor, but got "
      f"{self.dtype}. Convert it with `.float()`."
    )
  axes = _axes(self, dim)
  values = _widen(self)
  mean = _mean(values, axes, keepdim=True)
  deviation = values - mean
  squares = jnp.real(deviation * jnp.conj(deviation))
  count = math.prod(self.shape[axis] for axis in axes)
  correction = 1 if correction is None else correction
  if isinstance(count, int) and count <= correction:
    warnings.warn(
      "var and std: degrees of freedom is <= 0. Correction should be strictly less "
      f"than the number of reduced elements, but got {correction} and {count}.",
      stacklevel=2,
    )
  freedom = jnp.maximum(count - correction, 0)
  total = jnp.sum(squares, axis=axes, keepdims=keepdim)
  variance = total / jnp.asarray(freedom, total.dtype)
  return variance, mean if keepdim else jnp.squeeze(mean, axes)


def _real_dtype(dtype):
  return jnp.finfo(dtype).dtype


@op(aten.var.correction, static=("correction",))
def _aten_var(self, dim=None, correction=None, keepdim=False):
  variance, _ = _variance_and_mean(self, dim, correction, keepdim)
  return variance.astype(_real_dtype(self.dtype))


@op(prims.var)
def _prims_var(inp, dims, correction=1.0, output_dtype=None):
  variance = _aten_var(inp, dims, correction)
  return variance.astype(mappings.t2j_dtype(output_dtype) or variance.dtype)


@op(aten.var_mean.correction, static=("correction",))
def _aten_var_mean_correction(self, dim=None, correction=None, keepdim=False):
  variance, mean = _variance_and_mean(self, dim, correction, keepdim)
  return variance.astype(_real_dtype(self.dtype)), mean.astype(self.dtype)


@op(aten.std.correction, static=("correction",))
def _aten_std(self, dim=None, correction=None, keepdim=False):
  variance, _ = _variance_and_mean(self, dim, correction, keepdim)
  return jnp.sqrt(variance).astype(_real_dtype(self.dtype))


@op(aten.std_mean.correction, static=("correction",))
def _aten_std_mean_correction(self, dim=None, correction=None, keepdim=False):
  variance, mean = _variance_and_mean(self, dim, correction, keepdim)
  return jnp.sqrt(variance).astype(_real_dtype(self.dtype)), mean.astype(self.dtype)


# --- Norms --------------------------------------------------------------------------


def norm_of_magnitudes(magnitudes, ord, axes, keepdim):
  """Return the vector norm of non-negative numbers; `ord` may be prepared."""
  if isinstance(ord, tuple):
    pass
  elif math.isinf(ord):
    return (highest if ord > 0 else lowest)(magnitudes, axes, keepdim)
  if ord == 0:
    nonzero = (magnitudes != 0).astype(magnitudes.dtype)
    return jnp.sum(nonzero, axis=axes, keepdims=keepdim)
  if ord == 1:
    return jnp.sum(magnitudes, axis=axes, keepdims=keepdim)
  if ord == 2:
    return jnp.sqrt(jnp.sum(jnp.square(magnitudes), axis=axes, keepdims=keepdim))
  order, inverse = _numbers.parts(ord)
  return jnp.sum(magnitudes**order, axis=axes, keepdims=keepdim) ** inverse


@op(aten.linalg_vector_norm, static=("ord",), prepare=_numbers.norm_order("ord"))
def _aten_linalg_vector_norm(self, ord=2, dim=None, keepdim=False, dtype=None):
  if dtype is not None:
    self = self.astype(mappings.t2j_dtype(dtype))
  norm = norm_of_magnitudes(jnp.abs(_widen(self)), ord, _axes(self, dim), keepdim)
  return norm.astype(_real_dtype(self.dtype))


@op(aten.norm, static=("p",), prepare=_numbers.norm_order("p"))
def _aten_norm(self, p=2, dim=None, keepdim=False, dtype=None):
  return _aten_linalg_vector_norm(self, 2 if p is None else p, dim, keepdim, dtype)


@op(aten.dist, static=("p",), prepare=_numbers.norm_order("p"))
def _aten_dist(self, other, p=2):
  left, right = promote(self, other)
  require_no_bool("dist, by its subtraction,", self, other)
  return _aten_linalg_vector_norm(left - right, p)


# torch avoids a division by zero: aten/src/ATen/native/cpu/RenormKernel.cpp.
RENORM_MARGIN = 1e-7

_prepare_p = _numbers.norm_order("p")


def _prepare_renorm(arguments: dict) -> None:
  """Keep invalid numbers static, so that torch's own checks see them."""
  p, maxnorm = arguments["p"], arguments["maxnorm"]
  if not p > 0 or not maxnorm >= 0:
    arguments["p"], arguments["maxnorm"] = StaticValue(p), StaticValue(maxnorm)
  else:
    _prepare_p(arguments)


@op(aten.renorm, static=("p", "maxnorm"), prepare=_prepare_renorm)
def _aten_renorm(self, p, dim, maxnorm):
  """Scale slices along `dim` whose norm exceeds `maxnorm` down to it."""
  wide = _widen(self)
  (kept_axis,) = _axes(self, dim)
  axes = tuple(axis for axis in range(self.ndim) if axis != kept_axis)
  norms = norm_of_magnitudes(jnp.abs(wide), p, axes, True)
  factors = jnp.where(norms > maxnorm, maxnorm / (norms + RENORM_MARGIN), 1)
  return (wide * factors.astype(norms.dtype)).astype(self.dtype)


# --- Scans --------------------------------------------------------------------------


def _scan(scan, array, dim):
  """Return `scan(array, axis)`; a 0-d tensor is its own scan."""
  axes = _axes(array, dim)
  if array.ndim == 0:
    return array
  return scan(_widen(array), axes[0]).astype(array.dtype)


@op(aten.cumsum)
def _aten_cumsum(self, dim, dtype=None):
  return _scan(jnp.cumsum, _to_sum_dtype(self, dtype), dim)


@op(aten.cumprod)
def _aten_cumprod(self, dim, dtype=None):
  return _scan(jnp.cumprod, _to_sum_dtype(self, dtype), dim)


@op(aten.logcumsumexp, aten._logcumsumexp)
def _aten_logcumsumexp(self, dim):
  return _scan(lax.cumlogsumexp, self, dim)


def _running_extremum(scan, self, dim):
  """Return running extrema and the last index of each; NaN wins."""
  axes = _axes(self, dim)
  if self.ndim == 0:
    return self, jnp.zeros((), int64())
  if self.dtype == jnp.bool_:  # JAX does not scan bools
    extrema, positions = _running_extremum(scan, self.astype(jnp.int8), dim)
    return extrema.astype(jnp.bool_), positions
  extrema = scan(self, axis=axes[0])
  positions = lax.broadcasted_iota(int64(), self.shape, axes[0])
  attains = self == extrema
  if not is_exact(self):
    attains |= jnp.isnan(self)
  return extrema, lax.cummax(jnp.where(attains, positions, 0), axis=axes[0])


@op(aten.cummax, index_results=(1,))
def _aten_cummax(self, dim):
  return _running_extremum(lax.cummax, self, dim)


@op(aten.cummin, index_results=(1,))
def _aten_cummin(self, dim):
  return _running_extremum(lax.cummin, self, dim)


# --- Order statistics ---------------------------------------------------------------


def _pick(arrays, rank, axis, keepdim):
  """Return the elements at `rank`, an integer or one per slice, of sorted arrays."""
  picked = [
    lax.dynamic_index_in_dim(array, rank, axis)
    if jnp.ndim(rank) == 0
    else jnp.take_along_axis(array, rank, axis)
    for array in arrays
  ]
  return tuple(p if keepdim else jnp.squeeze(p, axis) for p in picked)


def _order_statistic(self, dim, keepdim, rank_of):
  """Return the element of rank `rank_of(array, axis)` of each slice, and its index."""
  array, axes = jnp.atleast_1d(self), _axes(self, dim)
  axis = axes[0] if axes else 0
  if not array.shape[axis]:
    raise IndexError("median(): Expected reduction dim to have non-zero size.")
  values, positions = sort_with_positions(array, axis)
  ascending = values, positions.astype(int64())
  keepdim = keepdim and self.ndim > 0
  return _pick(ascending, rank_of(ascending[0], axis), axis, keepdim)


def _median_rank(values, axis):
  """Return the rank of the lower median; with NaN in a slice, of its first NaN."""
  size = values.shape[axis]
  middle = (size - 1) // 2
  if is_exact(values):
    return middle
  numbers = jnp.sum(~jnp.isnan(values), axis=axis, keepdims=True)
  return jnp.where(numbers < size, numbers, middle)


def _nanmedian_rank(values, axis):
  if is_exact(values):
    return _median_rank(values, axis)
  numbers = jnp.sum(~jnp.isnan(values), axis=axis, keepdims=True)
  return jnp.maximum(numbers - 1, 0) // 2


def _median(self, dim, keepdim, rank_of):
  if dim is not None:
    return _order_statistic(self, dim, keepdim, rank_of)
  if self.size == 0:
    return jnp.full((), math.nan, self.dtype)
  return _order_statistic(jnp.ravel(self), 0, False, rank_of)[0]


@op(aten.median, index_results=(1,))
def _aten_median(self, dim=None, keepdim=False):
  return _median(self, dim, keepdim, _median_rank)


@op(aten.nanmedian, index_results=(1,))
def _aten_nanmedian(self, dim=None, keepdim=False):
  return _median(self, dim, keepdim, _nanmedian_rank)


def _check_kthvalue(self, k, dim=-1, keepdim=False):
  size = self.shape[dim] if self.ndim else 1
  if not 1 <= k <= size:
    raise RuntimeError(
      f"kthvalue(): selected number k={k} out of range for dimension {dim} of size "
      f"{size}."
    )


@op(aten.kthvalue, index_results=(1,), check=_check_kthvalue, dynamic=("k",))
def kthvalue(self, k, dim=-1, keepdim=False):
  """Return the k-th smallest element of each slice, k from 1, and its index."""
  return _order_statistic(self, dim, keepdim, lambda values, axis: k - 1)


@op(aten.mode, index_results=(1,))
def _aten_mode(self, dim=-1, keepdim=False):
  """Return the most frequent value, the smallest if tied, and its last index.

  Equal values are neighbours once sorted: the mode ends the longest run.
  """

  def end_of_longest_run(values, axis):
    positions = lax.broadcasted_iota(int64(), values.shape, axis)
    previous = jnp.roll(values, 1, axis)
    starts = (values != previous) | (positions == 0)
    run_start = lax.cummax(jnp.where(starts, positions, 0), axis=axis)
    return jnp.argmax(positions - run_start, axis=axis, keepdims=True)

  return _order_statistic(self, dim, keepdim, end_of_longest_run)
