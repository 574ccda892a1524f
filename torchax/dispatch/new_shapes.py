"""Fallbacks for shapes that are new, until they are seen often enough to compile.

Both have the same bits as the program. numpy computes small arrays on the host
(`core/numpy_fallback.py`). Samplers, and pointwise operations that have seen several
shapes, compute a flat array whose size is a power of two, and return its first
elements. Many shapes share that program. Shapes that are seen often get a program of
their own, which is faster to call. `programs.py` adds the fallbacks.
"""

import functools
import math
from collections.abc import Callable

import jax
import numpy as np
import torch

from torchax.compat import torch_compat
from torchax.core import numpy_fallback
from torchax.core.chains import WHOLE, can_write_numpy
from torchax.core.program_limit import Program
from torchax.core.static_values import StaticValue
from torchax.dispatch.lowering import Lowering
from torchax.dispatch.operands import Flattener, tensor_parts
from torchax.registry.operators import Operator
from torchax.registry.schema import schema_of
from torchax.rng import threefry

# Number of calls with a flat array, each about 0.2 ms slower than the program of its
# shape, that take as long as compiling that program.
OFTEN = 64
# Shapes of a pointwise operation that are compiled before others are flat.
FEW = 8
# Smallest and largest number of elements of a flat array.
LEAST_ELEMENTS, MOST_ELEMENTS = 2**10, 2**20
_SUBNORMAL = 5e-324


def with_warmup(
  program: Program, lowering: Lowering, static_key, write, compiled: Callable
) -> Program:
  """Return the program, with the operator's fallback for new shapes around it.

  A fallback computes an in-place operation only for a target that has the dtype and
  shape of the result, and if numpy can write to its view.

  Args:
    program: compiled function of operands, with `in_traces`.
    lowering: the function that `program` compiles.
    static_key: static key of the program.
    write: see `Plan.run`; the operands begin with the base then.
    compiled: function from another static key to the program of the lowering.
  """
  operator, op = lowering.operator, lowering.op
  on_host = operator.execution.on_host
  if lowering.is_sampler:
    is_flat = operator.draw.by_element
  else:
    has_schema = operator.is_builtin and isinstance(op, torch_compat.OpOverload)
    is_flat = has_schema and schema_of(op).is_pointwise
  if write is not None and not _can_write_numpy(write):
    return program

  # The operands start with the key and count of a draw, and the base of a write.
  draw = 2 * lowering.is_sampler
  start = draw + (write is not None)

  def run(operands):
    drawn, given, result = operands[:draw], operands[start:], None
    if on_host is not None:
      result = _run_on_host(on_host, lowering.flattener, static_key, given)
    if result is None and is_flat:
      if drawn or lowering.shapes_compiled >= FEW:
        result = _run_flat(lowering, static_key, drawn, given, compiled)
      lowering.shapes_compiled += result is None
    return _written(write, operands[draw:], result)

  if on_host is not None:
    return numpy_fallback.with_warmup(program, run)
  if is_flat:
    return numpy_fallback.with_warmup(program, run, numpy_fallback.PROGRAM // OFTEN)
  return program


def _can_write_numpy(write) -> bool:
  if type(write[0]) is tuple:  # the writes of a list of tensors
    return all(chain is WHOLE for chain, *_ in write)
  return can_write_numpy(write[0])


def _written(write, operands, result):
  """Return a result, or the base with the result; None if it must be cast."""
  if write is None or result is None:
    return result
  if type(write[0]) is tuple:
    targets = [of_target for _, *of_target in write]
    return result if [[r.dtype, r.shape] for r in result] == targets else None
  chain, *of_target = write
  if [result.dtype, result.shape] != of_target:
    return None
  return result if chain is WHOLE else chain.write_numpy(operands[0], result)


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
  if not numpy_fallback.is_small((*args, *kwargs.values())):
    return None
  is_flushing = _SUBNORMAL == 0
  try:
    # XLA flushes subnormal numbers to zero on the CPU.
    if not torch.set_flush_denormal(True):
      return None
    with np.errstate(all="ignore"):
      return on_host(*args, **kwargs)
  finally:
    torch.set_flush_denormal(is_flushing)


def _run_flat(lowering: Lowering, static_key, drawn, operands, compiled: Callable):
  """Return the first elements of flat results, as numpy arrays.

  None if the program must run.

  Args:
    lowering, static_key, compiled: see `with_warmup`.
    drawn: key and count of a draw, or empty.
    operands: the other operands of the program, without a base, as numpy arrays and
      numbers.
  """
  # Part of the key -> (index of its operand, tensor).
  tensors = {
    part: (index, np.asarray(static_key[part].view_numpy(operands[index])))
    for part, index in tensor_parts(static_key)
  }
  size = _part_of_size(lowering.flattener.names, static_key)
  if size is None:
    # A tensor without dimensions stays one: it does not promote others.
    shapes = {tensor.shape for _, tensor in tensors.values()} - {()} or {()}
    if len(shapes) != 1:
      return None  # XLA rounds differently if it broadcasts a divisor
    (shape,) = shapes
  else:
    given = static_key[size]
    shape = given.value if type(given) is StaticValue else given[1:]
  elements = math.prod(shape)
  number = max(LEAST_ELEMENTS, 1 << max(elements - 1, 0).bit_length())
  if not elements or number > MOST_ELEMENTS:
    return None
  if drawn and not threefry.is_addressable(drawn[0], (number,)):
    return None
  flat_key, flat = list(static_key), list(operands)
  for part, (index, tensor) in tensors.items():
    flat_key[part] = WHOLE
    if size is not None:
      flat[index] = np.zeros((), tensor.dtype)  # only its dtype counts
    elif tensor.shape == shape:
      flat[index] = np.full(number, tensor.flat[0], tensor.dtype)
      flat[index][:elements] = tensor.ravel()
    else:
      flat[index] = tensor
  if size is not None:
    flat_key[size] = StaticValue((number,))
  results = compiled(tuple(flat_key))(*drawn, *flat)
  first = lambda array: np.asarray(array)[:elements].reshape(shape).copy()  # noqa: E731
  return jax.tree.map(first, results)


def _part_of_size(names, static_key) -> int | None:
  """Return the index in a static key of the argument `size`; None without one."""
  if "size" not in names:
    return None
  position, count = names.index("size"), static_key[0]
  if position < count:
    return 2 + position
  return static_key.index("size", 2 + count) + 1  # given by keyword
