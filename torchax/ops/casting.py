"""Conversions of arrays between dtypes, with torch's rounding and saturation.

Most are XLA's own. What differs: complex numbers lose their imaginary part, small
integers take the low bits of a wider one, and 8-bit floats saturate as torch's do
(c10/util/Float8_e4m3fn.h, Float8_e8m0fnu.h).
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torchax.core import mappings, narrowing

_E4M3FN = jnp.dtype(jnp.float8_e4m3fn)
_E8M0FNU = jnp.dtype(jnp.float8_e8m0fnu)
_WITHOUT_MINUS_ZERO = frozenset(
  map(jnp.dtype, (jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz))
)
_FLOAT8 = frozenset(
  jnp.dtype(dtype)
  for dtype in (
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.float8_e4m3fnuz,
    jnp.float8_e5m2fnuz,
    jnp.float8_e8m0fnu,
  )
)
_SMALL_INTEGERS = frozenset(map(jnp.dtype, ("int8", "uint8", "int16", "uint16")))


def cast(array: jax.Array, dtype) -> jax.Array:
  """The array in another dtype, by torch's rules for `Tensor.to`.

  Args:
    array: of any shape and dtype, or a traced number.
    dtype: a JAX dtype.
  """
  dtype, source = jnp.dtype(dtype), jnp.result_type(array)
  if jnp.issubdtype(source, jnp.complexfloating):
    if dtype == jnp.bool_:
      return array != 0
    if not jnp.issubdtype(dtype, jnp.complexfloating):
      array = lax.real(array)
      source = jnp.result_type(array)
  if dtype in _FLOAT8 and source != dtype:
    return _to_float8(array, dtype)
  if dtype in _SMALL_INTEGERS and jnp.issubdtype(source, jnp.floating):
    # XLA saturates at the bounds; torch keeps the low bits (c10/util/TypeCast.h).
    array = lax.convert_element_type(array, jnp.int32)
  return convert(array, dtype)


def convert(value, dtype) -> jax.Array:
  """The value in another dtype, with False as a zero that counts.

  XLA makes `where(mask, x, 0)` of a converted mask times `x`, even for infinite `x`.
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
    # What rounds to zero: its bits with a sign are NaN, which XLA may take for -0.
    half = float(jnp.finfo(dtype).smallest_subnormal) / 2
    wide = jnp.where(jnp.abs(wide) <= half, 0, wide)
  return lax.convert_element_type(wide, dtype)


def _to_power_of_two(magnitude: jax.Array) -> jax.Array:
  """float8_e8m0fnu has no sign and no zero: the smallest power stands for zero."""
  # Below the normal float32 numbers XLA may take a number for zero, and that for NaN.
  is_small = magnitude < jnp.finfo(jnp.float32).tiny
  nearest = lax.convert_element_type(jnp.where(is_small, 1, magnitude), _E8M0FNU)
  codes = lax.bitcast_convert_type(nearest, jnp.uint8)
  return lax.bitcast_convert_type(jnp.where(is_small, 0, codes), _E8M0FNU)


# What torch calls int64 and uint64 is stored in these, without JAX's x64 mode.
_NARROWED = (torch.int32, torch.uint32)


class _Limits(NamedTuple):
  """What a dtype holds of Python's numbers: from the least to the most."""

  least: float
  most: float
  has_infinity: bool


@functools.cache
def _limits(dtype: torch.dtype) -> _Limits | None:
  """Those of a dtype; None where every number has a value in it."""
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
  """Raises as torch does where a number is written into a dtype that cannot hold it.

  Args:
    value: a number; others are not looked at.
    dtype: that it is written in.
    elements: how many are filled with it. A single one of 16 bits or less is rounded,
      as by torch.

  Raises:
    OverflowError: an integer that 64 bits may hold, where these are stored in 32.
    RuntimeError: out of range, or complex for a real dtype; unsigned integers take
      -max to -1 modulo their range, and floats infinities, if they have any.
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
  if type(value) is int and dtype in _NARROWED and narrowing.is_on():
    raise narrowing.overflow(f"The number {value}", mappings.t2j_dtype(dtype))
  wider = "Use a wider dtype."
  if is_float:
    wider = f"Use `torch.finfo({dtype}).max`, an infinity, or a wider dtype."
  raise RuntimeError(
    f"value cannot be converted to type {dtype} without overflow: expected "
    f"{limits.least} to {limits.most}, but got {value}. {wider}"
  )
