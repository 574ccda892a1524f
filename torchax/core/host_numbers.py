"""Python numbers that a compiled function takes as operands, such as a learning rate.

In a trace such a number is a `HostNumber`. Arithmetic on it builds an expression, which
every call evaluates in Python's precision. If an operation takes the result, it becomes
an operand of the compiled function. If Python needs the value (`if`, `float()`, a
static argument), the expression becomes a guard.

torch passes it through its C++ as a symbolic float, whose node is the expression.
"""

import contextlib
import operator
import threading
import weakref
from collections.abc import Callable

import torch

from torchax.compat.patches import setting
from torchax.core.boundary import Boundary
from torchax.core.static_values import Identity, key_of
from torchax.core.storage import active

_SIGNS = {
  operator.add: "+",
  operator.sub: "-",
  operator.mul: "*",
  operator.truediv: "/",
  operator.floordiv: "//",
  operator.mod: "%",
  operator.pow: "**",
  operator.lt: "<",
  operator.le: "<=",
  operator.gt: ">",
  operator.ge: ">=",
  operator.eq: "==",
  operator.ne: "!=",
}


_DIVISIONS = {operator.truediv, operator.floordiv, operator.mod}


class Expression:
  """Number computed on the host; hashed by its formula, not by its current value.

  Args:
    operation: a Python function, such as `operator.add`.
    parts: its arguments: expressions and numbers.
  """

  __slots__ = ("operation", "parts", "_hash")

  def __init__(self, operation: Callable, *parts):
    self.operation, self.parts = operation, parts
    self._hash = hash((operation, *map(_key, parts)))

  def __hash__(self):
    return self._hash

  def __eq__(self, other):
    return (
      type(other) is type(self)
      and self._hash == other._hash
      and self.operation is other.operation
      and list(map(_key, self.parts)) == list(map(_key, other.parts))
    )

  def now(self):
    """Return the current value."""
    return self.operation(
      *[p.now() if isinstance(p, Expression) else p for p in self.parts]
    )

  def __str__(self) -> str:
    texts = [
      f"({part})" if type(part) is Expression else str(part) for part in self.parts
    ]
    sign = _SIGNS.get(self.operation)
    if sign is not None and len(texts) == 2:
      return f"{texts[0]} {sign} {texts[1]}"
    name = getattr(self.operation, "__name__", str(self.operation))
    return f"{name}({', '.join(texts)})"

  def describe(self) -> str:
    """Return the current value as text, for messages."""
    return repr(self.now())

  # Methods that torch's C++ calls on the node of a symbolic float.

  def guard_float(self, file, line) -> float:
    """Return the value and guard on it."""
    return decide(self)

  def is_float(self) -> bool:
    """Return True."""
    return True

  def is_int(self) -> bool:
    """Return False."""
    return False

  is_bool = is_nested_int = is_constant = is_int
  is_symbolic = has_hint = is_float

  def maybe_as_float(self) -> None:
    """Return None: the number is no constant."""

  def _graph_repr(self) -> str:
    return repr(self.now())


class Entry(Expression):
  """Number of an optimizer, looked up at each call.

  `load_state_dict` replaces the groups, so each lookup starts at the optimizer. If the
  optimizer is gone or has no such number, the value is 0.0. Programs that use the
  number guard on the optimizer as well.

  Args:
    optimizer: an optimizer; referenced weakly.
    owner: where the number is: index of a parameter group, `Identity` of a parameter
      for its state, or None for the attributes of the optimizer.
    name: key of the number there.
    index: index into the entry, if that is a tuple of numbers.

  Attributes:
    in_trace: the number when a trace has put a `HostNumber` in its place.
  """

  __slots__ = ("optimizer", "label", "owner", "name", "index", "in_trace")

  def __init__(self, optimizer, owner, name: str, index: int | None = None):
    self.optimizer, self.label = weakref.ref(optimizer), type(optimizer).__name__
    self.owner, self.name, self.index = owner, name, index
    self.in_trace = 0.0
    self.operation, self.parts = operator.getitem, ()
    self._hash = hash((id(optimizer), owner, name, index))

  def __eq__(self, other):
    return (
      type(other) is Entry
      and self.optimizer is other.optimizer
      and (self.owner, self.name, self.index) == (other.owner, other.name, other.index)
    )

  __hash__ = Expression.__hash__

  def __str__(self) -> str:
    if self.owner is None:
      return f"{self.label}.{self.name}"
    place = f"param_groups[{self.owner}]"
    if isinstance(self.owner, Identity):
      groups = getattr(self.optimizer(), "param_groups", [])
      parameters = [Identity(p) for group in groups for p in group["params"]]
      is_known = self.owner in parameters
      key = parameters.index(self.owner) if is_known else repr(self.owner.value)
      place = f"state[{key}]"
    index = "" if self.index is None else f"[{self.index}]"
    return f"{self.label}.{place}[{self.name!r}]{index}"

  def now(self):
    value = self._table().get(self.name)
    if self.index is not None:
      is_entry = isinstance(value, tuple) and self.index < len(value)
      value = value[self.index] if is_entry else None
    if isinstance(value, torch.Tensor):
      with setting(active, "boundary", None):  # a trace would guard on the tensor
        value = value.item()
    if isinstance(value, HostNumber):
      return self.in_trace
    return value if isinstance(value, float | int) else 0.0

  def set(self, value) -> None:
    """Set the entry of the optimizer; a tensor keeps its identity."""
    optimizer = self.optimizer()
    if optimizer is not None and isinstance(self.owner, Identity):
      optimizer.state.setdefault(self.owner.value, {})
    table = self._table()
    known = table.get(self.name)
    if isinstance(known, torch.Tensor) and isinstance(value, float | int):
      with torch.no_grad():
        known.fill_(value)
    else:
      table[self.name] = value

  def _table(self) -> dict:
    """Return the dict that has the number; an empty one if it is gone."""
    optimizer = self.optimizer()
    if optimizer is None or self.owner is None:
      return {} if optimizer is None else vars(optimizer)
    if isinstance(self.owner, Identity):
      return optimizer.state.get(self.owner.value, {})
    groups = optimizer.param_groups
    return groups[self.owner] if self.owner < len(groups) else {}


class _Given(threading.local):
  """Values of number arguments in the current call on this thread."""

  numbers: dict["Argument", float] = {}


_given = _Given()


def argument_values(
  numbers: dict["Argument", float],
) -> contextlib.AbstractContextManager[None]:
  """Set the values of number arguments inside the block."""
  return setting(_given, "numbers", {**_given.numbers, **numbers})


def current_argument_values() -> dict["Argument", float]:
  """Return the current values of number arguments."""
  return _given.numbers


class Argument(Expression):
  """Number that is an argument of the compiled function.

  Args:
    owner: hashable object that distinguishes functions; compared by identity.
    name: name of the argument.
  """

  __slots__ = ("owner", "name")

  def __init__(self, owner, name: str):
    self.owner, self.name = owner, name
    self.operation, self.parts = operator.getitem, ()
    self._hash = hash((owner, name))

  def __eq__(self, other):
    return (
      type(other) is Argument and self.owner is other.owner and self.name == other.name
    )

  __hash__ = Expression.__hash__

  def __str__(self) -> str:
    return self.name

  def now(self):
    return _given.numbers[self]


def _key(part):
  return part if isinstance(part, Expression) else key_of(part)


def decide(expression: Expression):
  """Return the value of an expression and guard on it: the trace depends on it."""
  if active.boundary is not None:
    for guards in active.boundary.guards_around():
      guards.guard_on_number(expression)
  return expression.now()


def operand(number: torch.SymFloat):
  """Return the number as an operand of an operation; a tracer inside a trace."""
  expression = number.node
  boundary: Boundary | None = active.boundary
  if boundary is None or not isinstance(expression, Expression):
    return float(number)
  return boundary.number(expression)


def concretize(value):
  """Replace symbolic floats in an argument by Python floats, and guard on them."""
  if isinstance(value, torch.SymFloat):
    return float(value)
  if type(value) in (list, tuple) and any(isinstance(v, torch.SymFloat) for v in value):
    return type(value)(map(concretize, value))
  return value


def _is_zero(number) -> bool:
  is_expression = isinstance(number, Expression)
  return decide(Expression(operator.eq, number, 0)) if is_expression else number == 0


def _binary(
  operation: Callable, swapped: bool = False, result: Callable | None = None
) -> Callable:
  def method(self, other):
    if isinstance(other, HostNumber):
      other = other.node
    elif not isinstance(other, int | float):
      return NotImplemented
    operands = (other, self.node) if swapped else (self.node, other)
    if operation in _DIVISIONS and _is_zero(operands[1]):
      raise ZeroDivisionError(f"{operands[0]} {_SIGNS[operation]} {operands[1]}")
    return (result or HostNumber)(Expression(operation, *operands))

  return method


def _comparison(operation: Callable) -> Callable:
  return _binary(operation, result=decide)


def _unary(operation: Callable) -> Callable:
  return lambda self: HostNumber(Expression(operation, self.node))


def calculate(function: Callable, *args):
  """Return `function(*args)` of numbers, some of them `HostNumber` objects."""
  parts = [arg.node if isinstance(arg, HostNumber) else arg for arg in args]
  return HostNumber(Expression(function, *parts))


class HostNumber(torch.SymFloat):
  """Symbolic float for a host number in a trace; see the module docstring."""

  __add__, __radd__ = _binary(operator.add), _binary(operator.add, True)
  __sub__, __rsub__ = _binary(operator.sub), _binary(operator.sub, True)
  __mul__, __rmul__ = _binary(operator.mul), _binary(operator.mul, True)
  __truediv__ = _binary(operator.truediv)
  __rtruediv__ = _binary(operator.truediv, True)
  __floordiv__ = _binary(operator.floordiv)
  __rfloordiv__ = _binary(operator.floordiv, True)
  __mod__, __rmod__ = _binary(operator.mod), _binary(operator.mod, True)
  __pow__, __rpow__ = _binary(operator.pow), _binary(operator.pow, True)
  __neg__, __pos__ = _unary(operator.neg), _unary(operator.pos)
  __abs__ = _unary(abs)
  __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
  __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)
  __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)

  def __float__(self) -> float:
    return float(decide(self.node))

  def __int__(self) -> int:
    return decide(Expression(int, self.node))

  __trunc__ = __int__

  def __index__(self) -> int:
    return operator.index(decide(self.node))

  def __round__(self, digits=None):
    return round(float(self), digits)

  def __bool__(self) -> bool:
    return decide(Expression(bool, self.node))

  def __hash__(self) -> int:
    return hash(float(self))

  def __repr__(self) -> str:
    return repr(self.node.now())
