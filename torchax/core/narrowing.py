"""Narrowing of 64-bit values to 32 bits while JAX's x64 mode is off.

int64, float64 and complex128 are then stored in 32 bits. Integers known on the
host keep their value or raise `OverflowError`. Floats lose digits, with one
`NarrowingWarning` per dtype. Results that overflow on the device wrap around as 32-bit
integers. `mappings.py` calls this when it copies data.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
import torch

from torchax.compat import jax_compat, user_code
from torchax.core import host_memory
from torchax.errors import NarrowingWarning

REMEDY = (
  '`jax.config.update("jax_enable_x64", True)` before the first tensor is made, or '
  "`torchax.enable_accuracy_mode()`"
)
INT32, UINT32 = np.iinfo(np.int32), np.iinfo(np.uint32)
_UINT64 = np.dtype(np.uint64)
# Types compare much faster than dtypes; each lowering in a trace looks for this one.
_Uint64 = type(_UINT64)
_warned: set[torch.dtype] = set()
# JAX's annotations lack its flags.
_config: Any = jax.config


def is_on() -> bool:
  """Return True while 64-bit types are stored in 32 bits."""
  return not _config.jax_enable_x64


def uint64_kept(values) -> contextlib.AbstractContextManager:
  """Return a context in which JAX computes uint64 in 64 bits if a value has this dtype.

  Args:
    values: arrays, tensors, dtypes and other objects; lists and tuples are looked into.
  """
  if is_on() and any(map(_is_uint64, flat(values))):
    return jax_compat.explicit_x64_dtypes("allow")
  return contextlib.nullcontext()


def _is_uint64(value) -> bool:
  dtype = getattr(value, "dtype", value)
  return dtype is torch.uint64 or type(dtype) is _Uint64


def flat(values: Iterable) -> Iterator:
  """Yield the elements of nested lists and tuples, faster than `jax.tree.leaves`."""
  for value in values:
    if isinstance(value, list | tuple):
      yield from flat(value)
    else:
      yield value


def narrow(tensor: torch.Tensor, dtype: np.dtype) -> np.ndarray:
  """Convert a 64-bit CPU tensor to a 32-bit numpy array.

  Args:
    tensor: an int64, float64 or complex128 tensor of any shape.
    dtype: the 32-bit form of its dtype.

  Raises:
    OverflowError: an integer does not fit.
  """
  if np.issubdtype(dtype, np.integer):
    _check_range(tensor, np.iinfo(dtype))
    return host_memory.array_of(tensor).astype(dtype)
  with np.errstate(over="call", call=_warn_of_infinity):
    return host_memory.array_of(tensor).astype(dtype)


def _check_range(tensor: torch.Tensor, limits: np.iinfo) -> None:
  if not tensor.numel():
    return
  values = host_memory.array_of(tensor)
  smallest, largest = int(values.min()), int(values.max())
  if smallest < limits.min or largest > limits.max:
    raise overflow(
      f"A {tensor.dtype} tensor with values from {smallest} to {largest}", limits.dtype
    )


def overflow(what: str, dtype) -> OverflowError:
  """Return the error for an integer that does not fit in 32 bits."""
  return OverflowError(
    f"{what} does not fit in {np.dtype(dtype)}, which holds torch's 64-bit integers "
    f"while JAX's x64 mode is off. Call {REMEDY}."
  )


def check_integer(value: int, dtype) -> None:
  """Raise OverflowError for a Python integer that the 32-bit `dtype` cannot hold.

  Do nothing in x64 mode or for narrower dtypes, where torch's own rules apply.
  """
  if is_on() and dtype in (INT32.dtype, UINT32.dtype):
    limits = np.iinfo(dtype)
    if not limits.min <= value <= limits.max:
      raise overflow(f"The number {value}", dtype)


def float_conversion(
  numbers: list[int], values, is_comparison: bool = False
) -> Callable[[int], float] | None:
  """Return the conversion of integers too large for 32 bits to floats, or None.

  Args:
    numbers: the integers among the arguments of an operation.
    values: all its arguments. With a floating-point array or dtype among them, type
      promotion converts integers to floats in any case.
    is_comparison: the operation compares; an integer that no element can reach is
      then as good as infinity.

  Raises:
    OverflowError: all arguments are integers, and a number does not fit.
  """
  dtypes = [t for value in jax.tree.leaves(list(values)) for t in _dtypes_of(value)]
  if not dtypes or not is_on():
    return None
  if any(jax.numpy.issubdtype(dtype, np.inexact) for dtype in dtypes):
    return float
  is_unsigned = all(t == dtypes[0] and t in (UINT32.dtype, _UINT64) for t in dtypes)
  if is_comparison and not is_unsigned:
    return _infinity
  stored = dtypes[0] if is_unsigned else INT32.dtype
  for number in numbers:
    check_integer(number, stored)
  return None


def _infinity(number: int) -> float:
  return math.copysign(math.inf, number)


def _dtypes_of(value) -> list:
  if isinstance(value, torch.dtype):
    if value is torch.uint64:
      return [_UINT64]
    return [np.float32 if value.is_floating_point or value.is_complex else np.int32]
  if not isinstance(value, jax.Array):
    return []
  # In type promotion a Python float counts; a Python integer does not.
  is_number = value.weak_type and jax.numpy.issubdtype(value.dtype, np.integer)
  return [] if is_number else [value.dtype]


def warn_once(dtype: torch.dtype) -> None:
  """Warn that float64 or complex128 becomes 32 bits wide, once per dtype."""
  if dtype in _warned:
    return
  _warned.add(dtype)
  user_code.warn(
    f"{dtype} becomes 32 bits wide: JAX's x64 mode is off. To keep 64 bits call "
    f"{REMEDY}. Said once for each dtype.",
    NarrowingWarning,
  )


def _warn_of_infinity(*_) -> None:
  user_code.warn(
    "A 64-bit floating-point value is too large for 32 bits and becomes infinite: "
    f"JAX's x64 mode is off. To keep 64 bits call {REMEDY}.",
    NarrowingWarning,
  )
