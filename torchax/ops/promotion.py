"""Dtypes that torch computes in: promotion of operands, and half precision.

Lowerings call these functions with arrays, 0-d arrays and Python numbers. Conversions
with torch's rounding are in `casting.py`.
"""

import functools
from collections.abc import Callable
from typing import Any, Concatenate

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torchax.core import mappings
from torchax.ops.casting import FLOAT8, convert
from torchax.types import JaxCallable, JaxValue, P, R


def default_float() -> jnp.dtype:
  """Return torch's default dtype as a JAX dtype.

  >>> default_float()
  dtype('float32')
  """
  return mappings.t2j_dtype(torch.get_default_dtype())


def int64() -> jnp.dtype:
  """Return the JAX dtype of torch's int64, which is int32 without x64."""
  return mappings.t2j_dtype(torch.int64)


def dtype_or(dtype: torch.dtype | None, fallback: jnp.dtype) -> jnp.dtype:
  """Return the JAX dtype of a torch dtype; `fallback` for None."""
  return fallback if dtype is None else mappings.t2j_dtype(dtype)


_NUMBER_DTYPES = {
  bool: lambda: jnp.dtype(bool),
  int: int64,
  float: default_float,
  complex: lambda: jnp.promote_types(default_float(), jnp.complex64),
}


def _is_number(value) -> bool:
  return isinstance(value, bool | int | float | complex) or getattr(
    value, "weak_type", False
  )


def _number_dtype(value) -> jnp.dtype:
  if isinstance(value, bool | int | float | complex):
    return _NUMBER_DTYPES[type(value)]()
  if jnp.issubdtype(value.dtype, jnp.floating):
    return default_float()
  if jnp.issubdtype(value.dtype, jnp.complexfloating):
    return _NUMBER_DTYPES[complex]()
  return jnp.dtype(value.dtype)


def _category(dtype) -> int:
  """Rank a dtype by torch's order: none, bool, integer, floating, complex."""
  if dtype is None:
    return -1
  if dtype == jnp.bool_:
    return 0
  if jnp.issubdtype(dtype, jnp.complexfloating):
    return 3
  return 1 if jnp.issubdtype(dtype, jnp.integer) else 2


# torch has these dtypes for storage; it promotes them with floats only.
_WIDE_UNSIGNED = frozenset(map(jnp.dtype, ("uint16", "uint32", "uint64")))


def _join(left, right):
  """Return the common dtype of two operands of one group.

  Raises:
    RuntimeError: torch does not promote 8-bit floats. It promotes uint16, uint32 and
      uint64 with floats only.
  """
  if left == right:
    return left
  pair = {left, right}
  if pair & FLOAT8 or (pair & _WIDE_UNSIGNED and {*map(_category, pair)} != {1, 2}):
    raise RuntimeError(
      f"torch does not promote {left} with {right}. Convert one of the tensors with "
      "`.to(dtype)` first."
    )
  return jnp.promote_types(left, right)


def _combine(higher, lower):
  """Combine the dtypes of two groups: arrays before 0-d arrays before numbers.

  The lower group matters only if its category is higher.
  """
  if higher is None:
    return lower
  if lower is None or _category(higher) >= _category(lower):
    return higher
  if _category(higher) == 2:  # a complex number beside floats keeps their precision
    return _join(higher, jnp.dtype(jnp.complex64))
  return lower if _category(lower) == 3 else _join(higher, lower)


def result_dtype(*values: Any) -> jnp.dtype:
  """Return torch's promoted dtype of arrays, 0-d arrays and Python numbers.

  Arrays with dimensions decide first, then 0-d arrays, then numbers
  (https://docs.pytorch.org/docs/stable/tensor_attributes.html#torch-dtype).

  Args:
    *values: arrays, Python numbers, or None, which is ignored.

  >>> result_dtype(jnp.ones(3, jnp.bfloat16), 2.5)
  dtype(bfloat16)
  """
  groups: list[Any] = [None, None, None]
  for value in values:
    if value is None:
      continue
    if _is_number(value):
      index, dtype = 2, _number_dtype(value)
    else:
      index, dtype = (0 if jnp.ndim(value) else 1), jnp.dtype(value.dtype)
    previous = groups[index]
    groups[index] = dtype if previous is None else _join(previous, dtype)
  return _combine(_combine(groups[0], groups[1]), groups[2])


def promote(*values: Any) -> list[jax.Array]:
  """Convert the values to arrays of their `result_dtype`, without broadcasting.

  Args:
    *values: arrays of any shape and Python numbers.

  >>> promote(jnp.ones(2, jnp.int32), 0.5)
  [Array([1., 1.], dtype=float32), Array(0.5, dtype=float32)]
  """
  dtype = result_dtype(*values)
  return [convert(value, dtype) for value in values]


def promote_to_float(*values: Any) -> list[jax.Array]:
  """Convert the values as `promote`, but integers and bools to torch's default dtype.

  A number that a narrow integer dtype does not hold keeps its value.

  Args:
    *values: arrays of any shape and Python numbers.

  >>> promote_to_float(jnp.ones(1, jnp.uint8), -300)
  [Array([1.], dtype=float32), Array(-300., dtype=float32)]
  """
  dtype = result_dtype(*values)
  return [
    convert(value, default_float() if is_exact(dtype) else dtype) for value in values
  ]


def to_float(value: jax.Array) -> jax.Array:
  """Convert integers and bools to torch's default dtype; keep floats and complex.

  Args:
    value: array of any shape.

  Returns:
    An array of the same shape.

  >>> to_float(jnp.arange(3))
  Array([0., 1., 2.], dtype=float32)
  """
  if _category(jnp.dtype(value.dtype)) < 2:
    return convert(value, default_float())
  return value


def is_exact(value) -> bool:
  """Return True for integers and bools."""
  return not jnp.issubdtype(jnp.result_type(value), jnp.inexact)


# --- Half precision: in float32, rounded once at the end, as torch computes it -------
# XLA fuses the conversions with the arithmetic between them, so they cost no memory.

HALVES = frozenset({jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)})


def is_tensor(value) -> bool:
  """Return True for the array of a tensor, False for a number or a dtype."""
  return hasattr(value, "shape") and not getattr(value, "weak_type", False)


def widen(value):
  """Convert a half-precision array to float32; return any other value unchanged."""
  if is_tensor(value) and value.dtype in HALVES:
    return value.astype(jnp.float32)
  return value


def in_opmath(lowering: Callable) -> Callable:
  """Make a floating-point lowering compute half precision in float32.

  Its results are converted to the promoted dtype of its tensors.

  Raises:
    NotImplementedError: all tensors are integers, as in torch.
  """

  @functools.wraps(lowering)
  def widened(*args, **kwargs):
    dtype = result_dtype(*filter(is_tensor, (*args, *kwargs.values())))
    if not jnp.issubdtype(dtype, jnp.inexact):
      raise NotImplementedError(
        f"{lowering.__name__} is not implemented for {dtype}: convert the input to a "
        "floating-point dtype first."
      )
    wide_kwargs = {name: widen(value) for name, value in kwargs.items()}
    result = lowering(*map(widen, args), **wide_kwargs)
    return jax.tree.map(lambda array: array.astype(dtype), result)

  return widened


def with_exact_numbers(function):
  """Make an elementwise function promote its operands without rounding numbers.

  Beside half precision, numbers and 0-d arrays are float32, as in torch's CPU kernels.
  """

  @functools.wraps(function)
  def of_operands(*values):
    dtype = result_dtype(*values)
    has_number = not all(is_tensor(value) and value.ndim for value in values)
    if not (has_number and dtype in HALVES):
      return function(*(convert(value, dtype) for value in values))
    return function(*(convert(value, jnp.float32) for value in values)).astype(dtype)

  return of_operands


def in_float32(function):
  """Make a function compute half precision in float32 and round once.

  torch's CPU kernels do the same.
  """

  @functools.wraps(function)
  def with_wide_operands(*arrays):
    dtype = arrays[0].dtype
    if dtype not in HALVES:
      return function(*arrays)
    wide = [array.astype(jnp.float32) for array in arrays]
    return function(*wide).astype(dtype)

  return with_wide_operands


# --- Decorators of google/torchax ---------------------------------------------------


def promote_int_input(
  f: Callable[Concatenate[jax.Array, P], R],
) -> Callable[Concatenate[jax.Array, P], R]:
  """Make a lowering convert an integer first argument to floats.

  Args:
    f: function whose first argument is an array.

  Returns:
    A function with the same arguments.

  >>> promote_int_input(lambda x: x.dtype)(jnp.arange(3))
  dtype('float32')
  """

  @functools.wraps(f)
  def with_float_input(x: jax.Array, *args: P.args, **kwargs: P.kwargs) -> R:
    return f(to_float(x), *args, **kwargs)

  return with_float_input


def convert_dtype(use_default_dtype: bool = True) -> Callable:
  """Make a decorator that converts the argument `dtype` to a JAX dtype.

  Args:
    use_default_dtype: pass torch's default dtype if `dtype` is missing.

  >>> @convert_dtype()
  ... def zeros(n, *, dtype):
  ...   return jnp.zeros(n, dtype)
  >>> zeros(2, dtype=torch.bfloat16).dtype
  dtype(bfloat16)
  """

  def decorate(func: JaxCallable) -> JaxCallable:
    @functools.wraps(func)
    def with_jax_dtype(*args, dtype: torch.dtype | None = None, **kwargs):
      if dtype is None and use_default_dtype:
        dtype = torch.get_default_dtype()
      converted = mappings.t2j_dtype(dtype) if isinstance(dtype, torch.dtype) else dtype
      return func(*args, dtype=converted, **kwargs)

    return with_jax_dtype

  return decorate


def maybe_convert_constant_dtype(
  val: JaxValue | None, dtype: np.dtype | None
) -> JaxValue | None:
  """Convert a 0-d array or a number to the dtype; return any other value unchanged.

  Args:
    val: any value.
    dtype: JAX dtype; None returns `val` unchanged.

  >>> maybe_convert_constant_dtype(2, jnp.dtype("float32"))
  Array(2., dtype=float32)
  """
  if val is None or dtype is None:
    return val
  if isinstance(val, jax.Array) and val.ndim == 0:
    return lax.convert_element_type(val, dtype)
  if isinstance(val, bool | int | float | complex):
    return jnp.asarray(val, dtype)
  return val


def foreach_loop(
  seq: jax.Array,
  fn: Callable[[jax.Array, jax.Array], jax.Array],
  init_val: Any = 0.0,
) -> jax.Array:
  """Fold `fn(carry, element)` over the first axis of `seq`, in one `lax.fori_loop`.

  Args:
    seq: array of shape (n, …).
    fn: function `(carry, element) -> carry`.
    init_val: first carry.

  Returns:
    The last carry.

  >>> foreach_loop(jnp.arange(1.0, 5.0), jnp.multiply, 1.0)
  Array(24., dtype=float32)
  """
  return lax.fori_loop(0, len(seq), lambda i, carry: fn(carry, seq[i]), init_val)
