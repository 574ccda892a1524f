"""Checks of sizes, dimensions and dtypes that raise torch's errors.

Lowerings call them where JAX accepts the argument or raises another error. They do
not check symbolic sizes, which occur during export.
"""

import jax
import jax.numpy as jnp
from jax import lax


def require_size(size) -> None:
  """Raise RuntimeError for a size with a negative number."""
  negative = [number for number in size if type(number) is int and number < 0]
  if negative:
    raise RuntimeError(
      f"Trying to create tensor with negative dimension {negative[0]}: {list(size)}"
    )


def dim_of(dim: int, ndim: int) -> int:
  """Return `dim` counted from the front; a 0-d tensor has dimension 0.

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
  """Raise RuntimeError unless all arrays have the same dtype."""
  dtypes = [array.dtype for array in arrays]
  if any(dtype != dtypes[0] for dtype in dtypes):
    raise RuntimeError(
      f"{name}: expected operands to have the same dtype, but got "
      f"{' and '.join(map(str, dtypes))}. Convert one of them with `.to(...)`."
    )


def require_no_bool(name: str, *arrays) -> None:
  """Raise NotImplementedError, a RuntimeError, if an array is bool."""
  if any(array.dtype == bool for array in arrays):
    raise NotImplementedError(
      f"{name} does not support bool input: convert it with `.int()`."
    )


def require_inexact(name: str, *arrays) -> None:
  """Raise RuntimeError unless the arrays promote to a float or complex dtype."""
  if not jnp.issubdtype(jnp.result_type(*arrays), jnp.inexact):
    dtypes = " and ".join(str(array.dtype) for array in arrays)
    raise RuntimeError(f"{name} expects floating-point numbers, but got {dtypes}.")


def require_factor(name: str, dtype, factor) -> None:
  """Raise RuntimeError for a factor of a higher kind than `dtype`, or for a bool."""
  kind = jnp.result_type(factor)
  if kind == jnp.bool_ and dtype != jnp.bool_:
    raise RuntimeError(
      f"Boolean {name} only supported for Boolean results, but the operands have dtype "
      f"{dtype}. Pass int({name})."
    )
  if not jnp.issubdtype(dtype, jnp.inexact) and jnp.issubdtype(kind, jnp.inexact):
    raise RuntimeError(
      f"For integral input tensors, argument {name} must not be a floating point "
      f"number, but the operands have dtype {dtype}."
    )


def factor_in(dtype, factor) -> jax.Array:
  """Convert a factor to the dtype of the array it multiplies; integers truncate it.

  Raises:
    RuntimeError: the factor is complex and `dtype` is not.
  """
  if jnp.iscomplexobj(factor) and not jnp.issubdtype(dtype, jnp.complexfloating):
    raise RuntimeError(
      f"value cannot be converted to type {dtype} without overflow: a complex factor "
      "needs complex tensors. Take its `.real`, or convert a tensor."
    )
  return lax.convert_element_type(factor, dtype)


def expand_sizes(values: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
  """Return one value per spatial dimension; torch also accepts one for all."""
  if isinstance(values, int):
    return (values,) * rank
  return tuple(values) * rank if len(values) == 1 else tuple(values)
