"""Shapes of exported programs: torch's symbols as JAX's, and whether arguments fit.

torch describes a dynamic dimension by a symbol with a range, or by an expression of
such symbols. `jax.export` has the same in strings: `"2*b, 3"` with `"b <= 16"`. The
expressions are sympy's, which takes half a second to import: here they are used by
their own methods, so that only programs with symbols load it.
"""

import dataclasses
import math
from typing import Any

import jax
import torch
from torch.export import ExportedProgram

from torchax.core import mappings

# No program has more elements than this; torch writes it for "no bound".
_UNBOUNDED = 2**62

_FUNCTIONS = {"FloorDiv": "floordiv", "Mod": "mod", "PythonMod": "mod"}
_FUNCTIONS |= {"CleanDiv": "floordiv", "Max": "max", "Min": "min"}


def text_of(expression) -> str:
  """A dimension as `jax.export.symbolic_shape` reads it.

  Args:
    expression: a sympy expression of torch's symbols, without products of sums.

  Raises:
    NotImplementedError: it has an operation that JAX's dimensions lack.
  """
  if expression.is_Integer or expression.is_Symbol:
    return str(expression)
  parts = [text_of(part) for part in expression.args]
  if expression.is_Add:
    return " + ".join(parts)
  if expression.is_Mul:
    return "*".join(parts)
  if expression.is_Pow and expression.exp.is_Integer and expression.exp > 0:
    return "*".join([parts[0]] * int(expression.exp))
  name = _FUNCTIONS.get(type(expression).__name__)
  if name is None:
    raise NotImplementedError(
      f"The dimension {expression} has {type(expression).__name__}, which JAX's "
      "symbolic dimensions lack. Export with a static size there."
    )
  while len(parts) > 2:
    parts = [f"{name}({parts[0]}, {parts[1]})", *parts[2:]]
  return f"{name}({', '.join(parts)})"


def _constraints(program: ExportedProgram) -> list[str]:
  """The ranges of the program's symbols. JAX takes every dimension for positive."""
  found = []
  for symbol, values in program.range_constraints.items():
    name = text_of(symbol.expand())
    if 1 < values.lower < _UNBOUNDED:
      found.append(f"{name} >= {int(values.lower)}")
    if values.upper < _UNBOUNDED:
      found.append(f"{name} <= {int(values.upper)}")
  return found


def avals(program: ExportedProgram) -> list[jax.ShapeDtypeStruct]:
  """What the program takes: shapes and dtypes of its array arguments, in order.

  Dynamic dimensions are symbols of `jax.export`, with torch's constraints. Arguments
  that torch has made constants (None, strings, numbers) are left out. A number that
  may change is an integer array without dimensions.

  Raises:
    NotImplementedError: a dimension that JAX cannot express.
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
  """A size as an expression of symbols, or as the integer that it is."""
  expression = size.node.expr if isinstance(size, torch.SymInt) else size
  return expression if getattr(expression, "free_symbols", ()) else int(expression)


def is_array(value) -> bool:
  """True for what is an operand of the program, False for a constant of it."""
  return isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)


def arguments(program: ExportedProgram) -> list[tuple[str, Any]]:
  """The user's arguments: names, and torch's stand-ins for their values."""
  placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
  found = []
  for spec in program.graph_signature.input_specs:
    if spec.kind is torch.export.graph_signature.InputKind.USER_INPUT:
      is_constant = isinstance(spec.arg, torch.export.graph_signature.ConstantArgument)
      value = spec.arg.value if is_constant else placeholders[spec.arg.name].meta["val"]
      found.append((spec.arg.name, value))
  return found


class Fitting:
  """Whether values fit the arguments of a program."""

  def __init__(self, program: ExportedProgram):
    self._arguments = arguments(program)
    self._ranges = program.range_constraints

  def require(self, values) -> None:
    """Raises unless shapes, dtypes and constants are those the program was made for.

    Raises:
      ValueError: another shape, or another value of a constant.
      TypeError: another dtype, or no array.
    """
    sizes: list[_Size] = []
    for (name, wanted), value in zip(self._arguments, values, strict=True):
      if isinstance(wanted, torch.Tensor):
        _require_array(name, wanted, value)
        for size, given in zip(wanted.shape, value.shape):
          sizes.append(_Size(name, wanted, value, _expression(size), given))
      elif not is_array(wanted):
        _require_constant(name, wanted, value)
    known: dict = {}
    # Symbols first: expressions of them are checked against their values.
    for size in sorted(sizes, key=lambda size: not _is_symbol(size.expression)):
      # Sizes that are symbols themselves fit: JAX compares those when it is called.
      if isinstance(size.given, int):
        self._require_size(size, known)

  def _require_size(self, size: "_Size", known: dict) -> None:
    expression = size.expression
    if isinstance(expression, int):
      if expression != size.given:
        raise ValueError(size.mismatch())
      return
    unknown = expression.free_symbols - known.keys()
    if len(unknown) == 1:
      (symbol,) = unknown
      value = _solved(expression, symbol, known, size.given)
      if value is None:
        raise ValueError(size.mismatch(f"which is no {expression}"))
      known[symbol] = value
      self._require_in_range(size, symbol, value)
    elif not unknown and expression.subs(known) != size.given:
      found = ", ".join(f"{symbol} = {known[symbol]}" for symbol in known)
      raise ValueError(size.mismatch(found))

  def _require_in_range(self, size: "_Size", symbol, value: int) -> None:
    values = self._ranges.get(symbol)
    if values is None:
      return
    # torch's own lower bound is 2 where nobody gave one; a size of 1 may work.
    lowest = values.lower if values.lower > 2 else 0
    if not lowest <= value <= values.upper:
      upper = values.upper if values.upper < _UNBOUNDED else "any size"
      reason = f"{symbol} = {value} is outside of {values.lower} to {upper}"
      raise ValueError(size.mismatch(reason))


def _is_symbol(expression) -> bool:
  return not isinstance(expression, int) and expression.is_Symbol


def _solved(expression, symbol, known, given: int) -> int | None:
  """The value of a symbol that gives an expression the value of a size."""
  if expression is symbol:
    return given
  # torch derives dimensions by sums and products with whole numbers only.
  roots = (expression.subs(known) - given).as_poly(symbol).ground_roots()
  return next((int(value) for value in roots if value.is_Integer), None)


@dataclasses.dataclass
class _Size:
  """One dimension of an argument.

  Attributes:
    name: of the argument.
    wanted: torch's stand-in for it.
    value: what was given.
    expression: what the size should be: of sympy, or an integer.
    given: what it is.
  """

  name: str
  wanted: torch.Tensor
  value: Any
  expression: Any
  given: Any

  def mismatch(self, reason: str = "") -> str:
    """The message for a size that does not fit."""
    return _mismatch(self.name, self.wanted, self.value, reason)


def _require_array(name, wanted, value) -> None:
  dtype = mappings.t2j_dtype(wanted.dtype)
  if not hasattr(value, "shape") or not hasattr(value, "dtype"):
    raise TypeError(
      f"Argument {name} should be an array of {dtype}{_shape(wanted)}, but got "
      f"{type(value).__name__}."
    )
  if jax.dtypes.canonicalize_dtype(value.dtype) != dtype:
    raise TypeError(
      f"Argument {name} should be of {dtype}, for which the program was exported, "
      f"but got {value.dtype}. Convert it with `.astype`."
    )
  if len(value.shape) != wanted.dim():
    raise ValueError(_mismatch(name, wanted, value))


def _mismatch(name, wanted, value, reason: str = "") -> str:
  reason = f" ({reason})" if reason else ""
  return (
    f"Argument {name} should have the shape {_shape(wanted)}, for which the program "
    f"was exported, but got {list(value.shape)}{reason}. Export it with "
    "`dynamic_shapes=` for the dimensions that change."
  )


def _shape(tensor) -> str:
  return "[" + ", ".join(map(str, tensor.shape)) + "]"


def _require_constant(name, wanted, value) -> None:
  if isinstance(value, jax.core.Tracer):
    return  # a number that became an operand of `jax.jit`; the program has its own
  is_equal = value is wanted or (
    isinstance(value, bool | int | float | str) and value == wanted
  )
  if not is_equal and not (isinstance(wanted, float) and math.isnan(wanted)):
    raise ValueError(
      f"Argument {name} was {wanted!r} when the program was exported and is a constant "
      f"of it, but got {value!r}. Export it once for each value."
    )
