"""Symbolic sizes of Dynamo's graphs, padded by the option `buckets` of the backend.

Dynamo passes a symbol for each size that may change: as an integer, and in the shapes
of tensors. A bucket pads the symbols, and all sizes that are computed from them. The
bound of `torch._dynamo.mark_dynamic(x, dim, max=…)` is the largest size of a symbol.
"""

from collections.abc import Sequence
from typing import Any

import jax
import torch

from torchax.core.static_values import StaticValue
from torchax.tracing.buckets import Sizes, padded_size

Shape = tuple[int, ...]


class GraphSizes:
  """Padded sizes of the inputs of a graph.

  Args:
    examples: fake tensors, symbolic integers and other objects, one for each input.
    sizes: sizes of the buckets, for all symbols.
  """

  def __init__(self, examples: Sequence, sizes: Sizes):
    self._sizes = sizes
    self._expressions = [_expressions(example) for example in examples]
    self._bounds: dict = {}
    for example in examples:
      for size in _sizes_of(example):
        if isinstance(size, torch.SymInt):
          self._bounds |= size.node.shape_env.var_to_range

  def pad(self, args: Sequence, leaves: list) -> tuple[dict[int, Shape], list]:
    """Return the shapes of the leaves to pad, and the arguments with padded integers.

    Args:
      args: for each input the index of its leaf, or a static value.
      leaves: arrays and numbers.

    Raises:
      ValueError: no bucket is large enough.
    """
    found = [_found(arg, leaves) for arg in args]
    values = {}
    for expressions, sizes in zip(self._expressions, found):
      for expression, size in zip(expressions, sizes):
        if not isinstance(expression, int) and expression.is_Symbol:
          values[expression] = self._padded(expression, int(size))
    shapes, padded = {}, list(args)
    for position, (expressions, sizes) in enumerate(zip(self._expressions, found)):
      new = tuple([_evaluate(e, values, size) for e, size in zip(expressions, sizes)])
      if new != sizes and type(args[position]) is int:
        shapes[args[position]] = new
      elif new != sizes:
        padded[position] = StaticValue(new[0])
    return shapes, padded

  def _padded(self, symbol, value: int) -> int:
    size = padded_size(f"the symbol {symbol}", self._sizes, value)
    bound = self._bounds.get(symbol)
    is_bounded = bound is not None and bound.upper.is_Integer
    return max(value, min(size, int(bound.upper))) if is_bounded else size


def _sizes_of(example) -> tuple:
  if isinstance(example, torch.Tensor):
    return tuple(example.shape)
  return (example,) if isinstance(example, torch.SymInt | int) else ()


def _expressions(example) -> tuple:
  return tuple(
    [s.node.expr if isinstance(s, torch.SymInt) else s for s in _sizes_of(example)]
  )


def _evaluate(expression, values: dict, size: int) -> int:
  """Return the value of an expression; `size` if it has other symbols."""
  if isinstance(expression, int) or not expression.free_symbols <= values.keys():
    return size
  return int(expression.subs(values))


class ArgumentSizes:
  """Padded sizes of a graph's inputs as arguments of a compiled function.

  Args:
    sizes: padded sizes.
    leading: number of arguments before those of the graph.
  """

  def __init__(self, sizes: GraphSizes, leading: int):
    self._sizes, self._leading = sizes, leading

  def padded(self, leaves: list, treedef) -> tuple[dict[int, Shape], Any]:
    """Return the shapes of the leaves to pad, and the structure of the padded call."""
    tree = jax.tree.unflatten(treedef, list(range(len(leaves))))
    (args, kwargs), leading = tree, tree[0][: self._leading]
    shapes, args = self._sizes.pad(args[self._leading :], leaves)
    return shapes, jax.tree.structure(((*leading, *args), kwargs))


def _found(arg, leaves: list) -> Shape:
  """Return the sizes of an argument: the index of a leaf, or a static value."""
  if type(arg) is int:
    # A number among the leaves is an operand, whose value no shape depends on.
    return tuple(leaves[arg].shape) if hasattr(leaves[arg], "shape") else ()
  is_size = type(arg) is StaticValue and type(arg.value) is int
  return (arg.value,) if is_size else ()


class ListedSizes:
  """Padded sizes of a graph's inputs, passed as a static tuple and a list of arrays.

  Args:
    sizes: padded sizes.
    are_arrays: one flag for each input: True for a tensor, False for a number, and None
      for a tensor that is not passed.
  """

  def __init__(self, sizes: GraphSizes, are_arrays: Sequence[bool | None]):
    self._sizes, self._are_arrays = sizes, are_arrays

  def padded(self, leaves: list, treedef) -> tuple[dict[int, Shape], Any]:
    """Return the shapes of the leaves to pad, and the structure of the padded call."""
    tree = jax.tree.unflatten(treedef, list(range(len(leaves))))
    (static, *others, indices), kwargs = tree
    numbers, remaining, args = iter(static.value), iter(indices), []
    for is_array in self._are_arrays:
      number = next(numbers) if is_array is False else None
      # A number is None in the static tuple if it is passed as an array.
      is_leaf = is_array or (is_array is False and number is None)
      args.append(next(remaining) if is_leaf else StaticValue(number))
    shapes, args = self._sizes.pad(args, leaves)
    padded = [
      arg.value if type(arg) is StaticValue else None
      for arg, is_array in zip(args, self._are_arrays)
      if is_array is False
    ]
    args = (StaticValue(tuple(padded)), *others, indices)
    return shapes, jax.tree.structure((args, kwargs))
