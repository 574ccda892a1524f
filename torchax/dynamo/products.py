"""Matrix products of a graph with the operands as they lie in memory.

torch's graphs multiply with transposed matrices (`x @ weight.t()`). XLA's CPU backend
would write the transposed matrix out first; a contraction over the other dimension
needs no copy.
"""

import jax.numpy as jnp
from jax import lax
from torch import fx

from torchax.registry.names import aten


def contract(node: fx.Node, values: dict):
  """The result of a product with a transposed operand.

  Args:
    node: any operation of the graph.
    values: arrays by the nodes that gave them.

  Returns:
    The array; None for any other operation.
  """
  if node.kwargs or node.target not in _PRODUCTS:
    return None
  *bias, left, right = node.args
  if len(bias) != _PRODUCTS[node.target]:
    return None
  left, is_left = _source(left)
  right, is_right = _source(right)
  if not (is_left or is_right):
    return None
  left, right = values[left], values[right]
  if left.dtype != right.dtype or not jnp.issubdtype(left.dtype, jnp.inexact):
    return None
  dimensions = (((0 if is_left else 1,), (1 if is_right else 0,)), ((), ()))
  product = lax.dot_general(left, right, dimensions)
  return values[bias[0]] + product if bias else product


# How many operands come before the two matrices.
_PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}


def _source(node: fx.Node) -> tuple[fx.Node, bool]:
  """A matrix as it lies, and whether it is used transposed."""
  if node.op == "call_function" and node.target is aten.t.default:
    return node.args[0], True
  return node, False
