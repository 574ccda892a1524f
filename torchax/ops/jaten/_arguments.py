"""Sizes, dimensions and dtypes that torch refuses, in torch's words.

JAX says something else, or takes them. Sizes that are symbols of an export pass.
"""

import jax
import jax.numpy as jnp
from jax import lax


def _is_negative(number) -> bool:
  return type(number) is int and number < 0


def require_size(size) -> None:
  """Raises RuntimeError for a size with a negative number."""
  if any(map(_is_negative, size)):
    negative = next(filter(_is_negative, size))
    raise RuntimeError(
      f"Trying to create tensor with negative dimension {negative}: {list(size)}"
    )


def require_count(name: str, number) -> None:
  """Raises RuntimeError for a negative number of rows, columns, … of that name."""
  if _is_negative(number):
    raise RuntimeError(f"{name} must be greater or equal to 0, got {number}")


def dim_of(dim: int, ndim: int) -> int:
  """A dimension as a number from 0; a tensor without dimensions has the one 0.

  Raises:
    IndexError: the tensor has no such dimension.
  """
  extent = max(ndim, 1)
  if not -extent <= dim < extent:
    raise IndexError(
      f"Dimension out of range (expected to be in range of [{-extent}, {extent - 1}], "
      f"but got {dim})"
    )
  return dim % extent


def require_one_dtype(name: str, *arrays) -> None:
  """Raises RuntimeError unless all arrays are of the dtype of the first one."""
  dtypes = [array.dtype for array in arrays]
  if any(dtype != dtypes[0] for dtype in dtypes):
    raise RuntimeError(
      f"{name}: expected operands to have the same dtype, but got "
      f"{' and '.join(map(str, dtypes))}. Convert one of them with `.to(...)`."
    )


def require_no_bool(name: str, *arrays) -> None:
  """Raises NotImplementedError, a RuntimeError, for bools."""
  if any(array.dtype == bool for array in arrays):
    raise NotImplementedError(
      f"{name} does not support bool input: convert it with `.int()`."
    )


def require_inexact(name: str, *arrays) -> None:
  """Raises RuntimeError unless there is a float or a complex number among them."""
  if not jnp.issubdtype(jnp.result_type(*arrays), jnp.inexact):
    dtypes = " and ".join(str(array.dtype) for array in arrays)
    raise RuntimeError(f"{name} expects floating-point numbers, but got {dtypes}.")


def factor_in(dtype, factor) -> jax.Array:
  """A factor in the dtype of what it multiplies; beside integers it is truncated.

  Raises:
    RuntimeError: it is complex, and the dtype is not.
  """
  if jnp.iscomplexobj(factor) and not jnp.issubdtype(dtype, jnp.complexfloating):
    raise RuntimeError(
      f"value cannot be converted to type {dtype} without overflow: a complex factor "
      "needs complex tensors. Take its `.real`, or convert a tensor."
    )
  return lax.convert_element_type(factor, dtype)


def expand_sizes(values: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
  """One value for each of `rank` spatial dimensions: torch accepts one for all."""
  if isinstance(values, int):
    return (values,) * rank
  return tuple(values) * rank if len(values) == 1 else tuple(values)
