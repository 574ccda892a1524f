"""Moves and arithmetic of few elements, done by numpy while their shapes are new.

On the CPU the program of a new shape takes a thousand times as long to compile as the
work that it is for. Loops whose keys and values grow by one with every token have new
shapes all the time, and a short program has few others. numpy gives the same bits at
once (`ops/jaten/_on_host.py`). Shapes that keep coming are compiled, because programs
are called more quickly.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from torchax.compat import jax_compat
from torchax.core.bounded_cache import BoundedCache
from torchax.core.programs import Program
from torchax.devices import placement

# What a call on the host costs beside that of a program, and what it takes to compile
# one, in bytes that the host copies: about 30 us and 8 ms.
CALL, PROGRAM = 2**17, 2**25
# Of the arguments of a call; a program copies more in less time.
MOST_BYTES = 2**24
_MOST_SHAPES = 4096
_ArrayImpl = jax_compat.ArrayImpl
_shape = operator.attrgetter("shape")


def with_warmup(program: Program, on_host: Callable) -> Program:
  """A function that runs on the host until that has cost as much as compiling.

  Args:
    program: compiled, with `in_traces`.
    on_host: the same of the operands as numpy arrays; gives a numpy array, or None
      where it leaves them to the program.
  """
  # Cost so far on the host, by shapes; and the shapes that run as a program.
  known: BoundedCache[tuple, int] = BoundedCache(_MOST_SHAPES)
  compiled: set[tuple] = set()

  def run(*operands):
    try:
      shapes = tuple(map(_shape, operands))
    except AttributeError:  # a number, or the base of a view and its starts
      shapes = tuple(map(shape_of, operands))
    if shapes in compiled:
      return program(*operands)
    paid = known.get(shapes) or 0
    if paid < PROGRAM:
      result = _moved(on_host, operands)
      if result is not None:
        known[shapes] = paid + CALL + result.nbytes
        return result
    if len(compiled) >= _MOST_SHAPES:
      compiled.clear()
    compiled.add(shapes)
    return program(*operands)

  warmed: Any = run
  warmed.in_traces = program.in_traces
  return warmed


def taken(operands) -> tuple[list, SingleDeviceSharding | None] | None:
  """Operands as numpy arrays of the same memory, and where JAX would put results.

  Args:
    operands: arrays, numbers, and (array, starts) of views that move.

  Returns:
    The operands in their order and the CPU that arrays are committed to, if they are;
    None where the host has not got all of them.
  """
  if jax_compat.is_guarded() or not jax.sharding.get_abstract_mesh().empty:
    return None
  place, found = None, []
  for operand in operands:
    array, *starts = operand if type(operand) is tuple else (operand,)
    if type(array) is _ArrayImpl:
      if not (array.is_fully_addressable and jax_compat.is_of_host(array)):
        return None
      if len(array.devices()) > 1:
        return None
      if jax_compat.is_committed(array):
        if place is not None and place != array.sharding:
          return None
        place = array.sharding
    values = np.asarray(array)
    found.append((values, *starts) if starts else values)
  return found, place


def _moved(on_host: Callable, operands) -> jax.Array | None:
  """The result on the host; None where the program is to run."""
  given = taken(operands)
  if given is None:
    return None
  values, place = given
  try:
    result = on_host(values)
  except (ValueError, IndexError, TypeError, OverflowError):
    return None  # the program says what is wrong with them
  return None if result is None else placement.from_host(result, place)


def is_small(arguments) -> bool:
  """True where arguments, after views were taken, have at most `MOST_BYTES` in all."""
  return _bytes(arguments) <= MOST_BYTES


def _bytes(arguments) -> int:
  if isinstance(arguments, list | tuple):
    return sum(map(_bytes, arguments))
  return getattr(arguments, "nbytes", 0)


def shape_of(operand) -> tuple:
  """The shape of an array, a number, or the base of a view and its starts."""
  array = operand[0] if type(operand) is tuple else operand
  return getattr(array, "shape", ())
