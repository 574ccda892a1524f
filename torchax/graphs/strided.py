"""Lowering of `as_strided` in graphs. Called by `interpreter.py`.

Arrays have no strides. The example value of a node has the strides of torch's tensor;
the array is transposed to that memory order first.
"""

import operator
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import torch
from torch import fx

from torchax.compat import torch_compat
from torchax.core import view_steps
from torchax.errors import OperatorNotFound
from torchax.graphs.fx import hint, meta
from torchax.registry.names import aten
from torchax.registry.schema import schema_of

_WRITE = aten.as_strided_scatter.default
STRIDED = frozenset({aten.as_strided.default, aten.as_strided_copy.default, _WRITE})
# Views whose elements are not those of their base.
_CONVERTED = frozenset({aten._conj.default, aten._neg_view.default})


def run(node: fx.Node, operation: Callable, args: tuple, kwargs: dict, env: dict):
  """Run one of `STRIDED` on arrays.

  Args:
    node: node of the operation.
    operation: lowering of the operation for contiguous arrays.
    args, kwargs: arguments of the operation.
    env: arrays by node.

  Raises:
    OperatorNotFound: the operation addresses memory of a tensor that the graph does not
      have, or writes to memory outside of its tensor.
  """
  names = schema_of(node.target).names
  named = dict.fromkeys(names) | dict(zip(names, args)) | kwargs
  source, array = node.args[0], args[0]
  if named.get("storage_offset") is None:
    named["storage_offset"] = hint(meta(source).storage_offset())
  last = named["storage_offset"] + _reach(named["size"], named["stride"])
  is_read = node.target is not _WRITE
  while not (is_inside := _has_memory(meta(source), named["storage_offset"], last)):
    base = _base(source) if is_read else None
    if base is None:
      break
    source, array = base, env.get(base)
  if not is_inside or array is None:
    raise OperatorNotFound(
      f"{node.target} addresses memory that its tensor skips or that is outside of it, "
      "which a graph does not have. Take the strided view of the tensor that has the "
      "memory."
    )
  like = meta(source)
  named["storage_offset"] -= hint(like.storage_offset())
  order = memory_order(like)
  named["self"] = array if order is None else jnp.transpose(array, order)
  result = operation(**named)
  if order is None or is_read:
    return result
  return jnp.transpose(result, tuple(map(int, np.argsort(order))))


def base_node(node: fx.Node) -> fx.Node | None:
  """Return the node that `node` is a view of, also as one of several results."""
  if node.op != "call_function":
    return None
  source = node.args[0] if node.args else None
  if node.target is operator.getitem:
    return source if _is_view(source) else None
  return source if _is_view(node) else None


def _base(node: fx.Node) -> fx.Node | None:
  """Return the node that has the elements of a view, unchanged, among its own."""
  base = base_node(node)
  if node.target is operator.getitem and base is not None:
    base = base_node(base)  # the operation has several results
  if base is None or node.target in _CONVERTED:
    return None
  return base if meta(base).dtype is meta(node).dtype else None


def _is_view(node: fx.Node) -> bool:
  target = node.target
  return isinstance(target, torch_compat.OpOverload) and schema_of(target).is_view


def _has_memory(like: torch.Tensor, first: int, last: int) -> bool:
  """Return True if a tensor has the elements of its storage from `first` to `last`."""
  start, count = hint(like.storage_offset()), hint(like.numel())
  is_dense = count == _reach(like.shape, like.stride()) + 1
  return last < first or (is_dense and start <= first and last < start + count)


def _reach(size, stride) -> int:
  """Return the distance of the first and the last element; -1 if there is none."""
  if 0 in size:
    return -1
  return sum((hint(n) - 1) * hint(step) for n, step in zip(size, stride))


def memory_order(like: torch.Tensor) -> tuple[int, ...] | None:
  """Return the dimensions by decreasing stride; None if they are in order already."""
  sizes, strides = list(map(hint, like.shape)), list(map(hint, like.stride()))
  order = view_steps.memory_order(sizes, strides)
  return None if order == tuple(range(like.dim())) else order
