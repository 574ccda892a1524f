"""Factories of tensors from sizes and numbers, and copies of tensors.

If `dtype` is None, the type of the number gives it, as in torch: bool, int64 or the
default dtype. `empty*` returns zeros, because an XLA buffer has no undefined contents.
JAX arrays have no strides, so `*_strided` and `*_permuted` use the size only. Random
factories are in `random.py`, `fill` is in `pointwise.py`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torchax.compat import jax_compat
from torchax.core import mappings, narrowing
from torchax.core.static_values import NUMBERS, StaticValue
from torchax.ops.builtin import Kind, op
from torchax.ops.casting import cast, require_fit
from torchax.ops.jaten import _on_host
from torchax.ops.jaten.arithmetic import float_power
from torchax.ops.promotion import default_float, dtype_or, result_dtype
from torchax.registry.names import aten
from torchax.tensor import Tensor


def _scalar(value, dtype):
  """Convert a Python number or traced scalar to a 0-d array of a JAX dtype.

  Raises:
    OverflowError: the integer needs JAX's x64 mode.
  """
  if isinstance(value, int):
    narrowing.check_integer(value, dtype)
    value = jax_compat.with_64_bits(np.asarray(value).astype(dtype))
  return cast(jnp.asarray(value), dtype)


def _zero_array(size, dtype):
  """Return zeros; float8_e8m0fnu lacks zero and gets its smallest number, as torch."""
  zero = jnp.zeros((), dtype) if dtype == mappings.PACKED else cast(0.0, dtype)
  return jnp.broadcast_to(zero, size)


def _vary_like(array, like):
  """Make a new array varying over the mesh axes over which `like` varies.

  Inside `shard_map` JAX requires it of the initial carry of a loop.
  """
  return jax_compat.match_varying_axes(array, like)[0]


# --- from a size -----------------------------------------------------------------


@op(aten.zeros, aten.empty, aten._efficientzerotensor, on_host=_on_host.constant(0))
def _zeros(size, *, dtype=None):
  return _zero_array(size, dtype_or(dtype, default_float()))


_aten_empty = _zeros


@op(aten.ones, on_host=_on_host.constant(1))
def _ones(size, *, dtype=None):
  return jnp.broadcast_to(cast(1.0, dtype_or(dtype, default_float())), size)


def _check_full(size, fill_value, *, dtype=None, **_ignored):
  if dtype is not None:
    require_fit(fill_value, dtype, math.prod(size))


def _check_full_like(self, fill_value, *, dtype=None, **_ignored):
  require_fit(fill_value, dtype or self.dtype, self.numel())


def _check_new_full(self, size, fill_value, *, dtype=None, **_ignored):
  require_fit(fill_value, dtype or self.dtype, math.prod(size))


@op(aten.full, check=_check_full)
def _full(size, fill_value, *, dtype=None):
  value = _scalar(fill_value, dtype_or(dtype, result_dtype(fill_value)))
  return jnp.broadcast_to(value, size)


@op(aten.empty_permuted)
def _aten_empty_permuted(size, physical_layout, *, dtype=None):
  return _zeros(size, dtype=dtype)


@op(aten.empty_strided)
def _aten_empty_strided(size, stride, *, dtype=None):
  return _zeros(size, dtype=dtype)


@op(aten.eye)
def _aten_eye(n, m=None, *, dtype=None):
  return jnp.eye(n, m, dtype=dtype_or(dtype, default_float()))


# --- like a tensor ---------------------------------------------------------------


@op(
  aten.zeros_like,
  aten.empty_like,
  overwrites=True,
  on_host=_on_host.constant_like(0),
)
def _aten_zeros_like(self, *, dtype=None):
  return _new_zeros(self, self.shape, dtype=dtype)


@op(aten.zero, on_host=_on_host.constant_like(0))
def _aten_zero(self):
  return _new_zeros(self, self.shape)


@op(aten.ones_like, on_host=_on_host.constant_like(1))
def _aten_ones_like(self, *, dtype=None):
  return _new_ones(self, self.shape, dtype=dtype)


@op(aten.full_like, check=_check_full_like, on_host=_on_host.full_like)
def _aten_full_like(self, fill_value, *, dtype=None):
  return _new_full(self, self.shape, fill_value, dtype=dtype)


@op(aten.new_zeros, aten.new_empty, on_host=_on_host.new_constant(0))
def _new_zeros(self, size, *, dtype=None):
  return _vary_like(_zero_array(size, dtype_or(dtype, self.dtype)), self)


_new_empty = _new_zeros


@op(aten.new_ones, on_host=_on_host.new_constant(1))
def _new_ones(self, size, *, dtype=None):
  return _vary_like(jnp.ones(size, dtype_or(dtype, self.dtype)), self)


@op(aten.new_full, check=_check_new_full)
def _new_full(self, size, fill_value, *, dtype=None):
  value = _scalar(fill_value, dtype_or(dtype, self.dtype))
  return _vary_like(jnp.broadcast_to(value, size), self)


@op(aten.new_empty_strided)
def _new_empty_strided(self, size, stride, *, dtype=None):
  return _new_zeros(self, size, dtype=dtype)


# --- sequences -------------------------------------------------------------------


_MAX_LENGTH = 2**63 - 1


def _arange_length(start, end, step) -> int:
  if not all(map(math.isfinite, (start, end, step))):
    raise RuntimeError(
      "arange expects finite numbers, but got an unsupported range: "
      f"{start} -> {end} by {step}."
    )
  if step == 0:
    raise RuntimeError("arange expects a step that is not zero, but got step=0.")
  if (end - start) * step < 0:
    raise RuntimeError(
      f"arange expects a step that leads from start to end, but got start={start}, "
      f"end={end} and step={step}."
    )
  length = math.ceil((end - start) / step)
  if length > _MAX_LENGTH:
    raise RuntimeError(
      f"arange from {start} to {end} by {step} has {length} elements: invalid size, "
      f"possible overflow? The maximum is {_MAX_LENGTH}."
    )
  return length


def _real_bound(value):
  """Convert a bool to an integer and a complex number to a float, as torch does."""
  if type(value) is complex:
    require_fit(value, torch.float64)
    return value.real
  return int(value) if type(value) is bool else value


def _arange_parameters(start, end, step, dtype) -> tuple:
  """Return (first value, step, length, JAX dtype) of an `arange`.

  A single bound is the end. `_prepare_arange` passes this tuple as `end`.
  """
  if end is None:
    start, end = 0, start
  if isinstance(end, tuple):
    return end
  start, end, step = map(_real_bound, (start, end, step))
  are_integers = all(isinstance(value, int) for value in (start, end, step))
  if dtype is None:
    dtype = torch.int64 if are_integers else torch.get_default_dtype()
  is_finite = all(map(math.isfinite, (start, end, step)))
  if dtype is torch.int64 and is_finite and step and not int(step):
    raise ValueError(f"arange of integers expects a nonzero step, but got step={step}.")
  if dtype is torch.int64 and is_finite:
    start, end, step = int(start), int(end), int(step)
  jax_dtype = mappings.t2j_dtype(dtype)
  length = _arange_length(start, end, step)
  if jnp.issubdtype(jax_dtype, jnp.integer):
    for value in (start, start + (length - 1) * step) if length else ():
      narrowing.check_integer(int(value), jax_dtype)
    start, step = int(start), int(step)
  return start, step, length, jax_dtype


def _float_range(start, step, length, jax_dtype):
  """Return `start + step * i`, computed in float32 or wider."""
  wide = jnp.promote_types(jax_dtype, jnp.float32)
  steps = lax.iota(wide, length)
  return cast(_scalar(start, wide) + _scalar(step, wide) * steps, jax_dtype)


_BOUNDS = ("start", "end", "step")


@op(aten.range.default, aten.range.step, static=_BOUNDS)
def _aten_range(start, end, step=1, *, dtype=None):
  """Count from start to end, inclusive if a step reaches it."""
  jax_dtype = dtype_or(dtype, default_float())
  length = _arange_length(start, end, step) if end != start else 0
  length += (end - start) % step == 0
  return _float_range(start, step, length, jax_dtype)


def _prepare_arange(given: dict) -> None:
  """Turn first value and step into operands; the length stays static."""
  bounds = [given.get(name, default) for name, default in zip(_BOUNDS, (0, None, 1))]
  if not all(type(value) in NUMBERS for value in bounds):
    return
  *numbers, length, jax_dtype = _arange_parameters(*bounds, given.get("dtype"))
  numbers = [
    StaticValue(n) if type(n) is int and not -(2**31) <= n < 2**31 else n
    for n in numbers
  ]
  given.update(dict.fromkeys({"start", "step", "dtype"} & given.keys()))
  given["end"] = (*numbers, StaticValue(length), StaticValue(jax_dtype))


def _arange_on_host(start=0, end=None, step=1, *, dtype=None):
  """Compute integer ranges in numpy; return None for other dtypes."""
  start, step, length, jax_dtype = _arange_parameters(start, end, step, dtype)
  is_supported = _on_host.full((length,), 0, jax_dtype) is not None
  if not (is_supported and jnp.issubdtype(jax_dtype, jnp.integer)):
    return None
  first, stride = (np.asarray(value).astype(jax_dtype) for value in (start, step))
  return first + stride * np.arange(length, dtype=jax_dtype)


@op(
  aten.arange.default,
  aten.arange.start,
  aten.arange.start_step,
  static=_BOUNDS,
  prepare=_prepare_arange,
  on_host=_arange_on_host,
)
def _aten_arange(start=0, end=None, step=1, *, dtype=None):
  """Count from start to end; a single positional argument is the end."""
  start, step, length, jax_dtype = _arange_parameters(start, end, step, dtype)
  if jnp.issubdtype(jax_dtype, jnp.integer):
    first, stride = (
      value.astype(jax_dtype)
      if isinstance(value, jax.Array)
      else np.asarray(value).astype(jax_dtype)
      for value in (start, step)
    )
    return first + stride * lax.iota(jax_dtype, length)
  return _float_range(start, step, length, jax_dtype)


def _equally_spaced(start, end, steps, dtype):
  """Return `steps` equally spaced values, exact at both ends."""
  wide = dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32
  wide = jnp.promote_types(wide, jnp.float32)
  start, end = (_scalar(value, wide) for value in (start, end))
  if steps < 2:
    return jnp.full((steps,), start)
  step = (end - start) / (steps - 1)
  index = jnp.arange(steps)
  from_start = start + step * index.astype(wide)
  from_end = end - step * (steps - 1 - index).astype(wide)
  return jnp.where(index < steps // 2, from_start, from_end)


def _spaced_dtype(dtype, *ends):
  is_complex = any(map(jnp.iscomplexobj, ends))
  complex_dtype = jnp.promote_types(default_float(), jnp.complex64)
  return dtype_or(dtype, complex_dtype if is_complex else default_float())


@op(aten.linspace)
def _aten_linspace(start, end, steps, *, dtype=None):
  jax_dtype = _spaced_dtype(dtype, start, end)
  return cast(_equally_spaced(start, end, steps, jax_dtype), jax_dtype)


@op(aten.logspace)
def _aten_logspace(start, end, steps, base=10.0, *, dtype=None):
  jax_dtype = _spaced_dtype(dtype, start, end)
  if jnp.issubdtype(jax_dtype, jnp.integer):  # torch truncates them too
    start, end = jnp.trunc(start), jnp.trunc(end)
  exponents = _equally_spaced(start, end, steps, jax_dtype)
  return cast(float_power(jnp.asarray(base, exponents.dtype), exponents), jax_dtype)


@op(
  aten.kaiser_window.default,
  aten.kaiser_window.periodic,
  aten.kaiser_window.beta,
  meta=False,  # torch's kernel for meta fails
)
def _aten_kaiser_window(window_length, periodic=True, beta=12.0, *, dtype=None):
  jax_dtype = dtype_or(dtype, default_float())
  if not jnp.issubdtype(jax_dtype, jnp.floating):
    raise RuntimeError(
      f"kaiser_window expects floating point dtypes, but got {jax_dtype}."
    )
  if window_length < 0:
    raise RuntimeError(
      f"kaiser_window expects a non-negative window_length, but got {window_length}."
    )
  if window_length < 2:
    return jnp.ones(window_length, jax_dtype)
  wide = jnp.promote_types(jax_dtype, jnp.float32)
  last = window_length - (not periodic)
  place = 2 * jnp.arange(window_length, dtype=wide) / last - 1
  width = beta * jnp.sqrt(1 - place * place)
  ratio = lax.bessel_i0e(width) / lax.bessel_i0e(jnp.asarray(beta, wide))
  return (ratio * jnp.exp(jnp.abs(width) - jnp.abs(beta))).astype(jax_dtype)


def _check_scalar_tensor(s, *, dtype=None, **_):
  require_fit(s, dtype or torch.get_default_dtype(), 1)


@op(aten.scalar_tensor, check=_check_scalar_tensor)
def _aten_scalar_tensor(s, *, dtype=None):
  """Return a 0-d array, of torch's default dtype even for an integer."""
  return _scalar(s, dtype_or(dtype, default_float()))


@op(aten.vander)
def _aten_vander(x, N=None, increasing=False):
  dtype = x.dtype
  if dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer):
    dtype = mappings.t2j_dtype(torch.int64)
  return jnp.vander(x.astype(dtype), N, increasing)


# --- triangles -------------------------------------------------------------------


def _past_diagonal(self, diagonal):
  """Return `column - row - diagonal` for each element of a matrix."""
  rows, columns = (lax.broadcasted_iota(jnp.int32, self.shape[-2:], n) for n in (0, 1))
  # Clip to the first diagonal outside the matrix: equal results, no overflow.
  limit = max(self.shape[-2:]) + 1
  return columns - rows - jnp.clip(diagonal, -limit, limit)


@op(aten.tril, dynamic=("diagonal",))
def _aten_tril(self, diagonal=0):
  if isinstance(diagonal, int):
    return jnp.tril(self, diagonal)
  zero = jnp.zeros((), self.dtype)
  return jnp.where(_past_diagonal(self, diagonal) <= 0, self, zero)


@op(aten.triu, dynamic=("diagonal",))
def _aten_triu(self, diagonal=0):
  if isinstance(diagonal, int):
    return jnp.triu(self, diagonal)
  zero = jnp.zeros((), self.dtype)
  return jnp.where(_past_diagonal(self, diagonal) >= 0, self, zero)


@op(aten.tril_indices)
def _aten_tril_indices(row, col, offset=0, *, dtype=torch.int64):
  indices = np.stack(np.tril_indices(row, offset, col))
  return jnp.asarray(indices, mappings.t2j_dtype(dtype or torch.int64))


@op(aten.triu_indices)
def _aten_triu_indices(row, col, offset=0, *, dtype=torch.int64):
  indices = np.stack(np.triu_indices(row, offset, col))
  return jnp.asarray(indices, mappings.t2j_dtype(dtype or torch.int64))


# --- copies ----------------------------------------------------------------------


@op(aten.clone, aten.lift_fresh, aten.lift_fresh_copy, on_host=np.array)
def _aten_clone(self):
  return self


@op(aten._to_copy, on_host=_on_host.to_copy)
def _aten__to_copy(self, *, dtype=None):
  return self if dtype is None else cast(self, mappings.t2j_dtype(dtype))


@op(aten.copy, overwrites=True, on_host=_on_host.copy)
def _aten_copy(self, src):
  """Convert `src` to the dtype of `self` and broadcast it to its shape."""
  return jnp.broadcast_to(cast(src, self.dtype), self.shape)


# --- Tangents of forward-mode differentiation ---------------------------------------
# A tangent needs the storage layout of its primal. If the two differ, torch allocates a
# new tangent.


def _storage_numel(tensor: torch.Tensor) -> int:
  """Return the number of elements that the storage of `tensor` has room for."""
  if isinstance(tensor, Tensor):
    return tensor._storage.read().nbytes // tensor.dtype.itemsize
  return tensor.untyped_storage().nbytes() // tensor.dtype.itemsize


@op(aten._has_same_storage_numel, kind=Kind.TENSORS)
def _aten_has_same_storage_numel(self, other):
  return _storage_numel(self) == _storage_numel(other)


@op(aten._new_zeros_with_same_feature_meta, kind=Kind.TENSORS)
def _aten_new_zeros_with_same_feature_meta(self, other, *, self_num_batch_dims=0):
  """Return zeros: batch dims of `self`, then the shape and layout of `other`."""
  batch = tuple(self.shape[:self_num_batch_dims])
  storage_numel = _storage_numel(other)
  if other.is_contiguous() and storage_numel == other.numel():
    return other.new_zeros(batch + tuple(other.shape))
  strides = [storage_numel * math.prod(batch[dim + 1 :]) for dim in range(len(batch))]
  flat = other.new_zeros(storage_numel * math.prod(batch))
  return flat.as_strided(
    batch + tuple(other.shape), [*strides, *other.stride()], other.storage_offset()
  )
