"""Half precision as torch computes it: in float32, rounded once at the end.

XLA fuses the conversions with the arithmetic between them, so they cost no memory.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from torchax.ops.promotion import result_dtype

HALVES = frozenset({jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)})


def is_tensor(value) -> bool:
  """An array that stands for a tensor, not for a Python number or a dtype."""
  return hasattr(value, "shape") and not getattr(value, "weak_type", False)


def widen(value):
  """Half-precision arrays as float32; everything else as it is."""
  if is_tensor(value) and value.dtype in HALVES:
    return value.astype(jnp.float32)
  return value


def in_opmath(lowering: Callable) -> Callable:
  """Makes a floating-point lowering compute halves in float32.

  Its results come back in the promoted dtype of its tensors.

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


def expand_sizes(values: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
  """One value for each of `rank` spatial dimensions: torch accepts one for all."""
  if isinstance(values, int):
    return (values,) * rank
  return tuple(values) * rank if len(values) == 1 else tuple(values)
