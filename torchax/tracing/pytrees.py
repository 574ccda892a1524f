"""Containers that are registered as pytrees with torch but not with JAX.

Libraries register classes with torch, for example the results of a `transformers`
model. Compiled functions take and return them as a `Container`. So their own class is
built from tensors only, and never sees JAX's placeholders, which it may reject. `adopt`
registers a class with JAX where JAX code sees the result itself.

`static_arguments.py` boxes and unboxes them.
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
  """Hashable wrapper of torch's context of a container, as JAX requires."""

  __slots__ = ("value",)

  def __init__(self, value: Any):
    self.value = value

  def __hash__(self):
    return hash(_Context)  # torch's contexts are often lists: comparable, unhashable

  def __eq__(self, other):
    return type(other) is _Context and bool(self.value == other.value)


@jax.tree_util.register_pytree_node_class
class Container:
  """JAX pytree node for a container that torch can flatten.

  Attributes:
    cls: class of the container.
    context: torch's context: its data except the children.
    children: children of the container.
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
    """Rebuild the container from the converted children."""
    node = torch_pytree.SUPPORTED_NODES[self.cls]
    return node.unflatten_fn(list(map(convert, self.children)), self.context.value)


def box(leaf, convert: Callable) -> Container | None:
  """Box a leaf that torch can flatten, with converted children; None for others."""
  node = torch_pytree.SUPPORTED_NODES.get(type(leaf))
  if node is None:
    return None
  children, context = node.flatten_fn(leaf)
  return Container(type(leaf), _Context(context), list(map(convert, children)))


def adopt(leaf) -> bool:
  """Register the class of a leaf with JAX; return False if torch cannot flatten it."""
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
  return type(value) in _adopted


def _flatten(node: torch_pytree.NodeDef, value) -> tuple[list, _Context]:
  children, context = node.flatten_fn(value)
  return children, _Context(context)


def _unflatten(node: torch_pytree.NodeDef, context: _Context, children):
  return node.unflatten_fn(children, context.value)
