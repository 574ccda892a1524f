"""`as_strided` in graphs: steps in the memory that a tensor of torch would have.

Arrays have no strides. The example value of a node has those of its tensor.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import torch
from torch import fx

from torchax.compat import torch_compat
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
    node: of the operation.
    operation: takes arrays as contiguous tensors.
    args, kwargs: of the operation.
    env: the arrays of nodes.

  Raises:
    OperatorNotFound: the tensor has gaps in memory, and its base is unknown.
  """
  source, array = node.args[0], args[0]
  while not is_dense(meta(source)) and _views(source):
    source = source.args[0]
    array = env.get(source)
  like = meta(source)
  is_other = source is not node.args[0]
  if not is_dense(like) or array is None or (is_other and _writes(node)):
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
  """True if the elements of a tensor fill a range of memory."""
  reach = sum((hint(n) - 1) * hint(s) for n, s in zip(like.shape, like.stride()))
  return hint(like.numel()) in (0, reach + 1)


def memory_order(like: torch.Tensor) -> tuple[int, ...] | None:
  """Dimensions by decreasing stride; None for the usual order.

  Those of one element have any stride and stay where they are.
  """
  strides = list(map(hint, like.stride()))
  sizes = list(map(hint, like.shape))
  if 0 in sizes or any(s == 0 and n > 1 for s, n in zip(strides, sizes)):
    return None
  order = sorted(
    (d for d in range(like.dim()) if sizes[d] > 1), key=lambda d: -strides[d]
  )
  moved = iter(order)
  order = [next(moved) if n > 1 else d for d, n in enumerate(sizes)]
  return None if order == list(range(like.dim())) else tuple(order)
