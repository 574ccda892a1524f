"""0-d CPU tensors that count for an optimizer, such as `state["step"]`, in a trace.

Each has a `HostNumber` (`Boundary.host_numbers`), which in-place arithmetic changes;
the tensor keeps its value. Other arithmetic returns tensors of the same kind. `item`,
and operations with jax tensors, take the number.
"""

import operator
from collections.abc import Callable

import torch
from torch.utils import _pytree as torch_pytree

from torchax.core.host_numbers import HostNumber
from torchax.errors import MutationError
from torchax.tensor import Tensor

_CHANGES: dict[str, Callable] = {
  "add_": lambda number, other, alpha=1: number + other * alpha,
  "sub_": lambda number, other, alpha=1: number - other * alpha,
  "mul_": operator.mul,
  "div_": operator.truediv,
  "fill_": lambda number, value: value,
  "copy_": lambda number, value: value,
  "zero_": lambda number: 0.0,
}
_ARITHMETIC: dict[str, Callable] = {
  "neg": operator.neg,
  "add": lambda number, other, alpha=1: number + other * alpha,
  "sub": lambda number, other, alpha=1: number - other * alpha,
  "__rsub__": lambda number, other: other - number,
  "mul": operator.mul,
  "div": operator.truediv,
  "__rtruediv__": lambda number, other: other / number,
  "__rdiv__": lambda number, other: other / number,
  "pow": operator.pow,
  "__rpow__": lambda number, other: other**number,
  "sqrt": lambda number: number**0.5,
}
_COMPARISONS: dict[str, Callable] = {
  "__eq__": operator.eq,
  "eq": operator.eq,
  "__ne__": operator.ne,
  "ne": operator.ne,
  "lt": operator.lt,
  "le": operator.le,
  "gt": operator.gt,
  "ge": operator.ge,
}
# Functions whose results do not depend on values; `__get__` is of an attribute.
_OF_THE_TYPE = frozenset(
  {"__get__", "size", "dim", "numel", "is_floating_point", "is_complex", "type"}
)


def are_among(numbers: dict[int, tuple], args: tuple, kwargs: dict) -> bool:
  """Return True if there is a counting tensor among arguments."""
  leaves = torch_pytree.tree_leaves((args, kwargs))
  return any([id(leaf) in numbers for leaf in leaves])


def call(numbers: dict[int, tuple], func: Callable, args: tuple, kwargs: dict):
  """Call a function of torch, some of whose arguments are counting tensors.

  Args:
    numbers: `Boundary.host_numbers`.
    func, args, kwargs: the function, and its arguments.

  Raises:
    MutationError: the function changes a counting tensor otherwise than by arithmetic.
  """
  result = _calculate(numbers, func.__name__.removeprefix("_foreach_"), args, kwargs)
  if result is not None:
    return result
  leaves = torch_pytree.tree_leaves((args, kwargs))
  if func.__name__ in _OF_THE_TYPE:
    result = func(*args, **kwargs)
    if not isinstance(result, torch.Tensor):
      return result
  if any(isinstance(leaf, Tensor) for leaf in leaves):
    known = {key: number for key, (_, number) in numbers.items()}
  else:  # the trace depends on the value
    known = {
      id(leaf): torch.full_like(leaf, float(numbers[id(leaf)][1]))
      for leaf in leaves
      if id(leaf) in numbers
    }
  args, kwargs = torch_pytree.tree_map(lambda v: known.get(id(v), v), (args, kwargs))
  result = func(*args, **kwargs)
  if any(isinstance(v, torch.Tensor) and v._version for v in known.values()):
    raise MutationError(
      f"`{func.__name__}` changes a count of an optimizer in a CPU tensor, which a "
      "compiled function follows only through arithmetic such as `step += 1`. Run the "
      "optimizer's steps eagerly."
    )
  return result


def _calculate(numbers: dict[int, tuple], name: str, args: tuple, kwargs: dict):
  """Return the result of arithmetic on counting tensors; None for other functions."""
  if not args:
    return None
  first, *others = [_number_of(numbers, arg) for arg in args]
  if not all(isinstance(number, HostNumber | float | int) for number in others):
    return None
  if name in _CHANGES:
    counting = args[0] if isinstance(first, list | tuple) else args[:1]
    if not all(id(tensor) in numbers for tensor in counting):
      return None
    for tensor in counting:
      number = _CHANGES[name](_number_of(numbers, tensor), *others, **kwargs)
      numbers[id(tensor)] = (tensor, number)
    return args[0]
  if not isinstance(first, HostNumber | float | int):  # such as a jax tensor
    return None
  if name == "item":
    return first
  if name in _COMPARISONS:
    return torch.tensor(_COMPARISONS[name](first, *others), device="cpu")
  if name in _ARITHMETIC:
    dtype = args[0].dtype
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    result = torch.zeros((), dtype=dtype, device="cpu")
    numbers[id(result)] = (result, _ARITHMETIC[name](first, *others, **kwargs))
    return result
  return None


def _number_of(numbers: dict[int, tuple], value):
  """Return the number of a counting tensor, or of a 0-d CPU tensor of the trace."""
  if id(value) in numbers:
    return numbers[id(value)][1]
  is_plain = isinstance(value, torch.Tensor) and not isinstance(value, Tensor)
  return value.item() if is_plain and not value.dim() else value
