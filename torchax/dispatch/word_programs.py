"""Draws whose words are drawn first, while their shapes are new.

The words are drawn by a program that many shapes share (`rng/words.py`), and the
program of the draw itself takes a fifth of the time to compile. Shapes that come often
get a program for both, which gives the same bits and is called more quickly.
"""

from collections.abc import Callable

import jax

from torchax.core.bounded_cache import BoundedCache
from torchax.core.numpy_fallback import shape_of
from torchax.rng import words

# A draw by two programs takes about 15 us more.
OFTEN = 64
_MOST_SHAPES = 4096


def until_often(program: Callable, number_of: Callable) -> Callable:
  """A sampler's program, which gets words until its shapes have come often.

  Args:
    program: of a key, a count and further operands; `threefry.Words` may be the key.
    number_of: (further operands) -> of how many elements words are drawn.
  """
  # How often shapes have come, and for how many elements; True once that was often.
  known: BoundedCache[tuple, tuple[int, int] | bool] = BoundedCache(_MOST_SHAPES)

  def run(key, count, *operands):
    # Not every key has words: of another generator, or one for each row.
    shapes = (key.dtype, key.shape, *[shape_of(operand) for operand in operands])
    found = known.get(shapes)
    if found is True:
      return program(key, count, *operands)
    if found is None:
      number = _number(key, operands, number_of)
      found = (0, number) if number else (OFTEN, 0)
    times, number = found
    is_plain = jax.sharding.get_abstract_mesh().empty
    if times >= OFTEN or not (is_plain and all(map(_is_on_one_cpu, operands))):
      known[shapes] = True
      return program(key, count, *operands)
    known[shapes] = (times + 1, number)
    return program(words.drawn(key, count, number), count, *operands)

  run.in_traces = program.in_traces
  return run


def _number(key, operands, number_of: Callable) -> int | None:
  """How many words are drawn; None where the draw is better left alone."""
  if not _is_on_one_cpu(key):
    return None
  return words.number_for(key, number_of(operands))


def _is_on_one_cpu(operand) -> bool:
  """True for what moves nothing between devices; numbers are operands too."""
  array = operand[0] if type(operand) is tuple else operand
  if not isinstance(array, jax.Array):
    return True
  devices = array.devices()
  return len(devices) == 1 and next(iter(devices)).platform == "cpu"
