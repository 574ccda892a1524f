"""Numbers among the inputs of Dynamo's graphs: operands or constants.

Dynamo passes a float that changes as a 0-d CPU tensor on which the graph calls
`item()`, and an integer as a symbol. A number that is only used in arithmetic, or as an
index, becomes an operand: its value does not change the program. Any other use may
select the computation, so the number is a constant of the program. `on_jax.py` takes
the numbers of graphs on jax, `program.py` those of plain tensors.
"""

import enum
import operator
from collections.abc import Callable

import torch
from torch import fx

from torchax.compat import torch_compat
from torchax.functions import indexing
from torchax.graphs.fx import example, example_tensors, inputs, operation_name
from torchax.registry.names import aten


class Use(enum.Enum):
  """Form in which a graph takes a number."""

  OPERAND = "operand"  # a 0-d tensor inside the trace
  HOST = "host"  # a `HostNumber`: operations turn it into an operand
  EXPONENT = "exponent"  # an operand, except for `SIMPLE_EXPONENTS`
  CONSTANT = "constant"  # a static value: another number retraces


def take_scalars(graph: fx.Graph) -> dict[int, Use]:
  """Replace 0-d CPU inputs on which the graph calls `item()` by Python numbers.

  These are floats, numpy's scalars and CPU tensors. Integers keep their symbols. A
  scalar of numpy that is a size or an option is a number without a call of `item()`.

  Returns:
    How the graph takes each of these inputs, by its position.
  """
  uses = {}
  for position, node in enumerate(inputs(graph)):
    value = example(node)
    if not isinstance(value, torch.Tensor) or value.dim() or value.device.type != "cpu":
      continue
    items = [user for user in node.users if operation_name(user) in _ITEMS]
    is_option = torch_compat.wraps_number(node) and not all(map(_scales, node.users))
    if not items and not is_option:
      continue
    uses[position] = Use.CONSTANT
    if len(items) < len(node.users):
      _wrap_again(graph, node, value.dtype, items)
    elif not value.is_floating_point():
      node.meta["example_value"] = example(items[0])
    elif all(map(_is_arithmetic, items)):
      uses[position] = Use.OPERAND
    elif all(map(_is_for_host, items)):
      uses[position] = Use.HOST
    for item in items:
      item.replace_all_uses_with(node)
      graph.erase_node(item)
  return uses


def _wrap_again(graph: fx.Graph, number: fx.Node, dtype, items: list[fx.Node]) -> None:
  """Give the users of an input that are not in `items` a 0-d tensor."""
  with graph.inserting_after(number):
    wrapped = graph.call_function(
      torch.scalar_tensor, (number,), {"dtype": dtype, "device": "cpu"}
    )
  wrapped.meta = dict(number.meta)
  others = [user for user in number.users if user not in (wrapped, *items)]
  for user in others:
    user.replace_input_with(number, wrapped)


def take_integers(graph: fx.Graph) -> dict[int, Use]:
  """Rewrite indexing so that the graph can take its integer inputs as operands.

  Dynamo's guards keep the indices in range.

  Returns:
    How the graph takes each integer that is no constant, by its position.
  """
  uses = {}
  for position, node in enumerate(inputs(graph)):
    if not isinstance(example(node), torch.SymInt) or not node.users:
      continue
    if all(_takes_integer(user, node) for user in node.users):
      uses[position] = Use.OPERAND
    elif all(_is_power(user, node) for user in node.users):
      uses[position] = Use.EXPONENT
    elif all(_is_bound(user) or _is_scaled(user) for user in node.users):
      uses[position] = Use.HOST
  for node in list(graph.nodes):
    _rewrite_indexing(node)
  return uses


# Exponents that become products or roots, and those that integer powers reject.
SIMPLE_EXPONENTS = frozenset({-2, -1, 0, 1, 2, 3})


def fits_int32(number) -> bool:
  """Return True for a float, and for an integer that fits in 32 bits."""
  return type(number) is float or -(2**31) <= number < 2**31


def is_operand(number: fx.Node) -> bool:
  """Return True if an integer of a graph of ATen operations may be an operand.

  Then the graph returns it, or has it as a factor, term or bound of a comparison.
  """
  return bool(number.users) and all(
    user.op == "output" or _is_number_of(user, number) for user in number.users
  )


def _is_number_of(user: fx.Node, number: fx.Node) -> bool:
  """Return True for `aten.mul(tensor, number)` and others, without a third argument."""
  if user.target not in _ATEN or user.kwargs or len(user.args) != 2:
    return False
  tensor, other = user.args
  value = tensor.meta["val"] if isinstance(tensor, fx.Node) else None
  is_wide = isinstance(value, torch.Tensor) and (
    value.is_floating_point() or _is_wide(value)
  )
  return is_wide and other is number


# Arithmetic ---------------------------------------------------------------------------


def _is_arithmetic(number: fx.Node) -> bool:
  """Return True if only floating-point arithmetic uses the number."""
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
  """Return True for `x + y`, `torch.add(x, y)`, `x.add(y)`; False with keywords."""
  if node.op == "call_method":
    return node.target in _METHODS and not node.kwargs
  return node.op == "call_function" and node.target in _ARITHMETIC and not node.kwargs


def _is_for_host(number: fx.Node) -> bool:
  """Return True if only functions of torch and Python arithmetic use the number."""
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
  """Return True for sums, products and comparisons with tensors, except powers."""
  tensors = [t for n in user.all_input_nodes for t in _tensors(n)]
  if not tensors or user.kwargs or user.target in _POWERS:
    return False
  if _is_arithmetic_operation(user):
    is_exact = user.target in _EXACT
    return all(t.is_floating_point() or (is_exact and _is_wide(t)) for t in tensors)
  is_comparison = user.target in _COMPARISONS
  return is_comparison and all(t.is_floating_point() or _is_wide(t) for t in tensors)


def _is_wide(tensor) -> bool:
  """Return True for integer dtypes that hold any index."""
  return tensor.dtype in (torch.int32, torch.int64)


def _is_power(user: fx.Node, exponent: fx.Node) -> bool:
  """Return True for a floating-point tensor to the power of the number."""
  if user.target not in _POWERS or user.kwargs or len(user.args) != 2:
    return False
  base, power = user.args
  tensors = _tensors(base) if isinstance(base, fx.Node) else []
  return power is exponent and bool(tensors) and tensors[0].is_floating_point()


def _is_scaled(user: fx.Node) -> bool:
  """Return True for arithmetic with floating-point tensors, also of derived numbers."""
  if isinstance(example(user), torch.SymInt):
    return user.target in _SUMS and all(map(_is_scaled, user.users))
  tensors = [t for n in user.all_input_nodes for t in _tensors(n)]
  return _scales(user) and all(t.is_floating_point() for t in tensors)


def _is_bound(user: fx.Node) -> bool:
  """Return True for a clamp or masked fill of a floating-point tensor."""
  tensors = [t for n in user.all_input_nodes for t in _tensors(n)]
  is_method = user.op == "call_method" and user.target in _BOUNDS
  return is_method and bool(tensors) and all(t.is_floating_point() for t in tensors)


# Positions ----------------------------------------------------------------------------


def _takes_integer(user: fx.Node, number: fx.Node, is_derived: bool = False) -> bool:
  """Return True if another integer would not change the program.

  A derived number may need more than 32 bits, unless it is a position.
  """
  if isinstance(example(user), torch.SymInt):
    is_sum = user.target in _SUMS
    return is_sum and all(_takes_integer(later, user, True) for later in user.users)
  return _is_position(user, number) or (not is_derived and _scales(user))


def _is_position(user: fx.Node, number: fx.Node) -> bool:
  """Return True if the number is the index of a read or a write."""
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
  """Return True if the number is one of the indices and no bound of a slice."""
  slices = [part for part in parts if isinstance(part, slice)]
  bounds = [bound for s in slices for bound in (s.start, s.stop, s.step)]
  return any(part is number for part in parts) and not any(
    isinstance(bound, fx.Node) for bound in bounds
  )


def _selection(node: fx.Node) -> tuple[int, object] | None:
  """Return (dim, index) of `torch.select(x, dim, index)`; None for other nodes."""
  is_select = node.target in (torch.select, "select") and not node.kwargs
  if not is_select or len(node.args) != 3 or not _is_on_jax(node.args[0]):
    return None
  _, dim, index = node.args
  return (dim, index) if type(dim) is int and dim >= 0 else None


def _slice(node: fx.Node) -> tuple[tuple, int, object, int] | None:
  """Return (index, dim, start, length) of a slice with symbolic start, known length.

  The slice is `x.narrow(dim, start, length)` or `x[…, start:stop]`. `index` holds the
  other indices, with `slice(None)` for this one.
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
  positions = [
    position
    for position, part in enumerate(parts)
    if isinstance(part, slice) and isinstance(part.start, fx.Node) and part.step is None
  ]
  others = [part for position, part in enumerate(parts) if position not in positions]
  if len(positions) != 1 or not all(map(_is_plain, others)):
    return None
  (position,) = positions
  dim = sum(isinstance(part, slice) for part in parts[:position])
  length = example(node).shape[dim]
  if not isinstance(length, int):
    return None
  index = (*parts[:position], slice(None), *parts[position + 1 :])
  return index, dim, parts[position].start, length


def _is_plain(part) -> bool:
  """Return True for an integer or a slice without symbols."""
  if isinstance(part, slice):
    return all(type(b) in (int, type(None)) for b in (part.start, part.stop, part.step))
  return type(part) is int


def _is_in_slice(node: fx.Node, number: fx.Node) -> bool:
  """Return True if the number is the start or the stop of the slice."""
  _, _, start, _ = _slice(node)
  if start is number:
    return True
  parts = [part for part in _parts(node.args[1]) if isinstance(part, slice)]
  return any(part.stop is number for part in parts)


def _is_only_read(node: fx.Node) -> bool:
  """Return False if the graph writes to the element or slice, or to a view of it.

  While a gradient is recorded, an element at a traced index is a copy.
  """
  for user in node.users:
    name = operation_name(user)
    writes = name.endswith("_") or name in _WRITES
    if user.args and user.args[0] is node and writes:
      return False
    is_view = name in _VIEWS and user.args and user.args[0] is node
    if is_view and not _is_only_read(user):
      return False
  return True


def _rewrite_indexing(node: fx.Node) -> None:
  """Rewrite a select or slice to a function that takes traced indices."""
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


# Names of the methods of tensors and of Dynamo's wrapper for numpy's scalars.
_ITEMS = frozenset({"item", "wrapped_item"})
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
# Operations that are exact for integers.
_EXACT = frozenset(
  {operator.add, operator.sub, operator.mul, torch.add, torch.sub, torch.mul}
  | {"add", "sub", "mul"}
)
_COMPARISONS = frozenset(
  {operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne}
  | {"lt", "le", "gt", "ge", "eq", "ne"}
)
_ATEN = frozenset(
  {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
  | {aten.rsub.Scalar}
  | {getattr(aten, name).Scalar for name in ("lt", "le", "gt", "ge", "eq", "ne")}
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
