"""Shapes of exported programs: conversion to JAX's symbols, and checks of arguments.

torch describes a dynamic dimension by a symbol with a range, or by an expression of
such symbols. `jax.export` uses strings: `"2*b, 3"` with `"b <= 16"`. The expressions
are sympy objects. sympy takes half a second to import, so this module only calls their
methods: programs without symbols never load it. Used by `export/__init__.py`.
"""

import dataclasses
import math
from typing import Any

import jax
import torch
from torch.export import ExportedProgram

from torchax.core import mappings

# torch's upper bound for an unbounded dimension.
_UNBOUNDED = 2**62

_FUNCTIONS = {"FloorDiv": "floordiv", "Mod": "mod", "PythonMod": "mod"}
_FUNCTIONS |= {"CleanDiv": "floordiv", "Max": "max", "Min": "min"}


def text_of(expression) -> str:
  """Return a dimension in the syntax of `jax.export.symbolic_shape`.

  Args:
    expression: a sympy expression of torch's symbols, without products of sums.

  Raises:
    NotImplementedError: the expression has an operation that JAX's dimensions lack.
  """
  if expression.is_Integer or expression.is_Symbol:
    return str(expression)
  texts = [text_of(part) for part in expression.args]
  if expression.is_Add:
    return " + ".join(texts)
  if expression.is_Mul:
    return "*".join(texts)
  if expression.is_Pow and expression.exp.is_Integer and expression.exp > 0:
    return "*".join([texts[0]] * int(expression.exp))
  name = _FUNCTIONS.get(type(expression).__name__)
  if name is None:
    raise NotImplementedError(
      f"The dimension {expression} has {type(expression).__name__}, which JAX's "
      "symbolic dimensions lack. Export with a static size there."
    )
  while len(texts) > 2:
    texts = [f"{name}({texts[0]}, {texts[1]})", *texts[2:]]
  return f"{name}({', '.join(texts)})"


def _constraints(program: ExportedProgram) -> list[str]:
  """Return the ranges of the program's symbols; JAX assumes dimensions >= 1."""
  constraints = []
  for symbol, values in program.range_constraints.items():
    name = text_of(symbol.expand())
    if 1 < values.lower < _UNBOUNDED:
      constraints.append(f"{name} >= {int(values.lower)}")
    if values.upper < _UNBOUNDED:
      constraints.append(f"{name} <= {int(values.upper)}")
  return constraints


def avals(program: ExportedProgram) -> list[jax.ShapeDtypeStruct]:
  """Return shapes and dtypes of the program's array arguments, in order.

  Dynamic dimensions are symbols of `jax.export`, with torch's constraints. Arguments
  that are constants of the program (None, strings, numbers) are left out. A number that
  may change is a 0-d array.

  Raises:
    NotImplementedError: JAX cannot express a dimension.
  """
  scope = jax.export.SymbolicScope(_constraints(program))
  return [_aval(value, scope) for _, value in arguments(program) if is_array(value)]


def _aval(value, scope) -> jax.ShapeDtypeStruct:
  if not isinstance(value, torch.Tensor):
    return jax.ShapeDtypeStruct((), mappings.t2j_dtype(_NUMBERS[type(value)]))
  text = ",".join(
    str(size) if isinstance(size, int) else text_of(size.expand())
    for size in map(_expression, value.shape)
  )
  shape = jax.export.symbolic_shape(text, scope=scope)
  return jax.ShapeDtypeStruct(shape, mappings.t2j_dtype(value.dtype))


_NUMBERS = {
  torch.SymInt: torch.int64,
  torch.SymFloat: torch.float64,
  torch.SymBool: torch.bool,
}


def _expression(size):
  """Return the symbolic expression of a size, or an integer if it has no symbols."""
  expression = size.node.expr if isinstance(size, torch.SymInt) else size
  return expression if getattr(expression, "free_symbols", ()) else int(expression)


def is_array(value) -> bool:
  """Return True for an operand of the program, False for a constant."""
  return isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)


def arguments(program: ExportedProgram) -> list[tuple[str, Any]]:
  """Return names and example values (fake tensors, symbols) of the user's arguments."""
  placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
  pairs = []
  for spec in program.graph_signature.input_specs:
    if spec.kind is torch.export.graph_signature.InputKind.USER_INPUT:
      is_constant = isinstance(spec.arg, torch.export.graph_signature.ConstantArgument)
      value = spec.arg.value if is_constant else placeholders[spec.arg.name].meta["val"]
      pairs.append((spec.arg.name, value))
  return pairs


class ArgumentCheck:
  """Check of values against the arguments that a program was exported for."""

  def __init__(self, program: ExportedProgram):
    self._arguments = arguments(program)
    self._ranges = program.range_constraints

  def require(self, values) -> None:
    """Check shapes, dtypes and constants.

    Raises:
      ValueError: a shape or the value of a constant differs.
      TypeError: a dtype differs, or the value is no array.
    """
    sizes: list[_Size] = []
    for (name, expected), value in zip(self._arguments, values, strict=True):
      if isinstance(expected, torch.Tensor):
        _require_array(name, expected, value)
        for size, actual in zip(expected.shape, value.shape):
          sizes.append(_Size(name, expected, value, _expression(size), actual))
      elif not is_array(expected):
        _require_constant(name, expected, value)
    solved: dict = {}
    # Symbols first: the check of an expression needs their values.
    sizes.sort(key=lambda size: not getattr(size.expression, "is_Symbol", False))
    for size in sizes:
      # Symbolic sizes pass: JAX compares them when the program is called.
      if isinstance(size.actual, int):
        self._require_size(size, solved)

  def _require_size(self, size: "_Size", solved: dict) -> None:
    expression = size.expression
    if isinstance(expression, int):
      if expression != size.actual:
        raise ValueError(size.mismatch())
      return
    unknown = expression.free_symbols - solved.keys()
    if len(unknown) == 1:
      (symbol,) = unknown
      value = _solve(expression, symbol, solved, size.actual)
      if value is None:
        raise ValueError(size.mismatch(f"which is no {expression}"))
      solved[symbol] = value
      self._require_in_range(size, symbol, value)
    elif not unknown and expression.subs(solved) != size.actual:
      equations = ", ".join(f"{symbol} = {solved[symbol]}" for symbol in solved)
      raise ValueError(size.mismatch(equations))

  def _require_in_range(self, size: "_Size", symbol, value: int) -> None:
    values = self._ranges.get(symbol)
    if values is None:
      return
    # Lower bound 2 is torch's default; a size of 1 may work.
    lowest = values.lower if values.lower > 2 else 0
    if not lowest <= value <= values.upper:
      upper = values.upper if values.upper < _UNBOUNDED else "any size"
      reason = f"{symbol} = {value} is outside of {values.lower} to {upper}"
      raise ValueError(size.mismatch(reason))


def _solve(expression, symbol, solved, actual: int) -> int | None:
  """Solve `expression == actual` for a symbol; None if no integer solves it."""
  if expression is symbol:
    return actual
  # torch derives dimensions only by sums and products with integers.
  roots = (expression.subs(solved) - actual).as_poly(symbol).ground_roots()
  return next((int(value) for value in roots if value.is_Integer), None)


@dataclasses.dataclass
class _Size:
  """Dimension of an argument, expected and actual.

  Attributes:
    name: name of the argument.
    expected: fake tensor of the export.
    value: the argument.
    expression: expected size, a sympy expression or an integer.
    actual: actual size.
  """

  name: str
  expected: torch.Tensor
  value: Any
  expression: Any
  actual: Any

  def mismatch(self, reason: str = "") -> str:
    """Return the error message for a size that does not fit."""
    return _mismatch(self.name, self.expected, self.value, reason)


def _require_array(name, expected, value) -> None:
  dtype = mappings.t2j_dtype(expected.dtype)
  if not hasattr(value, "shape") or not hasattr(value, "dtype"):
    raise TypeError(
      f"Argument {name} should be an array of {dtype}{_shape(expected)}, but got "
      f"{type(value).__name__}."
    )
  if dtype not in (value.dtype, jax.dtypes.canonicalize_dtype(value.dtype)):
    raise TypeError(
      f"The exported program expects argument {name} of {dtype}, "
      f"but got {value.dtype}. Convert it with `.astype`."
    )
  if len(value.shape) != expected.dim():
    raise ValueError(_mismatch(name, expected, value))


def _mismatch(name, expected, value, reason: str = "") -> str:
  reason = f" ({reason})" if reason else ""
  return (
    f"Argument {name} should have the shape {_shape(expected)}, for which the program "
    f"was exported, but got {list(value.shape)}{reason}. Export it with "
    "`dynamic_shapes=` for the dimensions that change."
  )


def _shape(tensor) -> str:
  return "[" + ", ".join(map(str, tensor.shape)) + "]"


def _require_constant(name, expected, value) -> None:
  if isinstance(value, jax.core.Tracer):
    return  # an operand of `jax.jit`; the program uses its own constant
  is_equal = value is expected or (
    isinstance(value, bool | int | float | str) and value == expected
  )
  if not is_equal and not (isinstance(expected, float) and math.isnan(expected)):
    raise ValueError(
      f"Argument {name} was {expected!r} when the program was exported and is a "
      f"constant of it, but got {value!r}. Export it once for each value."
    )
