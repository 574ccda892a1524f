"""Graphs: jaxprs whose numbers can be compared, one by one, with another trace's.

Traces of one function at two sizes have the same operations. Their numbers differ:
lengths of axes, parameters such as the start of a slice, literals, constants. `align`
walks both traces together and returns the numbers of the first in the order of the
second, the template.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from torchax.compat import jax_compat, user_code
from torchax.errors import BucketError

# Parameters of the operations that call other jaxprs, with these jaxprs.
PARTS: dict[str, tuple[str, ...]] = {
  "jit": ("jaxpr",),
  "closed_call": ("call_jaxpr",),
  "eval_jaxpr": ("call_jaxpr",),  # its name since JAX 0.12
  "checkpoint": ("jaxpr",),
  "remat2": ("jaxpr",),
  "custom_jvp_call": ("call_jaxpr",),
  "custom_vjp_call": ("call_jaxpr", "fun_jaxpr"),
  "scan": ("jaxpr",),
  "while": ("cond_jaxpr", "body_jaxpr"),
  "cond": ("branches",),
}
# Parameters that matter for these; all for the other operations.
_KEPT = {
  "scan": ("length", "reverse", "num_consts", "num_carry", "unroll"),
  "while": ("cond_nconsts", "body_nconsts"),
  "checkpoint": ("prevent_cse", "differentiated"),
  "remat2": ("prevent_cse", "differentiated"),
}
# Operations that JAX leaves out where they change nothing, as `x[:n]` of n rows.
_MAY_BE_LEFT_OUT = ("slice", "pad")

SIZES = "sizes"
"""Kind of a number of a shape or a parameter; literals have their dtype."""


class Literal(NamedTuple):
  """Number in the code of a trace, as an operand of an operation."""

  value: Any
  dtype: np.dtype


@dataclasses.dataclass(slots=True)
class Equation:
  """Operation of a graph.

  Attributes:
    jax: JAX's operation.
    inputs: indices of values in the graph, and literals.
    outputs: indices of the results.
    params: JAX's parameters without the parts.
    shapes: shapes of the results.
    parts: graphs that it calls.
    form: everything except for the numbers; equal for traces that differ in sizes.
  """

  jax: core.JaxprEqn
  inputs: list
  outputs: list[int]
  params: dict[str, Any]
  shapes: list[tuple]
  parts: "list[Graph]"
  form: tuple

  @property
  def name(self) -> str:
    return self.jax.primitive.name

  def describe(self, around: "Sequence[Equation]" = ()) -> str:
    """Return the operation's name, with the user's line if JAX knows it.

    Args:
      around: operations that call this one, from the outermost to the innermost.
    """
    for equation in (self, *reversed(around)):
      line = jax_compat.line_of(equation.jax.source_info, user_code.LIBRARIES)
      if line is not None:
        return f"`{self.name}` ({line[0]}:{line[1]})"
    return f"`{self.name}`"


@dataclasses.dataclass(slots=True)
class Graph:
  """Operations in their order, of a trace or of a function that it calls.

  Values are numbered: inputs, constants, then results of operations.

  Attributes:
    shapes: shapes of the inputs and constants.
    constants: arrays that the trace closes over.
    equations: the operations.
    results: indices of the results, and literals.
    size: number of values.
  """

  shapes: list[tuple]
  constants: list
  equations: list[Equation]
  results: list
  size: int

  @classmethod
  def of(cls, jaxpr: core.ClosedJaxpr | core.Jaxpr) -> "Graph":
    """Read a jaxpr."""
    constants = list(jaxpr.consts) if isinstance(jaxpr, core.ClosedJaxpr) else []
    inner = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    indices: dict = {}
    numbers = itertools.count()

    def define(variables) -> list[int]:
      found = list(itertools.islice(numbers, len(variables)))
      indices.update(zip(variables, found))
      return found

    def use(atom):
      if isinstance(atom, core.Literal):
        return Literal(atom.val, atom.aval.dtype)
      return indices[atom]

    given = [*inner.invars, *inner.constvars]
    define(given)
    equations = [_equation(eqn, use, define) for eqn in inner.eqns]
    shapes = [_shape(variable) for variable in given]
    results = [use(atom) for atom in inner.outvars]
    return cls(shapes, constants, equations, results, next(numbers))

  def copy(self) -> "Graph":
    """Return a copy that may get more operations."""
    equations = [
      dataclasses.replace(each, parts=[part.copy() for part in each.parts])
      for each in self.equations
    ]
    return dataclasses.replace(self, equations=equations)

  def numbers(self) -> Iterator[tuple[str, Any]]:
    """Yield the kind and value of each number, in the order of `map`."""
    for shape in self.shapes:
      yield from [(SIZES, size) for size in shape]
    for equation in self.equations:
      for leaf in filter(_is_number, jax.tree.leaves(equation.params)):
        yield SIZES, _plain(leaf)
      yield from _literals(equation.inputs)
      for shape in equation.shapes:
        yield from [(SIZES, size) for size in shape]
      for part in equation.parts:
        yield from part.numbers()
    yield from _literals(self.results)

  def arrays(self) -> Iterator:
    """Yield all constants, in the order of `map`."""
    yield from self.constants
    for equation in self.equations:
      for part in equation.parts:
        yield from part.arrays()

  def map(self, number: Callable, literal: Callable, array: Callable) -> "Graph":
    """Return a copy with `number(n)`, `literal(l)` and `array(a)` for its values."""

    def dims(shape) -> tuple:
      return tuple([number(size) for size in shape])

    def literals(values) -> list:
      return [literal(v) if isinstance(v, Literal) else v for v in values]

    def parameter(leaf):
      return number(leaf) if _is_number(leaf) else leaf

    shapes = [dims(shape) for shape in self.shapes]
    constants = [array(constant) for constant in self.constants]
    equations = [
      dataclasses.replace(
        each,
        params=jax.tree.map(parameter, each.params),
        inputs=literals(each.inputs),
        shapes=[dims(shape) for shape in each.shapes],
        parts=[part.map(number, literal, array) for part in each.parts],
      )
      for each in self.equations
    ]
    return Graph(shapes, constants, equations, literals(self.results), self.size)


_name = functools.cache(str)  # numpy builds a dtype's name at each call


def _shape(atom) -> tuple:
  return tuple(getattr(atom.aval, "shape", ()))


def _plain(value):
  """Return a Python number; NaN, which differs from itself, as text."""
  if isinstance(value, np.ndarray | np.generic | jax.Array):
    value = np.asarray(value).item()
  return "nan" if value != value else value


def _is_number(leaf) -> bool:
  """Return True for a number of a parameter, which may depend on sizes."""
  is_bool = isinstance(leaf, bool)
  return isinstance(leaf, int | float | np.integer | np.floating) and not is_bool


def _literals(values: list) -> list[tuple[str, Any]]:
  return [(_name(v.dtype), _plain(v.value)) for v in values if isinstance(v, Literal)]


def _equation(eqn, use, define) -> Equation:
  name = eqn.primitive.name
  inputs = [use(atom) for atom in eqn.invars]
  parts = [
    Graph.of(part)
    for key in PARTS.get(name, ())
    if key in eqn.params
    for part in _listed(eqn.params[key])
  ]
  kept = _KEPT.get(name, () if name in PARTS else tuple(eqn.params))
  params = {key: eqn.params[key] for key in kept if key in eqn.params}
  leaves, treedef = jax.tree.flatten(params)
  shapes = [_shape(variable) for variable in eqn.outvars]
  form = (
    name,
    treedef,
    tuple([_Form(leaf) for leaf in leaves if not _is_number(leaf)]),
    tuple([v.dtype if isinstance(v, Literal) else None for v in inputs]),
    tuple([_type(v) for v in eqn.outvars]),
    len(parts),
  )
  return Equation(eqn, inputs, define(eqn.outvars), params, shapes, parts, form)


def _listed(value) -> tuple:
  return tuple(value) if isinstance(value, tuple | list) else (value,)


def _type(variable) -> tuple:
  return getattr(variable.aval, "dtype", None), len(_shape(variable))


class _Form:
  """Parameter that is no number. Functions are equal: their results are compared."""

  __slots__ = ("value",)

  def __init__(self, value):
    self.value = value

  def __eq__(self, other):
    if callable(self.value) and not isinstance(self.value, type | np.dtype):
      return type(self.value) is type(other.value)
    return bool(self.value == other.value)

  __hash__ = None  # type: ignore[assignment]


class Values(NamedTuple):
  """Numbers and constants of a trace, in the order of the template."""

  numbers: list
  arrays: list

  @classmethod
  def of(cls, template: Graph) -> "Values":
    return cls(list(template.numbers()), list(template.arrays()))


def align(graph: Graph, template: Graph) -> tuple[Values, bool]:
  """Return the values of a graph in the order of a template.

  Operations that the template lacks because they change nothing at its sizes are added
  to it; then the second result is True.

  Raises:
    BucketError: the operations differ.
  """
  has_added = _Alignment(graph, template, []).walk()
  return Values.of(graph), has_added


class _Alignment:
  """Walk of a graph and its template; both get the identities of the other one.

  Attributes:
    around: operations that call these graphs.
    known: index of a value in the template, by its index in the graph.
    same: index of the value whose elements an added operation returns, by its own.
  """

  def __init__(self, graph: Graph, template: Graph, around: list[Equation]):
    self.graph, self.template, self.around = graph, template, around
    self.known: dict[int | None, int] = {n: n for n in range(len(graph.shapes))}
    self.same: dict[int | None, int] = {}

  def walk(self) -> bool:
    """Return True if the template has got operations."""
    graph, template = self.graph, self.template
    if [*map(len, graph.shapes)] != [*map(len, template.shapes)]:
      raise BucketError(_OTHER.format("takes other operands"))
    self._require_shorter(graph, template)
    has_added, position = False, 0
    while position < max(len(template.equations), len(graph.equations)):
      ours = _at(graph.equations, position)
      other = _at(template.equations, position)
      if ours is None or other is None or not self._is_same(ours, other):
        has_added |= self._add_identity(ours, other, position)
        continue
      other.inputs = self._inputs(ours.inputs, other.inputs)
      self._require_shorter(ours, other)
      for parts in zip(ours.parts, other.parts):
        has_added |= _Alignment(*parts, [*self.around, ours]).walk()
      self.known.update(zip(ours.outputs, other.outputs))
      position += 1
    ours_out = [*map(self._kind_of_ours, graph.results)]
    if ours_out != [*map(self._kind, template.results)]:
      raise BucketError(_OTHER.format("returns other results"))
    template.results = self._inputs(graph.results, template.results)
    return has_added

  def _inputs(self, ours: list, template: list) -> list:
    return [
      value if isinstance(value, Literal) else self.known[index]
      for value, index in zip(template, ours)
    ]

  def _require_shorter(self, ours: Graph | Equation, other: Graph | Equation) -> None:
    """Refuse a constant or result that would not fit into the padded one."""
    for shape, padded in zip(ours.shapes, other.shapes):
      if any(size > most for size, most in zip(shape, padded)):
        name = "constant"
        if isinstance(ours, Equation):
          name = f"result of {ours.describe(self.around)}"
        raise BucketError(
          f"A {name} has the shape {list(shape)} at this size, but {list(padded)} at "
          "the padded one, which is smaller. Sizes that shrink while an argument grows "
          "cannot be padded."
        )

  def _is_same(self, ours: Equation, other: Equation) -> bool:
    inputs = [*map(self._kind_of_ours, ours.inputs)]
    return ours.form == other.form and inputs == [*map(self._kind, other.inputs)]

  def _kind_of_ours(self, value):
    is_literal = isinstance(value, Literal)
    return _name(value.dtype) if is_literal else self._kind(self.known.get(value))

  def _kind(self, value):
    is_literal = isinstance(value, Literal)
    return _name(value.dtype) if is_literal else self.same.get(value, value)

  def _add_identity(self, ours, other, position: int) -> bool:
    """Add an operation that changes nothing to the trace without it, or raise.

    Return True for the template.
    """
    if ours is not None and _may_be_left_out(ours):
      index = self.known.get(ours.inputs[0])
      shape = _shape_in(self.template, index)
      if shape is not None:
        new = _insert(self.template, position, ours, index, shape)
        self.same[new] = self._kind(index)
        return True
    if other is not None and _may_be_left_out(other):
      target = self._kind(other.inputs[0])
      index = next((i for i, t in self.known.items() if self._kind(t) == target), None)
      shape = _shape_in(self.graph, index)
      if shape is not None:
        _insert(self.graph, position, other, index, shape)
        self.same[other.outputs[0]] = target
        return False
    raise BucketError(_message(ours, other, self.around))


_OTHER = (
  "The function {} at this size than at the padded one. Programs of a bucket run the "
  "same operations for all its sizes."
)


def _message(
  ours: Equation | None, other: Equation | None, around: Sequence[Equation]
) -> str:
  names = [each.describe(around) if each else "nothing" for each in (ours, other)]
  return (
    f"The function runs {names[0]} at this size, but {names[1]} at the padded one. "
    "Programs of a bucket run the same operations for all its sizes. Take the choice "
    "out of the function, or give the size a bucket of its own."
  )


def _at(equations: list, position: int) -> Equation | None:
  return equations[position] if position < len(equations) else None


def _may_be_left_out(equation: Equation) -> bool:
  is_alone = all(isinstance(value, Literal) for value in equation.inputs[1:])
  return equation.name in _MAY_BE_LEFT_OUT and is_alone


def _shape_in(graph: Graph, index) -> tuple | None:
  """Return the shape of a value of a graph; None if it is unknown."""
  if index is None or isinstance(index, Literal):
    return None
  if index < len(graph.shapes):
    return graph.shapes[index]
  for equation in graph.equations:
    if index in equation.outputs:
      return equation.shapes[equation.outputs.index(index)]
  return None


def _insert(graph: Graph, position: int, pattern: Equation, index, shape) -> int:
  """Insert an operation like `pattern` that returns a value; return its index there."""
  new, graph.size = graph.size, graph.size + 1
  equation = dataclasses.replace(
    pattern,
    inputs=[index, *pattern.inputs[1:]],
    outputs=[new],
    params=_identity(pattern, shape),
    shapes=[shape],
  )
  graph.equations.insert(position, equation)
  return new


def _identity(pattern: Equation, shape: tuple) -> dict[str, Any]:
  """Return the parameters with which an operation changes nothing."""
  if pattern.name == "pad":
    return {"padding_config": ((0, 0, 0),) * len(shape)}
  return {
    "limit_indices": shape,
    "start_indices": (0,) * len(shape),
    "strides": None if pattern.params["strides"] is None else (1,) * len(shape),
  }
