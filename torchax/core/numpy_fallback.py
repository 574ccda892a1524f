"""Fallback to numpy for small operations with new shapes on the CPU.

There, compiling a program for a new shape takes a thousand times as long as running it.
Loops whose keys and values grow by one per token always see new shapes. In a short
script most shapes are new. numpy gives the same bits at once
(`ops/jaten/_on_host.py`). Frequent shapes are compiled, because a program is quicker to
call.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from torchax.compat import jax_compat
from torchax.core.bounded_cache import BoundedCache
from torchax.core.program_limit import Program
from torchax.devices import placement

# Overhead of a call of numpy over one of a program, and the time to compile a program,
# in bytes that the host copies in that time: about 30 us and 8 ms.
CALL, PROGRAM = 2**17, 2**25
# Largest size of the arguments of a call; above it a program is faster.
MOST_BYTES = 2**24
_MOST_SHAPES = 4096
_shape = operator.attrgetter("shape")


def with_warmup(program: Program, on_host: Callable, cost: int = CALL) -> Program:
  """Wrap a program to run in numpy until that has cost as much as compiling.

  Args:
    program: the compiled function, with `in_traces`.
    on_host: the same function of a list of numpy arrays, typed keys and Python numbers.
      It returns numpy arrays, or None to run the program instead.
    cost: cost of a call of `on_host`, in bytes, as `CALL`.
  """
  # Cost so far in numpy, by shapes; and the shapes that run as a program.
  cost_by_shapes: BoundedCache[tuple, int] = BoundedCache(_MOST_SHAPES)
  compiled: set[tuple] = set()

  def run(*operands):
    try:
      shapes = tuple(map(_shape, operands))
    except AttributeError:  # a number, or the base of a view and its starts
      shapes = tuple(map(shape_of, operands))
    if shapes in compiled:
      return program(*operands)
    paid = cost_by_shapes.get(shapes) or 0
    if paid < PROGRAM:
      result = run_in_numpy(on_host, operands)
      if result is not None:
        cost_by_shapes[shapes] = paid + cost * _calls(result) + _bytes((result,))
        return result
    if len(compiled) >= _MOST_SHAPES:
      compiled.clear()
    compiled.add(shapes)
    return program(*operands)

  warmed: Any = run
  warmed.in_traces = program.in_traces
  return warmed


def as_numpy_operands(operands) -> tuple[list, Sharding | None] | None:
  """Return arrays as numpy arrays that share memory, and the result's sharding.

  Typed keys are returned as they are.

  Args:
    operands: arrays, numbers, and (array, starts) for views with starts as operands.

  Returns:
    The operands in order, and the CPU that arrays are committed to or None. None
    instead of the pair if an array is not on the host.
  """
  if jax_compat.is_guarded() or not jax.sharding.get_abstract_mesh().empty:
    return None
  committed, values = None, []
  for operand in operands:
    is_view = type(operand) is tuple
    array = operand[0] if is_view else operand
    if type(array) is jax_compat.ArrayImpl or isinstance(array, jax.Array):
      sharding = array.sharding
      if array.is_deleted() or not jax_compat.is_one_cpu(sharding):
        return None
      if jax_compat.is_committed(array):
        if committed is not None and committed != sharding:
          return None
        committed = sharding
      array = array if _is_kept(array) else np.asarray(array)
    values.append((array, *operand[1:]) if is_view else array)
  return values, committed


def _is_kept(array) -> bool:
  """Return True for a typed key, and an array with the type of a Python number."""
  if type(array) is jax_compat.ArrayImpl:
    return array.weak_type and not array.shape
  return jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)


def run_in_numpy(on_host: Callable, operands):
  """Return the results computed by numpy; None if the program must run."""
  prepared = as_numpy_operands(operands)
  if prepared is None:
    return None
  values, sharding = prepared
  try:
    result = on_host(values)
  except (ValueError, IndexError, TypeError, OverflowError):
    return None  # the program raises the proper error
  if type(result) is tuple:
    return tuple([placement.from_host(each, sharding) for each in result])
  return None if result is None else placement.from_host(result, sharding)


def is_small(arguments) -> bool:
  """Return True for arguments of at most `MOST_BYTES`, with views applied."""
  return _bytes(arguments) <= MOST_BYTES


def _bytes(arguments) -> int:
  total = 0
  for value in arguments:
    is_list = isinstance(value, list | tuple)
    total += _bytes(value) if is_list else getattr(value, "nbytes", 0)
  return total


def _calls(result) -> int:
  """Return how many calls of numpy there are for each kernel of the program.

  For a list, XLA compiles a kernel for each shape.
  """
  if type(result) is not tuple:
    return 1
  return len(result) // len({array.shape for array in result})


def shape_of(operand) -> tuple:
  """Return the shape of an array, a number, or the base in (base, starts)."""
  array = operand[0] if type(operand) is tuple else operand
  return getattr(array, "shape", ())
