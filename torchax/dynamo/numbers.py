"""Numbers among the inputs of Dynamo's graphs on jax, and which of them are operands.

Dynamo hands over Python numbers in its own way: a float that changes is a 0-d tensor on
the CPU that the graph calls `item()` of, an integer is a symbol. Another number needs
no other program where it only is computed with, or says where in a tensor something
lies. What else becomes of it may decide what is computed.
"""

import enum
import operator
from collections.abc import Callable

import torch
from torch import fx

from torchax.compat import torch_compat
from torchax.functions import indexing
from torchax.graphs.fx import example, example_tensors, inputs


class Use(enum.Enum):
  """How a graph takes a number."""

  OPERAND = "operand"  # a tensor without dimensions, inside of the trace
  HOST = "host"  # a number of the host, of which operations make operands
  EXPONENT = "exponent"  # as an operand, but for exponents with code of their own
  CONSTANT = "constant"


def of_floats(graph: fx.Graph) -> dict[int, Use]:
  """Has the graph take Python floats where it calls `item()` of its inputs.

  Returns:
    The places of these inputs, and how the graph takes them.
  """
  uses = {}
  for place, node in enumerate(inputs(graph)):
    value = example(node)
    if not isinstance(value, torch.Tensor) or value.dim() or not node.users:
      continue
    if value.dtype is not torch.float64 or value.device.type != "cpu":
      continue
    items = list(node.users)
    if all(user.op == "call_method" and user.target == "item" for user in items):
      if all(map(_is_arithmetic, items)):
        uses[place] = Use.OPERAND
      else:
        uses[place] = Use.HOST if all(map(_is_for_host, items)) else Use.CONSTANT
      for item in items:
        item.replace_all_uses_with(node)
        graph.erase_node(item)
  return uses


def of_integers(graph: fx.Graph) -> dict[int, Use]:
  """Has the graph take elements and slices from integers that it is given.

  Dynamo's guards keep positions in range.

  Returns:
    The places of integers of which another one needs no other program, and how the
    graph takes them.
  """
  uses = {}
  for place, node in enumerate(inputs(graph)):
    if not isinstance(example(node), torch.SymInt) or not node.users:
      continue
    if all(_takes_integer(user, node) for user in node.users):
      uses[place] = Use.OPERAND
    elif all(_is_power(user, node) for user in node.users):
      uses[place] = Use.EXPONENT
    elif all(_is_bound(user) for user in node.users):
      uses[place] = Use.HOST
  for node in list(graph.nodes):
    _place(node)
  return uses


# Exponents of products and roots, and those that powers of integers refuse.
SIMPLE_EXPONENTS = frozenset({-2, -1, 0, 1, 2, 3})


def fits(number) -> bool:
  """True for a float, and for an integer that 32 bits hold."""
  return type(number) is float or -(2**31) <= number < 2**31


# Arithmetic ---------------------------------------------------------------------------


def _is_arithmetic(number: fx.Node) -> bool:
  """True for a number of which only arithmetic makes use."""
  return all(
    _is_arithmetic_operation(user)
    and (
      _is_arithmetic(user)
      if isinstance(example(user), torch.SymFloat)
      else all(t.is_floating_point() for n in user.all_input_nodes for t in _tensors(n))
    )
    for user in number.users
  )


def _is_arithmetic_operation(node: fx.Node) -> bool:
  """True for `x + y`, `torch.add(x, y)` and `x.add(y)`, without further arguments."""
  if node.op == "call_method":
    return node.target in _METHODS and not node.kwargs
  return node.op == "call_function" and node.target in _ARITHMETIC and not node.kwargs


def _is_for_host(number: fx.Node) -> bool:
  """True where operations of torch's own take a number, or Python's arithmetic does."""
  return all(
    user.target in _OF_NUMBERS and _is_for_host(user)
    if isinstance(example(user), _SYMBOLS)
    else user.op in ("output", "call_method") or _is_of_torch(user)
    for user in number.users
  )


def _is_of_torch(node: fx.Node) -> bool:
  is_function = node.op == "call_function" and not isinstance(
    node.target, torch_compat.HigherOrderOperator | torch_compat.OpOverload
  )
  return is_function and getattr(node.target, "__module__", None) in _MODULES


def _scales(user: fx.Node) -> bool:
  """True for sums, products and comparisons with tensors; powers are special."""
  tensors = [t for n in user.all_input_nodes for t in _tensors(n)]
  if not tensors or user.kwargs or user.target in _POWERS:
    return False
  if _is_arithmetic_operation(user):
    is_exact = user.target in _EXACT
    return all(t.is_floating_point() or (is_exact and _is_wide(t)) for t in tensors)
  is_comparison = user.target in _COMPARISONS
  return is_comparison and all(t.is_floating_point() or _is_wide(t) for t in tensors)


def _is_wide(tensor) -> bool:
  """True for integers that a position fits in."""
  return tensor.dtype in (torch.int32, torch.int64)


def _is_power(user: fx.Node, exponent: fx.Node) -> bool:
  """True for a floating-point tensor to the power of a number."""
  if user.target not in _POWERS or user.kwargs or len(user.args) != 2:
    return False
  base, power = user.args
  tensors = _tensors(base) if isinstance(base, fx.Node) else []
  return power is exponent and bool(tensors) and tensors[0].is_floating_point()


def _is_bound(user: fx.Node) -> bool:
  """True for a floating-point tensor that is held against a number."""
  tensors = [t for n in user.all_input_nodes for t in _tensors(n)]
  is_method = user.op == "call_method" and user.target in _BOUNDS
  return is_method and bool(tensors) and all(t.is_floating_point() for t in tensors)


# Positions ----------------------------------------------------------------------------


def _takes_integer(user: fx.Node, number: fx.Node) -> bool:
  """True where another integer needs no other program."""
  if isinstance(example(user), torch.SymInt):
    is_sum = user.target in _SUMS
    return is_sum and all(_takes_integer(later, user) for later in user.users)
  return _scales(user) or _is_position(user, number)


def _is_position(user: fx.Node, number: fx.Node) -> bool:
  """True for an integer that says where in a tensor something is read or written."""
  if user.target is operator.setitem:
    tensor, index, value = user.args
    is_read = value is not number
    return is_read and _is_on_jax(tensor) and _is_part(number, _parts(index))
  if _selection(user) is not None:
    _, index = _selection(user)
    return index is number and _is_only_read(user)
  if _slice(user) is not None:
    return _is_only_read(user) and _is_in_slice(user, number)
  if user.target is operator.getitem and not user.kwargs:
    tensor, index = user.args
    is_basic = _is_on_jax(tensor) and _is_part(number, _parts(index))
    return is_basic and _is_only_read(user)
  return False


def _is_on_jax(node) -> bool:
  return isinstance(node, fx.Node) and bool(_tensors(node))


def _parts(index) -> tuple:
  return index if isinstance(index, tuple) else (index,)


def _is_part(number: fx.Node, parts) -> bool:
  """True where a number is an index itself, beside numbers and slices without it."""
  slices = [part for part in parts if isinstance(part, slice)]
  bounds = [bound for s in slices for bound in (s.start, s.stop, s.step)]
  return any(part is number for part in parts) and not any(
    isinstance(bound, fx.Node) for bound in bounds
  )


def _selection(node: fx.Node) -> tuple[int, object] | None:
  """(dim, index) of `torch.select(x, dim, index)`; None for anything else."""
  is_select = node.target in (torch.select, "select") and not node.kwargs
  if not is_select or len(node.args) != 3 or not _is_on_jax(node.args[0]):
    return None
  _, dim, index = node.args
  return (dim, index) if type(dim) is int and dim >= 0 else None


def _slice(node: fx.Node) -> tuple[tuple, int, object, int] | None:
  """(index, dim, start, length) where a slice of known length starts at a symbol.

  That is `x.narrow(dim, start, length)` or `x[…, start:stop]`; the index is that of
  what else the second takes.
  """
  if (
    node.target in (torch.narrow, "narrow") and len(node.args) == 4 and not node.kwargs
  ):
    tensor, dim, start, length = node.args
    is_slice = type(dim) is int and type(length) is int and isinstance(start, fx.Node)
    if not is_slice or not _is_on_jax(tensor):
      return None
    return (), dim % example(tensor).dim(), start, length
  if node.target is not operator.getitem or not _is_on_jax(node.args[0]):
    return None
  parts = _parts(node.args[1])
  places = [
    place
    for place, part in enumerate(parts)
    if isinstance(part, slice) and isinstance(part.start, fx.Node) and part.step is None
  ]
  others = [part for place, part in enumerate(parts) if place not in places]
  if len(places) != 1 or not all(map(_is_plain, others)):
    return None
  (place,) = places
  dim = sum(isinstance(part, slice) for part in parts[:place])
  length = example(node).shape[dim]
  if not isinstance(length, int):
    return None
  index = (*parts[:place], slice(None), *parts[place + 1 :])
  return index, dim, parts[place].start, length


def _is_plain(part) -> bool:
  """True for a part of an index that is known."""
  if isinstance(part, slice):
    return all(type(b) in (int, type(None)) for b in (part.start, part.stop, part.step))
  return type(part) is int


def _is_in_slice(node: fx.Node, number: fx.Node) -> bool:
  """True for a number that is the start, or from which only the stop is made."""
  _, _, start, _ = _slice(node)
  if start is number:
    return True
  parts = [part for part in _parts(node.args[1]) if isinstance(part, slice)]
  return any(part.stop is number for part in parts)


def _is_only_read(node: fx.Node) -> bool:
  """False where the graph writes to what it takes of a tensor.

  Where a gradient is recorded, an element at a traced place is a copy.
  """
  for user in node.users:
    name = user.target if isinstance(user.target, str) else _name_of(user.target)
    writes = name.endswith("_") or name in _WRITES
    if user.args and user.args[0] is node and writes:
      return False
    is_view = name in _VIEWS and user.args and user.args[0] is node
    if is_view and not _is_only_read(user):
      return False
  return True


def _name_of(target) -> str:
  return getattr(target, "__name__", "")


def _place(node: fx.Node) -> None:
  """Has a node take its element or slice by a function that takes traced places."""
  if _selection(node) is not None:
    tensor = node.args[0]
    dim, index = _selection(node)
    if isinstance(index, fx.Node):
      node.op, node.target = "call_function", operator.getitem
      node.args = (tensor, (*[slice(None)] * dim, index))
  elif node.op != "placeholder" and _slice(node) is not None:
    index, dim, start, length = _slice(node)
    node.op, node.target = "call_function", indexing.slice_from
    node.args = (node.args[0], index, dim, start, length)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
  return [tensor for tensor in example_tensors(node) if tensor.device.type == "jax"]


_SYMBOLS = (torch.SymFloat, torch.SymInt, torch.SymBool, float, int, bool)
_SUMS = frozenset(
  {operator.add, operator.sub, operator.mul, operator.neg}
  | {operator.floordiv, operator.mod}
)
_OF_NUMBERS = _SUMS | {operator.truediv, operator.pow}
_ARITHMETIC: frozenset[Callable] = frozenset(
  {
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg),
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.pow),
    *(torch.add, torch.sub, torch.mul, torch.div, torch.pow),
  }
)
_METHODS = frozenset(
  {"add", "sub", "mul", "div", "pow", "add_", "sub_", "mul_", "div_"}
)
_POWERS = frozenset({operator.pow, torch.pow, "pow"})
# Those that integers are exact in.
_EXACT = frozenset(
  {operator.add, operator.sub, operator.mul, torch.add, torch.sub, torch.mul}
  | {"add", "sub", "mul"}
)
_COMPARISONS = frozenset(
  {operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne}
  | {"lt", "le", "gt", "ge", "eq", "ne"}
)
_BOUNDS = frozenset({"clamp", "clamp_min", "clamp_max", "masked_fill"})
_WRITES = frozenset(
  {"setitem", "iadd", "isub", "imul", "itruediv", "ipow", "ifloordiv"}
)
_VIEWS = frozenset(
  {"getitem", "select", "narrow", "view", "reshape", "flatten", "transpose", "t"}
  | {"permute", "squeeze", "unsqueeze", "expand", "detach", "unflatten", "diagonal"}
)
_MODULES = frozenset(
  {
    None,
    "_operator",
    "torch",
    "torch.nn.functional",
    "torch._C._nn",
    "torch.functional",
  }
)
