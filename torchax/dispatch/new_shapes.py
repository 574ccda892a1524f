"""What runs for a shape that is new, until it pays to compile a program for it.

Two ways, with the same bits as the program: numpy on the host computes few elements
(`core/numpy_fallback.py`), and a sampler gets its random bits from a program that many
shapes share (`rng/threefry.py`), so that its own program takes a fifth of the time to
compile. Shapes that are seen often get a program for everything, which is called more
quickly.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from torchax.core import numpy_fallback, programs
from torchax.core.bounded_cache import BoundedCache
from torchax.core.numpy_fallback import shape_of
from torchax.core.programs import Program
from torchax.dispatch.operands import Flattener
from torchax.registry.operators import Operator
from torchax.rng import threefry

# A draw by two programs takes about 15 us more.
OFTEN = 64
_MOST_SHAPES = 4096


def with_warmup(
  program: Program, operator: Operator, flattener: Flattener, key
) -> Program:
  """A program, or a function that runs it once its shapes pay to compile.

  Args:
    program: of operands, compiled, with `in_traces`.
    operator: of its lowering.
    flattener: restores the arguments from the operands.
    key: the static key that the program is compiled for.
  """
  count, on_host = operator.draw.shared_bits, operator.execution.on_host
  if count is not None:

    def elements(*operands):
      args, kwargs = flattener.rebuild(key, operands)
      return count(*args, **kwargs)

    return _with_shared_bits(program, elements)
  if on_host is None:
    return program

  def run_on_host(operands):
    args, kwargs = flattener.rebuild_on_host(key, operands)
    is_small = numpy_fallback.is_small((*args, *kwargs.values()))
    return on_host(*args, **kwargs) if is_small else None

  return numpy_fallback.with_warmup(program, run_on_host)


def _with_shared_bits(program: Program, elements: Callable) -> Program:
  """A sampler's program, which gets shared bits until its shapes are seen often.

  Args:
    program: of a key, a count and further operands; `threefry.Words` may be the key.
    elements: number of elements that are drawn, by the further operands.
  """
  # Number of calls and of elements, by shapes; True once that was often.
  known: BoundedCache[tuple, tuple[int, int] | bool] = BoundedCache(_MOST_SHAPES)

  def run(key, count, *operands):
    # Not every key has words: of another generator, or one for each row.
    shapes = (key.dtype, key.shape, *[shape_of(operand) for operand in operands])
    found = known.get(shapes)
    if found is True:
      return program(key, count, *operands)
    if found is None:
      number = _number(key, operands, elements)
      found = (0, number) if number else (OFTEN, 0)
    times, number = found
    is_plain = jax.sharding.get_abstract_mesh().empty
    if times >= OFTEN or not (is_plain and all(map(_is_on_one_cpu, operands))):
      known[shapes] = True
      return program(key, count, *operands)
    known[shapes] = (times + 1, number)
    return program(_random_words()(key, count, number), count, *operands)

  warmed: Any = run
  warmed.in_traces = program.in_traces
  return warmed


@functools.cache
def _random_words() -> Callable:
  return programs.jit(threefry.random_words, static_argnums=2)


def _number(key, operands, elements: Callable) -> int | None:
  """Number of words to draw; None where the key's own program draws better."""
  if not _is_on_one_cpu(key):
    return None
  numbers = []
  jax.eval_shape(lambda given: numbers.append(elements(*given)), operands)
  return threefry.number_of_shared(key, numbers[0])


def _is_on_one_cpu(operand) -> bool:
  """True for what moves nothing between devices; numbers are operands too."""
  array = operand[0] if type(operand) is tuple else operand
  if not isinstance(array, jax.Array):
    return True
  devices = array.devices()
  return len(devices) == 1 and next(iter(devices)).platform == "cpu"
