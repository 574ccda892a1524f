"""Fallbacks for shapes that are new, until they are seen often enough to compile.

Both have the same bits as the program. numpy computes small arrays on the host
(`core/numpy_fallback.py`). A sampler gets its random bits from a program that many
shapes share (`rng/threefry.py`); its own program then compiles in a fifth of the time.
Shapes that are seen often get one program for everything, which is faster to call.
`programs.py` adds the fallbacks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from torchax.core import numpy_fallback, program_limit
from torchax.core.bounded_cache import BoundedCache
from torchax.core.chains import WHOLE
from torchax.core.numpy_fallback import shape_of
from torchax.core.program_limit import Program
from torchax.dispatch.operands import Flattener
from torchax.registry.operators import Operator
from torchax.rng import threefry

# A draw by two programs takes about 15 us more.
OFTEN = 64
_MOST_SHAPES = 4096


def with_warmup(
  program: Program, operator: Operator, flattener: Flattener, static_key, write=None
) -> Program:
  """Return the program, with the operator's fallback for new shapes around it.

  numpy computes an in-place operation only for a target that is no view, and that has
  the dtype and shape of the result.

  Args:
    program: compiled function of operands, with `in_traces`.
    operator: operator of its lowering.
    flattener: restores the arguments from the operands.
    static_key: static key of the program.
    write: see `Plan.run`; the operands begin with the base then.
  """
  count, on_host = operator.draw.shared_bits, operator.execution.on_host
  start = int(write is not None)
  if count is not None:

    def elements(*operands):
      args, kwargs = flattener.rebuild(static_key, operands[start:])
      return count(*args, **kwargs)

    return _with_shared_bits(program, elements)
  if on_host is None or (write is not None and write[0] is not WHOLE):
    return program

  def run(operands):
    result = _run_on_host(on_host, flattener, static_key, operands[start:])
    if write is None or result is None:
      return result
    return result if (result.dtype, result.shape) == write[1:] else None

  return numpy_fallback.with_warmup(program, run)


def run_in_numpy(operator: Operator, flattener: Flattener, static_key, operands):
  """Return the result of an operation that does not compile, by its fallback.

  None if it has none, or if the arguments are large or not on the host.
  """
  on_host = operator.execution.on_host
  if on_host is None:
    return None
  run = functools.partial(_run_on_host, on_host, flattener, static_key)
  return numpy_fallback.run_in_numpy(run, operands)


def _run_on_host(on_host: Callable, flattener: Flattener, static_key, operands):
  args, kwargs = flattener.rebuild_on_host(static_key, operands)
  is_small = numpy_fallback.is_small((*args, *kwargs.values()))
  return on_host(*args, **kwargs) if is_small else None


def _with_shared_bits(program: Program, elements: Callable) -> Program:
  """Return a sampler's program that uses shared bits until its shapes are seen often.

  Args:
    program: takes a key, a count and further operands; the key may be `threefry.Words`.
    elements: maps the further operands to the number of elements drawn.
  """
  # (number of calls, number of elements) by shapes; True after `OFTEN` calls.
  known: BoundedCache[tuple, tuple[int, int] | bool] = BoundedCache(_MOST_SHAPES)

  def run(rng_key, count, *operands):
    # Keys of another generator, and one key per row, have no shared bits.
    shapes = (_kind_of_key(rng_key), *[shape_of(operand) for operand in operands])
    found = known.get(shapes)
    if found is True:
      return program(rng_key, count, *operands)
    if found is None:
      number = _shared_word_count(rng_key, operands, elements)
      found = (0, number) if number else (OFTEN, 0)
    times, number = found
    is_plain = jax.sharding.get_abstract_mesh().empty
    if times >= OFTEN or not (is_plain and all(map(_is_on_one_cpu, operands))):
      known[shapes] = True
      return program(rng_key, count, *operands)
    known[shapes] = (times + 1, number)
    return program(_random_words()(rng_key, count, number), count, *operands)

  warmed: Any = run
  warmed.in_traces = program.in_traces
  return warmed


# The last key, and its kind: a stream has one key for many draws.
_last: tuple[Any, tuple] = (None, ())


def _kind_of_key(key: jax.Array) -> tuple:
  """Return the implementation of a typed key, and its shape."""
  global _last
  last, kind = _last
  if last is not key:
    kind = (str(jax.random.key_impl(key)), key.shape)
    if not isinstance(key, jax.core.Tracer):
      _last = (key, kind)
  return kind


@functools.cache
def _random_words() -> Callable:
  return program_limit.jit(threefry.random_words, static_argnums=2)


def _shared_word_count(rng_key, operands, elements: Callable) -> int | None:
  """Return the number of words to draw; None if the key's own program is better."""
  if not _is_on_one_cpu(rng_key):
    return None
  numbers = []
  jax.eval_shape(lambda given: numbers.append(elements(*given)), operands)
  return threefry.shared_word_count(rng_key, numbers[0])


def _is_on_one_cpu(operand) -> bool:
  """Return True for arrays on one CPU device, and for Python numbers."""
  array = operand[0] if type(operand) is tuple else operand
  if not isinstance(array, jax.Array):
    return True
  devices = array.devices()
  return len(devices) == 1 and next(iter(devices)).platform == "cpu"
