"""Rules for operations that move elements: reshapes, slices, padding, concatenation.

Results have their true elements first, so a reshape that merges a padded axis with
another one moves elements, and the start of a slice may be an operand.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax.tracing.padded.program import (
  Dims,
  Operation,
  Size,
  extend,
  fill,
  is_sized,
  part,
  product,
  rule,
  true,
  true_index,
)

rule("transpose", "squeeze", "expand_dims", "stack")(Operation.bind)
rule("broadcast_in_dim", "iota", sized=("shape",))(Operation.bind)


# Reshapes -----------------------------------------------------------------------------


@rule("reshape", sized=("new_sizes",))
def _reshape(operation: Operation, operand) -> list:
  if operation.params.get("dimensions") is not None:
    raise operation.refuse("it also transposes")
  before, after = operation.inputs[0], operation.outputs[0]
  done: list[int] = []
  array = operand
  for old, new in _blocks(before, after):
    if is_sized(old + new):
      operation.program.equal.append((old, new))
      if _significant(old) != _significant(new):
        # In the padded array true elements move.
        rest = array.size // max(1, product(done) * product(old))
        array = array.reshape(product(done), product(old), rest)
        array = jnp.take(array, _sources(old, new), axis=1, mode="clip")
    done += [int(size) for size in new]
  return [array.reshape(tuple(map(int, after)))]


def _blocks(before: Dims, after: Dims) -> list[tuple[Dims, Dims]]:
  """Split both shapes into blocks of equal numbers of elements at all sizes."""
  cuts, end = [(0, 0)], (len(before), len(after))
  i = j = 0
  while (i, j) != end:
    ours, theirs = _count(before[:i]), _count(after[:j])
    if ours == theirs and (i, j) != cuts[-1]:
      cuts.append((i, j))
    # Advance the shape with fewer elements; of equal ones, the first with any left.
    if i < len(before) and (j == len(after) or ours[0] <= theirs[0]):
      i += 1
    else:
      j += 1
  cuts.append(end)
  return [(before[a:c], after[b:d]) for (a, b), (c, d) in zip(cuts, cuts[1:])]


def _count(dims: Dims) -> tuple[int, ...]:
  """Return the number of elements in each compared trace."""
  traces = max([len(d.values) for d in dims if isinstance(d, Size)], default=1)
  counts = [1] * traces
  for size in dims:
    values = size.values if isinstance(size, Size) else (int(size),) * traces
    counts = [count * value for count, value in zip(counts, values)]
  # Without sizes, the number is the same in all traces.
  return tuple(counts) if len(set(counts)) > 1 else (counts[0],)


def _significant(dims: Dims) -> list:
  """Return the axes that matter for the order, the first one without its length."""
  kept = [d.group if isinstance(d, Size) else int(d) for d in dims]
  return [each for each in kept if each != 1]


def _sources(old: Dims, new: Dims) -> jnp.ndarray:
  """Return the index in the padded `old` of each element of the padded `new`."""
  index = true_index(new, np.int32)
  source, stride = jnp.zeros_like(index), 1
  for position in range(len(old) - 1, -1, -1):
    size = true(old[position])
    is_first = position == 0
    source = source + (index if is_first else index % size) * stride
    index = index // size
    stride *= int(old[position])
  return source.reshape(-1)


# Slices -------------------------------------------------------------------------------


@rule("slice", sized=("start_indices", "limit_indices"))
def _slice(operation: Operation, operand) -> list:
  params = operation.params
  strides = params["strides"] or (1,) * operand.ndim
  starts, limits = list(params["start_indices"]), list(params["limit_indices"])
  for axis, (start, stride) in enumerate(zip(starts, strides)):
    if isinstance(start, Size):
      length = (int(operation.outputs[0][axis]) - 1) * stride + 1
      operand = part(operand, axis, true(start), length)
      starts[axis], limits[axis] = 0, length
  return [lax.slice(operand, [*map(int, starts)], [*map(int, limits)], strides)]


@rule("split", sized=("sizes",))
def _split(operation: Operation, operand) -> list:
  axis = operation.params["axis"]
  start, results = 0, []
  for size in operation.params["sizes"]:
    results.append(part(operand, axis, start, int(size)))
    start = start + true(size)
  return results


@rule("rev")
def _rev(operation: Operation, operand) -> list:
  (result,), shape = operation.bind(operand), operation.inputs[0]
  for axis in operation.params["dimensions"]:
    if isinstance(shape[axis], Size):
      start = int(shape[axis]) - true(shape[axis])
      result = part(result, axis, start, int(shape[axis]))
  return [result]


@rule("dynamic_slice", sized=("slice_sizes",))
def _dynamic_slice(operation: Operation, operand, *starts) -> list:
  sizes = operation.params["slice_sizes"]
  first = clamp_starts(starts, operation.inputs[0], sizes)
  for axis, size in enumerate(sizes):
    if isinstance(size, Size) or isinstance(operation.inputs[0][axis], Size):
      operand = extend(operand, axis, int(size))
  return [lax.dynamic_slice(operand, first, [*map(int, sizes)])]


@rule("dynamic_update_slice")
def _dynamic_update_slice(operation: Operation, operand, update, *starts) -> list:
  shape, of_update = operation.inputs[:2]
  first = clamp_starts(starts, shape, of_update)
  whole = operand
  for axis in range(operand.ndim):
    if is_sized((shape[axis], of_update[axis])):
      whole = extend(whole, axis, int(of_update[axis]))
  old = lax.dynamic_slice(whole, first, update.shape)
  # The padding of the update leaves the operand as it was.
  update = fill(update, of_update, range(operand.ndim), old)
  whole = lax.dynamic_update_slice(whole, update, first)
  return [lax.slice(whole, [0] * operand.ndim, operand.shape)]


def clamp_starts(starts, shape: Dims, sizes) -> list:
  """Clamp the starts of a slice, as XLA does at the true sizes."""
  return [
    jnp.clip(start, 0, jnp.asarray(true(whole) - true(size), jnp.result_type(start)))
    for start, whole, size in zip(starts, shape, sizes)
  ]


# Padding and concatenation ------------------------------------------------------------


@rule("pad", sized=("padding_config",))
def _pad(operation: Operation, operand, value) -> list:
  shape, result = operation.inputs[0], operation.outputs[0]
  operand = fill(operand, shape, range(operand.ndim), value)
  config = [(int(a), int(b), int(c)) for a, b, c in operation.params["padding_config"]]
  moved = []
  for axis, (low, _, interior) in enumerate(operation.params["padding_config"]):
    if isinstance(low, Size):
      if interior:
        raise operation.refuse("it inserts padding between elements")
      config[axis] = (0, 0, 0)
      moved.append((axis, true(low)))
  array = lax.pad(operand, value, config)
  for axis, low in moved:
    array = _shift(array, axis, low, int(result[axis]), value)
  return [array]


def _shift(array, axis: int, low, length: int, value):
  """Return an array of a length that has `array` from a traced, maybe negative, start.

  All other elements are `value`.
  """
  own = array.shape[axis]
  config = [(0, 0, 0)] * array.ndim
  config[axis] = (length, length, 0)
  array = lax.pad(array, value, config)
  start = jnp.clip(length - low, 0, length + own)
  return lax.dynamic_slice_in_dim(array, start, length, axis)


@rule("concatenate")
def _concatenate(operation: Operation, *operands) -> list:
  axis = operation.params["dimension"]
  sizes = [shape[axis] for shape in operation.inputs]
  if not is_sized(sizes[:-1]):
    return operation.bind(*operands)
  whole = extend(operands[0], axis, sum(map(int, sizes[1:])))
  start = true(sizes[0])
  for operand, size in zip(operands[1:], sizes[1:]):
    # Each operand overwrites the padding of the one before.
    whole = lax.dynamic_update_slice_in_dim(whole, operand, start, axis)
    start = start + true(size)
  return [whole]


@rule("tile")
def _tile(operation: Operation, operand) -> list:
  (result,), shape = operation.bind(operand), operation.inputs[0]
  added = result.ndim - operand.ndim
  for axis, size in enumerate(shape, added):
    if isinstance(size, Size) and result.shape[axis] != int(size):
      index = jnp.arange(result.shape[axis]) % true(size)
      result = jnp.take(result, index, axis=axis, mode="clip")
  return [result]
