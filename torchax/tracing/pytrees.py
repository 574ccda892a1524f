"""Containers that torch's pytrees know and JAX's do not.

Libraries register theirs with torch: the results of a `transformers` model, say.
They cross into a compiled function and out of it as a `Container`, so that their own
class is made of tensors only; it may refuse the placeholders that JAX puts into trees.
Where JAX code sees the result itself, the class is registered with JAX.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
from torch.utils import _pytree as torch_pytree

_adopting = threading.Lock()
_adopted: set[type] = set()


class _Context:
  """Context of a container in torch, which JAX wants hashable."""

  __slots__ = ("value",)

  def __init__(self, value: Any):
    self.value = value

  def __hash__(self):
    return hash(_Context)  # torch's contexts are comparable, and often lists

  def __eq__(self, other):
    return type(other) is _Context and bool(self.value == other.value)


@jax.tree_util.register_pytree_node_class
class Container:
  """A container of torch's as a tree of JAX's.

  Attributes:
    cls: the container's class.
    context: of torch, all that it holds except for its children.
    children: what it contains.
  """

  __slots__ = ("cls", "context", "children")

  def __init__(self, cls: type, context: _Context, children):
    self.cls, self.context, self.children = cls, context, children

  def tree_flatten(self):
    return self.children, (self.cls, self.context)

  @classmethod
  def tree_unflatten(cls, static, children):
    return cls(*static, children)

  def unbox(self, convert: Callable) -> Any:
    """The container itself, of the converted children."""
    node = torch_pytree.SUPPORTED_NODES[self.cls]
    return node.unflatten_fn(list(map(convert, self.children)), self.context.value)


def box(leaf, convert: Callable) -> Container | None:
  """A leaf of JAX's that torch takes apart, with converted children; else None."""
  node = torch_pytree.SUPPORTED_NODES.get(type(leaf))
  if node is None:
    return None
  children, context = node.flatten_fn(leaf)
  return Container(type(leaf), _Context(context), list(map(convert, children)))


def adopt(leaf) -> bool:
  """Registers the class of a leaf with JAX if torch takes the leaf apart."""
  cls = type(leaf)
  node = torch_pytree.SUPPORTED_NODES.get(cls)
  if node is None:
    return False
  with _adopting:
    if cls not in _adopted:
      flatten = functools.partial(_flatten, node)
      unflatten = functools.partial(_unflatten, node)
      jax.tree_util.register_pytree_node(cls, flatten, unflatten)
      _adopted.add(cls)
  return True


def is_adopted(value) -> bool:
  """True where JAX takes a value apart because of `adopt`."""
  return type(value) in _adopted


def _flatten(node: torch_pytree.NodeDef, value) -> tuple[list, _Context]:
  children, context = node.flatten_fn(value)
  return children, _Context(context)


def _unflatten(node: torch_pytree.NodeDef, context: _Context, children):
  return node.unflatten_fn(children, context.value)
