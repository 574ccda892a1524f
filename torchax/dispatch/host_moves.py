"""What only moves elements, done on the host while its shapes are new.

On the CPU the program of a new shape takes a thousand times as long to compile as the
copy that it is for, and a loop whose keys and values grow by one with every token has
new shapes all the time. numpy moves the elements at once, and what it gives has the
same bits. Shapes that keep coming are compiled: a program is called more quickly.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from torchax import _jax_compat
from torchax.core.bounded_cache import BoundedCache
from torchax.devices import placement
from torchax.dispatch.operands import shape_of

# What a call on the host costs beside that of a program, and what it takes to compile
# one, in bytes that the host copies: about 30 us and 8 ms.
CALL, PROGRAM = 2**17, 2**25
# Of the arguments of a call; a program copies more in less time.
MOST_BYTES = 2**24
_MOST_SHAPES = 4096
_ArrayImpl = _jax_compat.ArrayImpl


def until_often(program: Callable, on_host: Callable) -> Callable:
  """A program, and the same on the host until that has cost as much as compiling.

  Args:
    program: compiled, with `in_traces`.
    on_host: the same of the operands as numpy arrays; gives a numpy array, or None
      where it leaves them to the program.
  """
  # What the host was paid for shapes.
  known: BoundedCache[tuple, int] = BoundedCache(_MOST_SHAPES)

  def run(*operands):
    shapes = tuple([shape_of(operand) for operand in operands])
    paid = known.get(shapes) or 0
    if paid < PROGRAM:
      result = _moved(on_host, operands)
      if result is not None:
        known[shapes] = paid + CALL + result.nbytes
        return result
      known[shapes] = PROGRAM
    return program(*operands)

  run.in_traces = program.in_traces
  return run


def taken(operands) -> tuple[list, SingleDeviceSharding | None] | None:
  """Operands as numpy arrays of the same memory, and where JAX would put results.

  Args:
    operands: arrays, numbers, and (array, starts) of views that move.

  Returns:
    The operands in their order and the CPU that arrays are committed to, if they are;
    None where the host has not got all of them.
  """
  if _jax_compat.is_guarded() or not jax.sharding.get_abstract_mesh().empty:
    return None
  place, found = None, []
  for operand in operands:
    array, *starts = operand if type(operand) is tuple else (operand,)
    if type(array) is _ArrayImpl:
      if not (array.is_fully_addressable and _jax_compat.is_of_host(array)):
        return None
      if len(array.devices()) > 1:
        return None
      if _jax_compat.is_committed(array):
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


def are_few(arguments) -> bool:
  """True for arguments whose arrays, after views were taken, have `MOST_BYTES`."""
  leaves = jax.tree.leaves(arguments)
  return sum([getattr(leaf, "nbytes", 0) for leaf in leaves]) <= MOST_BYTES
