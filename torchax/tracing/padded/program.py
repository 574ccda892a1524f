"""Programs for all sizes of a bucket: the padded trace, with true sizes as operands.

Each array has its true elements first along every axis; beyond its true size an axis
has padding, of any value. A rule computes an operation so that this holds for its
results, and so that no padding reaches a true element.

Operations without a padded axis run as they are. Without a rule, `BucketError` names
the operation.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax.errors import BucketError
from torchax.tracing.padded import arrays
from torchax.tracing.padded.graphs import (
  PARTS,
  SIZES,
  Equation,
  Graph,
  Literal,
  Values,
)


class Size(int):
  """Number of the padded trace that depends on the true sizes.

  Attributes:
    values: its value in each compared trace; the first is the padded one.
    true: its true value, a traced scalar.
    group: name of its operand and index there.
  """

  values: tuple
  true: Any
  group: tuple[str, int]


Dims = tuple[int, ...]


def true(number) -> Any:
  """Return the true value of a size, traced; other numbers are unchanged."""
  return number.true if isinstance(number, Size) else number


def is_sized(dims: Sequence) -> bool:
  """Return True if there is a size among the numbers."""
  return any(isinstance(each, Size) for each in dims)


class Operation(NamedTuple):
  """Operation of the padded trace, as a rule sees it.

  Attributes:
    equation: the operation, with a `Size` for each number that depends on sizes.
    inputs: shapes of the operands, as tuples of numbers and `Size`s.
    program: program that is being traced.
  """

  equation: Equation
  inputs: list[Dims]
  program: "Trace"

  @property
  def name(self) -> str:
    return self.equation.name

  @property
  def params(self) -> dict[str, Any]:
    return self.equation.params

  @property
  def outputs(self) -> list[Dims]:
    return self.equation.shapes

  def bind(self, *operands, **changed) -> list:
    """Run the operation at the padded sizes, with some other parameters."""
    primitive, params = self.equation.jax.primitive, self.equation.jax.params
    results = primitive.bind(*operands, **{**params, **changed})
    return list(results) if primitive.multiple_results else [results]

  def refuse(self, why: str) -> BucketError:
    """Return the error for an operation that cannot run on padded arrays."""
    name = self.equation.describe(self.program.around)
    return BucketError(
      f"{name} cannot run at a padded size: {why}. Compile the function without "
      "`buckets`, or move the operation out of it."
    )


Rule = Callable[..., list]


# Rules `(operation, *operands) -> results`, and parameters that may depend on sizes.
_rules: dict[str, tuple[Rule, tuple[str, ...]]] = {}


def rule(*names: str, sized: tuple[str, ...] = ()) -> Callable[[Rule], Rule]:
  """Register a rule; `sized` has the parameters that may depend on sizes."""

  def register(function: Rule) -> Rule:
    _rules.update(dict.fromkeys(names, (function, sized)))
    return function

  return register


class Grouping:
  """Numbers and constants of a template, grouped by their values in compared traces.

  Numbers with the same values in all of them are one operand.

  Args:
    template: graph of the padded trace.
    others: values of the traces to compare it with.
  """

  def __init__(self, template: Graph, others: Sequence[Values]):
    self.template = template
    self.traces = [Values.of(template), *others]
    # Kind and index of each operand, and all numbers, by their values in the traces.
    self.groups: dict[tuple, tuple[str, int]] = {}
    self.marks = list(zip(*[values.numbers for values in self.traces]))
    counts: dict[str, int] = {}
    for mark in self.marks:
      if mark not in self.groups and any(number != mark[0] for number in mark):
        kind, _ = mark[0]
        self.groups[mark] = kind, counts.get(kind, 0)
        counts[kind] = counts.get(kind, 0) + 1
    self.is_operand = [
      not all(_is_same_array(each[0], other) for other in each[1:])
      for each in zip(*[values.arrays for values in self.traces])
    ]

  def operands(self, values: Values) -> dict[str, Any] | None:
    """Return the operands for a trace, or None if it has to be compared first."""
    found: dict[tuple, Any] = {}
    for number, mark in zip(values.numbers, self.marks):
      if mark in self.groups:
        if found.setdefault(mark, number) != number:
          return None
      elif number != mark[0]:
        return None
    constants = []
    padded = self.traces[0].arrays
    for mine, other, is_operand in zip(values.arrays, padded, self.is_operand):
      if is_operand:
        constants.append(arrays.pad(mine, np.shape(other)))
      elif not _is_same_array(mine, other):
        return None
    numbers: dict[str, list] = {}
    for mark, (kind, _) in self.groups.items():
      numbers.setdefault(kind, []).append(found[mark][1])
    vectors = {
      kind: np.asarray(each, np.int32 if kind == SIZES else np.dtype(kind))
      for kind, each in numbers.items()
    }
    return {"numbers": vectors, "arrays": constants}


def _is_same_array(one, other) -> bool:
  if one is other:
    return True
  if np.shape(one) != np.shape(other) or one.dtype != other.dtype:
    return False
  is_key = jax.dtypes.issubdtype(one.dtype, jax.dtypes.extended)
  return not is_key and bool(np.array_equal(np.asarray(one), np.asarray(other)))


class Trace:
  """Trace of a padded program.

  Args:
    grouping: grouped numbers of the template.
    numbers: traced vectors of the groups' values, by kind.
    arrays: traced constants that differ between sizes.

  Attributes:
    equal: pairs of products of dims that a rule needs to be equal at all sizes.
    around: running operations, from the outermost to the innermost.
  """

  def __init__(self, grouping: Grouping, numbers: dict, arrays: Sequence):
    self._grouping = grouping
    self._numbers = {kind: list(vector) for kind, vector in numbers.items()}
    self._marks = iter(grouping.marks)
    self._arrays = iter(arrays)
    self._is_operand = iter(grouping.is_operand)
    self.equal: list[tuple[Dims, Dims]] = []
    self.around: list[Equation] = []

  def run(self, inputs: Sequence) -> list:
    """Run the program on padded operands."""
    template = self._grouping.template
    graph = template.map(self._number, self._literal, self._array)
    return self.evaluate(graph, inputs)

  # Numbers --------------------------------------------------------------------------

  def _number(self, number):
    """Return the number, a `Size`, or a traced number that is no length."""
    mark = next(self._marks)
    group = self._grouping.groups.get(mark)
    if group is None:
      return number
    traced = self._numbers[group[0]][group[1]]
    values = tuple([value for _, value in mark])
    if group[0] != SIZES or any(not isinstance(value, int) for value in values):
      return traced
    size = Size(values[0])
    size.values, size.true, size.group = values, traced, group
    return size

  def _literal(self, literal: Literal) -> Literal:
    value = self._number(literal.value)
    if not isinstance(value, jax.core.Tracer):
      value = np.asarray(value, literal.dtype)
    return literal._replace(value=value)

  def _array(self, constant):
    return next(self._arrays) if next(self._is_operand) else constant

  # Operations -----------------------------------------------------------------------

  def evaluate(self, graph: Graph, inputs: Sequence) -> list:
    """Run a graph on padded operands."""
    found = dict(enumerate(zip([*inputs, *graph.constants], graph.shapes)))

    def read(value) -> tuple[Any, Dims]:
      return (value.value, ()) if isinstance(value, Literal) else found[value]

    for equation in graph.equations:
      operands = [read(value) for value in equation.inputs]
      operation = Operation(equation, [shape for _, shape in operands], self)
      self.around.append(equation)
      results = _run(operation, [value for value, _ in operands])
      self.around.pop()
      found.update(zip(equation.outputs, zip(results, equation.shapes)))
    return [read(value)[0] for value in graph.results]


def _run(operation: Operation, operands: list) -> list:
  name, params = operation.name, operation.params
  differing = [key for key, value in params.items() if differs(value)]
  shapes = [*operation.inputs, *operation.outputs]
  if name not in PARTS and not differing and not any(map(is_sized, shapes)):
    return operation.bind(*operands)
  if name not in _rules:
    raise operation.refuse("it has no rule for padding")
  function, sized = _rules[name]
  for key in differing:
    if key not in sized:
      raise operation.refuse(f"its parameter {key!r} depends on the size")
  return function(operation, *operands)


def differs(value) -> bool:
  """Return True if a parameter depends on sizes."""
  return any(
    isinstance(leaf, Size | jax.core.Tracer) for leaf in jax.tree.leaves(value)
  )


# For rules ----------------------------------------------------------------------------


def is_true(shape: Dims, axis: int, padded: Sequence[int]) -> jax.Array:
  """Return bools of a padded shape: the element is not padding along an axis."""
  index = lax.broadcasted_iota(np.int32, padded, axis)
  return index < true(shape[axis])


def true_index(shape: Dims, dtype) -> jax.Array:
  """Return the index of each element in the flattened array of true size."""
  padded = tuple(map(int, shape))
  index = jnp.zeros(padded, dtype)
  for axis, size in enumerate(shape):
    along = lax.broadcasted_iota(dtype, padded, axis)
    index = index * jnp.asarray(true(size), dtype) + along
  return index


def fill(array, shape: Dims, axes: Sequence[int], value) -> jax.Array:
  """Replace the padding along axes.

  Args:
    array: padded array.
    shape: its shape, with sizes.
    axes: axes to fill; those without padding are unchanged.
    value: scalar for the padding.
  """
  for axis in axes:
    if isinstance(shape[axis], Size):
      keep = is_true(shape, axis, array.shape)
      array = jnp.where(keep, array, jnp.asarray(value, array.dtype))
  return array


def extend(array, axis: int, length: int) -> jax.Array:
  """Append zeros along an axis."""
  config = [(0, 0, 0)] * array.ndim
  config[axis] = (0, length, 0)
  return lax.pad(array, jnp.zeros((), array.dtype), config)


def part(array, axis: int, start, length: int) -> jax.Array:
  """Return `length` elements from a traced start; beyond the array they are zeros."""
  return lax.dynamic_slice_in_dim(extend(array, axis, length), start, length, axis)


def product(dims: Sequence) -> int:
  """Return the padded number of elements."""
  return math.prod(map(int, dims))
