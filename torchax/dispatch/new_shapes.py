"""Fallbacks for shapes that are new, until they are seen often enough to compile.

Both have the same bits as the program. numpy computes small arrays on the host
(`core/numpy_fallback.py`). A sampler draws a flat array, whose size is a power of two,
and returns its first elements. Draws of many shapes share that program. Shapes that are
seen often get a program of their own, which is faster to call. `programs.py` adds the
fallbacks.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from torchax.compat import jax_compat
from torchax.core import numpy_fallback
from torchax.core.bounded_cache import BoundedCache
from torchax.core.chains import WHOLE
from torchax.core.numpy_fallback import shape_of
from torchax.core.program_limit import Program
from torchax.core.static_values import StaticValue
from torchax.devices import placement
from torchax.dispatch.lowering import Lowering
from torchax.dispatch.operands import Flattener, tensor_parts
from torchax.registry.operators import Operator
from torchax.rng import threefry

# A flat draw takes about 0.1 ms more than the program of a shape.
OFTEN = 64
_MOST_SHAPES = 4096
# Smallest and largest number of elements of a flat draw.
LEAST_ELEMENTS, MOST_ELEMENTS = 2**10, 2**20


def with_warmup(
  program: Program, lowering: Lowering, static_key, write, compiled: Callable
) -> Program:
  """Return the program, with the operator's fallback for new shapes around it.

  A fallback computes an in-place operation only for a target that is no view, and that
  has the dtype and shape of the result.

  Args:
    program: compiled function of operands, with `in_traces`.
    lowering: the function that `program` compiles.
    static_key: static key of the program.
    write: see `Plan.run`; the operands begin with the base then.
    compiled: function from another static key to the program of the lowering.
  """
  operator = lowering.operator
  on_host = operator.execution.on_host
  start = int(write is not None)
  if write is not None and write[0] is not WHOLE:
    return program

  def unless_cast(result):
    if write is None or result is None:
      return result
    return result if (result.dtype, result.shape) == write[1:] else None

  def draw(key, count, *operands):
    given = key, count, operands[start:]
    return unless_cast(_draw_flat(lowering, static_key, *given, compiled))

  def run(operands):
    given = lowering.flattener, static_key, operands[start:]
    return unless_cast(_run_on_host(on_host, *given))

  if operator.draw.by_element:
    return _with_flat_draws(program, draw)
  return program if on_host is None else numpy_fallback.with_warmup(program, run)


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


def _with_flat_draws(program: Program, draw: Callable) -> Program:
  """Return a sampler's program that calls `draw` until its shapes are seen often.

  Args:
    program: takes a key, a count and further operands.
    draw: the same function; it returns None to run the program instead.
  """
  # Number of draws by shapes.
  known: BoundedCache[tuple, int] = BoundedCache(_MOST_SHAPES)

  def run(*operands):
    shapes = (_kind_of_key(operands[0]), *map(shape_of, operands[2:]))
    times = known.get(shapes) or 0
    if times < OFTEN:
      drawn = draw(*operands)
      if drawn is not None:
        known[shapes] = times + 1
        return drawn
      known[shapes] = OFTEN
    return program(*operands)

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


def _draw_flat(
  lowering: Lowering, static_key, key, count, operands, compiled: Callable
):
  """Return the first elements of a flat draw; None if the program must run.

  Args:
    lowering, static_key, compiled: see `with_warmup`.
    key, count, operands: operands of the program, without a base.
  """
  prepared = numpy_fallback.as_numpy_operands(operands)
  if prepared is None or not _is_on_one_cpu(key):
    return None
  values, sharding = prepared
  # Part of the key -> (index of its operand, tensor).
  tensors = {
    part: (index, np.asarray(static_key[part].view_numpy(values[index])))
    for part, index in tensor_parts(static_key)
  }
  size = _part_of_size(lowering.flattener.names, static_key)
  if size is None:
    shapes = {tensor.shape for _, tensor in tensors.values()}
    if len(shapes) != 1:
      return None
    (shape,) = shapes
  else:
    given = static_key[size]
    shape = given.value if type(given) is StaticValue else given[1:]
  elements = math.prod(shape)
  number = max(LEAST_ELEMENTS, 1 << max(elements - 1, 0).bit_length())
  if number > MOST_ELEMENTS or not threefry.is_addressable(key, (number,)):
    return None
  flat_key, flat = list(static_key), list(operands)
  for part, (index, tensor) in tensors.items():
    # The draw has the size of an argument, or of its tensors.
    flat[index] = np.zeros(number if size is None else (), tensor.dtype)
    if size is None:
      flat[index][:elements] = tensor.ravel()
    flat_key[part] = WHOLE
  if size is not None:
    flat_key[size] = StaticValue((number,))
  drawn = compiled(tuple(flat_key))(key, count, *flat)

  def first(array):
    values = np.asarray(array)[:elements].reshape(shape)
    return placement.from_host(values.copy(), sharding)

  return jax.tree.map(first, drawn)


def _part_of_size(names, static_key) -> int | None:
  """Return the index in a static key of the argument `size`; None without one."""
  if "size" not in names:
    return None
  position, count = names.index("size"), static_key[0]
  if position < count:
    return 2 + position
  return static_key.index("size", 2 + count) + 1  # given by keyword


def _is_on_one_cpu(key: jax.Array) -> bool:
  """Return True for an uncommitted key on one CPU device."""
  devices = key.devices()
  is_on_cpu = len(devices) == 1 and next(iter(devices)).platform == "cpu"
  return is_on_cpu and not jax_compat.is_committed(key)
