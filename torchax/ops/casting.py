"""Conversions of arrays between dtypes, with torch's rounding and saturation.

Lowerings call `cast`. Most conversions are XLA's own, with three exceptions: complex
numbers lose their imaginary part, small integers take the low bits of a wider one, and
8-bit floats saturate as torch's do (c10/util/Float8_e4m3fn.h, Float8_e8m0fnu.h).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torchax.core import mappings, narrowing
from torchax.core.error_messages import packed_error

_E4M3FN = jnp.dtype(jnp.float8_e4m3fn)
_E8M0FNU = jnp.dtype(jnp.float8_e8m0fnu)
_WITHOUT_MINUS_ZERO = frozenset(
  map(jnp.dtype, (jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz))
)
FLOAT8 = frozenset(
  jax_dtype
  for dtype, jax_dtype in mappings.TORCH_DTYPE_TO_JAX.items()
  if "float8" in str(dtype)
)
_SMALL_INTEGERS = frozenset(map(jnp.dtype, ("int8", "uint8", "int16", "uint16")))


def cast(array: jax.Array, dtype: Any) -> jax.Array:
  """Convert an array to another dtype, by torch's rules for `Tensor.to`.

  Args:
    array: an array of any shape and dtype, or a traced number.
    dtype: a JAX dtype.

  Returns:
    An array of the same shape.

  >>> cast(jnp.array([300.0, -1.0]), jnp.uint8)
  Array([ 44, 255], dtype=uint8)
  """
  dtype, source = jnp.dtype(dtype), jnp.result_type(array)
  if mappings.PACKED in (dtype, source) and dtype != source:
    raise packed_error("copy_kernel")
  if jnp.issubdtype(source, jnp.complexfloating):
    if dtype == jnp.bool_:
      return array != 0
    if not jnp.issubdtype(dtype, jnp.complexfloating):
      array = lax.real(array)
      source = jnp.result_type(array)
  if dtype in FLOAT8 and source != dtype:
    return _to_float8(array, dtype)
  if dtype in _SMALL_INTEGERS and jnp.issubdtype(source, jnp.floating):
    # XLA saturates at the bounds; torch keeps the low bits (c10/util/TypeCast.h).
    array = lax.convert_element_type(array, jnp.int32)
  return convert(array, dtype)


def convert(value, dtype) -> jax.Array:
  """Convert a value to another dtype; make a converted bool a true factor.

  XLA rewrites `convert(mask) * x` as `where(mask, x, 0)`, which is wrong for an
  infinite `x`. A `where` of ones and zeros is not rewritten.
  """
  if jnp.result_type(value) == jnp.bool_ and jnp.issubdtype(dtype, jnp.inexact):
    return jnp.where(value, jnp.ones((), dtype), jnp.zeros((), dtype))
  return lax.convert_element_type(value, dtype)


def _to_float8(array: jax.Array, dtype) -> jax.Array:
  wide = lax.convert_element_type(array, jnp.float32)
  if dtype == _E4M3FN:
    largest = float(jnp.finfo(dtype).max)
    wide = jnp.clip(wide, -largest, largest)
  if dtype == _E8M0FNU:
    return _to_power_of_two(jnp.abs(wide))
  if dtype in _WITHOUT_MINUS_ZERO:
    # These dtypes have no -0: its bits are NaN, but XLA may round to it. So numbers
    # that round to zero become +0 first.
    half = float(jnp.finfo(dtype).smallest_subnormal) / 2
    wide = jnp.where(jnp.abs(wide) <= half, 0, wide)
  return lax.convert_element_type(wide, dtype)


def _to_power_of_two(magnitude: jax.Array) -> jax.Array:
  """Round to float8_e8m0fnu, which has no sign and no zero: 0 is its smallest power."""
  # XLA may flush a subnormal float32 to zero, and convert zero to NaN.
  is_small = magnitude < jnp.finfo(jnp.float32).tiny
  nearest = lax.convert_element_type(jnp.where(is_small, 1, magnitude), _E8M0FNU)
  codes = lax.bitcast_convert_type(nearest, jnp.uint8)
  return lax.bitcast_convert_type(jnp.where(is_small, 0, codes), _E8M0FNU)


class _Limits(NamedTuple):
  """Range of the Python numbers that a dtype holds."""

  least: float
  most: float
  has_infinity: bool


@functools.cache
def _limits(dtype: torch.dtype) -> _Limits | None:
  """Return the limits of a dtype, or None if it can represent every number."""
  if dtype in (torch.bool, torch.float64, torch.complex128):
    return None
  if dtype.is_complex:
    dtype = dtype.to_real()
  if dtype.is_floating_point:
    infinity = np.asarray(np.inf).astype(mappings.t2j_dtype(dtype))
    has_infinity = bool(np.isinf(infinity))
    return _Limits(torch.finfo(dtype).min, torch.finfo(dtype).max, has_infinity)
  limits = torch.iinfo(dtype)
  return _Limits(limits.min or -limits.max, limits.max, False)


def require_fit(value, dtype: torch.dtype, elements: int | None = None) -> None:
  """Raise torch's error if a dtype cannot hold the number to be written.

  Unsigned integers accept -max to -1, modulo their range. Floats accept infinities if
  their dtype has any.

  Args:
    value: a number; any other value passes.
    dtype: dtype of the tensor that is written to.
    elements: number of elements to fill. A single element of 16 bits or less is
      rounded, as in torch.

  Raises:
    OverflowError: the integer may need 64 bits, and the dtype is stored in 32.
    RuntimeError: the number is out of range, or complex for a real dtype.
  """
  if type(value) is complex and not dtype.is_complex:
    if value.imag and dtype is not torch.bool:  # torch takes it as true
      raise RuntimeError(
        f"value cannot be converted to type {dtype} without overflow: expected a real "
        f"number, but got {value}. Take its `.real`, or a complex dtype."
      )
    value = value.real
  if type(value) not in (int, float):
    return
  limits = _limits(dtype)
  if limits is None or limits.least <= value <= limits.most:
    return
  is_float = dtype.is_floating_point or dtype.is_complex
  is_rounded = elements == 1 and dtype.itemsize <= 2
  if is_float and (value != value or is_rounded):
    return
  if limits.has_infinity and value in (math.inf, -math.inf):
    return
  if type(value) is int and dtype is torch.int32 and narrowing.is_on():
    raise narrowing.overflow(f"The number {value}", mappings.t2j_dtype(dtype))
  wider = "Use a wider dtype."
  if is_float:
    wider = f"Use `torch.finfo({dtype}).max`, an infinity, or a wider dtype."
  raise RuntimeError(
    f"value cannot be converted to type {dtype} without overflow: expected "
    f"{limits.least} to {limits.most}, but got {value}. {wider}"
  )
