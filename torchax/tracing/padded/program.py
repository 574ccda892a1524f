"""Programs for all sizes of a bucket: the padded trace, with true sizes as operands.

Each array has its true elements first along every axis; beyond its true size an axis
has padding, of any value. A rule computes an operation so that this holds for its
results, and so that no padding reaches a true element. `Rules` has them by the name of
the primitive.

Operations without a padded axis run as they are. Without a rule, `BucketError` names
the operation.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax.errors import BucketError
from torchax.tracing.padded.graphs import (
  PARTS,
  Equation,
  Graph,
  Literal,
  Values,
  is_number,
)

_SIZES = "sizes"


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
    equation: operation with JAX's parameters.
    params: its parameters, with a `Size` for each number that depends on sizes.
    inputs: shapes of the operands, as tuples of numbers and `Size`s.
    outputs: shapes of the results.
    parts: called graphs.
    program: program that is being traced.
  """

  equation: Equation
  params: dict[str, Any]
  inputs: list[Dims]
  outputs: list[Dims]
  parts: "list[Sized]"
  program: "Trace"

  @property
  def name(self) -> str:
    return self.equation.name

  def bind(self, *operands) -> list:
    """Run the operation at the padded sizes."""
    primitive = self.equation.primitive
    results = primitive.bind(*operands, **self.equation.params)
    return list(results) if primitive.multiple_results else [results]

  def refuse(self, why: str) -> BucketError:
    """Return the error for an operation that cannot run on padded arrays."""
    name = self.equation.describe(self.program.around)
    return BucketError(
      f"{name} cannot run at a padded size: {why}. Compile the function without "
      "`buckets`, or move the operation out of it."
    )


Rule = Callable[..., list]


class Rules:
  """Rules by the name of the primitive: `(operation, *operands) -> results`."""

  known: dict[str, Rule] = {}
  # Parameters that may depend on sizes, by the name of the primitive.
  sized: dict[str, tuple[str, ...]] = {}


def rule(*names: str, sized: tuple[str, ...] = ()) -> Callable[[Rule], Rule]:
  """Register a rule; `sized` has the parameters that may depend on sizes."""

  def register(function: Rule) -> Rule:
    for name in names:
      Rules.known[name] = function
      Rules.sized[name] = sized
    return function

  return register


class Sized(NamedTuple):
  """Graph with its numbers as a program sees them.

  Attributes:
    graph: graph of the padded trace.
    shapes: shapes of the inputs.
    constants: constants, or traced operands in their place.
    of_constants: shapes of the constants.
    equations: parameters, literals, shapes of results and parts of each operation.
    literals: values of the literals among the results.
  """

  graph: Graph
  shapes: list[Dims]
  constants: list
  of_constants: list[Dims]
  equations: list[tuple]
  literals: list


class Partition:
  """Numbers and constants of a template, grouped by their values in compared traces.

  Numbers with the same values in all of them are one operand. `add` compares one more
  trace, if `fits` finds that it needs other operands.

  Args:
    template: graph of the padded trace.
  """

  def __init__(self, template: Graph):
    self.template = template
    self.kinds = list(_kinds(template))
    self.traces = [Values.of(template)]
    self._group()

  def add(self, values: Values) -> None:
    """Compare another trace."""
    self.traces.append(values)
    self._group()

  def _group(self) -> None:
    self.groups: dict[tuple, tuple[str, int]] = {}
    self.marks: list[tuple] = []
    counts: dict[str, int] = {}
    for kind, numbers in zip(
      self.kinds, zip(*[values.numbers for values in self.traces])
    ):
      key = (kind, numbers)
      if key not in self.groups and any(n != numbers[0] for n in numbers):
        self.groups[key] = kind, counts.get(kind, 0)
        counts[kind] = counts.get(kind, 0) + 1
      self.marks.append(key)
    self.is_operand = [
      not all(_is_same_array(arrays[0], each) for each in arrays[1:])
      for arrays in zip(*[values.arrays for values in self.traces])
    ]

  def operands(self, values: Values) -> dict[str, Any] | None:
    """Return the operands for a trace, or None if it has to be compared first."""
    first = self.traces[0]
    found: dict[tuple, Any] = {}
    for number, key in zip(values.numbers, self.marks):
      if key in self.groups:
        if found.setdefault(key, number) != number:
          return None
      elif number != key[1][0]:
        return None
    arrays = []
    for mine, other, is_operand in zip(values.arrays, first.arrays, self.is_operand):
      if is_operand:
        arrays.append((mine, np.shape(other)))
      elif not _is_same_array(mine, other):
        return None
    numbers: dict[str, list] = {}
    for key, (kind, _) in self.groups.items():
      numbers.setdefault(kind, []).append(found[key])
    return {"numbers": numbers, "arrays": arrays}


def _kinds(graph: Graph) -> Iterator[str]:
  """Yield the kind of each number: a dtype for literals, and sizes."""
  for shape in graph.shapes:
    yield from [_SIZES] * len(shape)
  for equation in graph.equations:
    yield from [_SIZES for leaf in equation.leaves if is_number(leaf)]
    yield from [str(v.dtype) for v in equation.inputs if isinstance(v, Literal)]
    yield from [_SIZES for shape in equation.shapes for _ in shape]
    for part in equation.parts:
      yield from _kinds(part)
  yield from [str(v.dtype) for v in graph.results if isinstance(v, Literal)]


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
    partition: grouped numbers of the template.
    numbers: traced vectors of the groups' values, by kind.
    arrays: traced constants that differ between sizes.

  Attributes:
    equal: pairs of products of dims that a rule needs to be equal at all sizes.
    around: running operations, from the outermost to the innermost.
  """

  def __init__(self, partition: Partition, numbers: dict, arrays: Sequence):
    self._partition = partition
    self._numbers = {kind: list(vector) for kind, vector in numbers.items()}
    self._marks = iter(partition.marks)
    self._arrays = iter(arrays)
    self._constants = iter(zip(partition.is_operand, *_by_trace(partition)))
    self.equal: list[tuple[Dims, Dims]] = []
    self.around: list[Equation] = []

  def run(self, inputs: Sequence) -> list:
    """Run the program on padded operands."""
    graph = self._sized(self._partition.template)
    return self.evaluate(graph, inputs)

  # Numbers --------------------------------------------------------------------------

  def _number(self):
    key = next(self._marks)
    kind, values = key
    group = self._partition.groups.get(key)
    if group is None:
      return values[0]
    traced = self._numbers[kind][group[1]]
    if kind != _SIZES or any(not isinstance(value, int) for value in values):
      return _Varying(traced, kind)
    size = Size(values[0])
    size.values, size.true, size.group = values, traced, group
    return size

  def _parameter(self, leaf):
    number = self._number()
    return number if isinstance(number, Size | _Varying) else leaf

  def _shape(self, length: int) -> Dims:
    return tuple([self._number() for _ in range(length)])

  def _sized(self, graph: Graph) -> Sized:
    shapes = [self._shape(len(shape)) for shape in graph.shapes]
    constants, of_constants = [], []
    for _ in graph.constants:
      is_operand, shape, array = next(self._constants)
      constants.append(next(self._arrays) if is_operand else array)
      of_constants.append(self._constant_shape(shape))
    equations = []
    for equation in graph.equations:
      leaves = [
        self._parameter(leaf) if is_number(leaf) else leaf for leaf in equation.leaves
      ]
      params = jax.tree.unflatten(equation.treedef, leaves)
      literals = self._literals(equation.inputs)
      outputs = [self._shape(len(shape)) for shape in equation.shapes]
      parts = [self._sized(part) for part in equation.parts]
      equations.append((params, literals, outputs, parts))
    literals = self._literals(graph.results)
    return Sized(graph, shapes, constants, of_constants, equations, literals)

  def _literals(self, values: list) -> list:
    return [self._literal(v) for v in values if isinstance(v, Literal)]

  def _literal(self, literal: Literal):
    value = self._number()
    if isinstance(value, _Varying):
      return value.traced
    return np.asarray(literal.value, literal.dtype)

  def _constant_shape(self, shapes: tuple) -> Dims:
    """Return the shape of a constant, given its shape in each trace."""
    dims: list[int] = []
    for values in zip(*shapes):
      if all(value == values[0] for value in values):
        dims.append(values[0])
        continue
      group = self._partition.groups.get((_SIZES, values))
      if group is None:
        raise BucketError(
          f"A constant of the function has shape {list(shapes[0])} at the padded size, "
          f"and {list(shapes[-1])} at this one, which no operation's result has. "
          "Compute it from an argument, for example by `torch.arange(x.shape[1])`."
        )
      size = Size(values[0])
      size.values, size.group = values, group
      size.true = self._numbers[_SIZES][group[1]]
      dims.append(size)
    return tuple(dims)

  # Operations -----------------------------------------------------------------------

  def evaluate(self, sized: Sized, inputs: Sequence) -> list:
    """Run a graph on padded operands."""
    values = [*inputs, *sized.constants]
    shapes = [*sized.shapes, *sized.of_constants]
    found = dict(enumerate(zip(values, shapes)))
    for equation, (params, literals, outputs, parts) in zip(
      sized.graph.equations, sized.equations
    ):
      remaining = iter(literals)
      operands = [
        (next(remaining), ()) if isinstance(value, Literal) else found[value]
        for value in equation.inputs
      ]
      operation = Operation(
        equation, params, [shape for _, shape in operands], outputs, parts, self
      )
      self.around.append(equation)
      results = _run(operation, [value for value, _ in operands])
      self.around.pop()
      found.update(zip(equation.outputs, zip(results, outputs)))
    remaining = iter(sized.literals)
    return [
      next(remaining) if isinstance(value, Literal) else found[value][0]
      for value in sized.graph.results
    ]


class _Varying(NamedTuple):
  """Number that differs between sizes, and is no length."""

  traced: Any
  kind: str


def _by_trace(partition: Partition) -> tuple[list, list]:
  arrays = [values.arrays for values in partition.traces]
  shapes = [tuple([np.shape(array) for array in each]) for each in zip(*arrays)]
  return shapes, arrays[0]


def _run(operation: Operation, operands: list) -> list:
  name, params = operation.name, operation.params
  differing = [key for key, value in params.items() if differs(value)]
  shapes = [*operation.inputs, *operation.outputs]
  if name not in PARTS and not differing and not any(map(is_sized, shapes)):
    return operation.bind(*operands)
  found = Rules.known.get(name)
  if found is None:
    raise operation.refuse("it has no rule for padding")
  for key in differing:
    if key not in Rules.sized[name]:
      raise operation.refuse(f"its parameter {key!r} depends on the size")
  return found(operation, *operands)


def differs(value) -> bool:
  """Return True if a parameter depends on sizes."""
  return any(isinstance(leaf, Size | _Varying) for leaf in jax.tree.leaves(value))


# For rules ----------------------------------------------------------------------------


def is_true(shape: Dims, axis: int, padded: Sequence[int]) -> jax.Array:
  """Return bools of a padded shape: the element is not padding along an axis."""
  index = lax.broadcasted_iota(np.int32, padded, axis)
  return index < true(shape[axis])


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
