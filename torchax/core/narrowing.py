"""What 64-bit types become while JAX's x64 mode is off, and what is said about it.

int64, uint64, float64 and complex128 are stored 32 bits wide then. Integers keep their
values or raise `OverflowError`, wherever a value is known on the host; floats lose
digits, which a `NarrowingWarning` says once for each dtype. Results that overflow on
the device wrap as 32-bit integers do.
"""

from typing import Any

import jax
import numpy as np
import torch

from torchax.compat import user_code
from torchax.core import host_memory
from torchax.errors import NarrowingWarning

REMEDY = (
  '`jax.config.update("jax_enable_x64", True)` before the first tensor is made, or '
  "`torchax.enable_accuracy_mode()`"
)
INT32, UINT32 = np.iinfo(np.int32), np.iinfo(np.uint32)
_warned: set[torch.dtype] = set()
# JAX's annotations lack its flags.
_config: Any = jax.config


def is_on() -> bool:
  """True while 64-bit types are stored in 32 bits."""
  return not _config.jax_enable_x64


def narrow(tensor: torch.Tensor, dtype: np.dtype) -> np.ndarray:
  """The numbers of a 64-bit CPU tensor in 32 bits.

  Args:
    tensor: of any shape; int64, uint64, float64 or complex128.
    dtype: the 32-bit form of its dtype.

  Raises:
    OverflowError: an integer that does not fit.
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
  """The error for an integer that 32 bits cannot hold."""
  return OverflowError(
    f"{what} does not fit in {np.dtype(dtype)}, which holds torch's 64-bit integers "
    f"while JAX's x64 mode is off. Call {REMEDY}."
  )


def check_integer(value: int, dtype) -> None:
  """Raises OverflowError for a Python integer that the 32-bit `dtype` cannot hold.

  With x64, and for narrower dtypes, torch's own rules hold.
  """
  if is_on() and dtype in (INT32.dtype, UINT32.dtype):
    limits = np.iinfo(dtype)
    if not limits.min <= value <= limits.max:
      raise overflow(f"The number {value}", dtype)


def become_floats(numbers: list[int], values) -> bool:
  """Whether integers too large for 32 bits can be floats instead.

  Args:
    numbers: integers among the arguments of an operation.
    values: all its arguments. Beside a floating-point array or dtype, an integer
      becomes a float of the result in any case.

  Raises:
    OverflowError: the arguments are integers, so that a number would be cut.
  """
  dtypes = [t for value in jax.tree.leaves(list(values)) for t in _dtypes_of(value)]
  if not dtypes or not is_on():
    return False
  if any(jax.numpy.issubdtype(dtype, np.inexact) for dtype in dtypes):
    return True
  stored = UINT32.dtype if all(t == UINT32.dtype for t in dtypes) else INT32.dtype
  for number in numbers:
    check_integer(number, stored)
  return False


def _dtypes_of(value) -> list:
  if isinstance(value, torch.dtype):
    return [np.float32 if value.is_floating_point or value.is_complex else np.int32]
  if not isinstance(value, jax.Array):
    return []
  # A number decides by being a float, not by being an integer.
  is_number = value.weak_type and jax.numpy.issubdtype(value.dtype, np.integer)
  return [] if is_number else [value.dtype]


def warn_once(dtype: torch.dtype) -> None:
  """Says that a float64 or complex128 will be 32 bits wide; once for each dtype."""
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
