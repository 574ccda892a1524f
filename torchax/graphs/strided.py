"""Lowering of `as_strided` in graphs. Called by `interpreter.py`.

Arrays have no strides. The example value of a node has the strides of torch's tensor;
the array is transposed to that memory order first.
"""

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

_READ = aten.as_strided.default
STRIDED = frozenset(
  {_READ, aten.as_strided_copy.default, aten.as_strided_scatter.default}
)


def run(node: fx.Node, operation: Callable, args: tuple, kwargs: dict, env: dict):
  """Run one of `STRIDED` on arrays.

  Args:
    node: node of the operation.
    operation: lowering of the operation for contiguous arrays.
    args, kwargs: arguments of the operation.
    env: arrays by node.

  Raises:
    OperatorNotFound: the tensor has gaps in memory, and its base is unknown.
  """
  source, array = node.args[0], args[0]
  while not is_dense(meta(source)) and _views(source):
    source = source.args[0]
    array = env.get(source)
  like = meta(source)
  is_base = source is not node.args[0]
  if not is_dense(like) or array is None or (is_base and _writes(node)):
    raise OperatorNotFound(
      f"{node.target} of a tensor with gaps in memory is not available in a graph. "
      "Take the strided view of the tensor that has the memory."
    )
  names = schema_of(node.target).names
  named = dict.fromkeys(names) | dict(zip(names, args)) | kwargs
  if named.get("storage_offset") is not None:
    named["storage_offset"] -= like.storage_offset()
  order = memory_order(like)
  named["self"] = array if order is None else jnp.transpose(array, order)
  result = operation(**named)
  if order is None or not _writes(node):
    return result
  return jnp.transpose(result, tuple(map(int, np.argsort(order))))


def _writes(node: fx.Node) -> bool:
  return node.target is aten.as_strided_scatter.default


def _views(node: fx.Node) -> bool:
  return isinstance(node, fx.Node) and (
    isinstance(node.target, torch_compat.OpOverload) and schema_of(node.target).is_view
  )


def is_dense(like: torch.Tensor) -> bool:
  """Return True if the elements of a tensor fill a range of memory without gaps."""
  reach = sum((hint(n) - 1) * hint(s) for n, s in zip(like.shape, like.stride()))
  return hint(like.numel()) in (0, reach + 1)


def memory_order(like: torch.Tensor) -> tuple[int, ...] | None:
  """Return the dimensions by decreasing stride; None if they are in order already."""
  sizes, strides = list(map(hint, like.shape)), list(map(hint, like.stride()))
  order = view_steps.memory_order(sizes, strides)
  return None if order == tuple(range(like.dim())) else order
