"""Conversion of trees of tensors to trees of arrays, and back, for traced functions.

Libraries register classes of containers with torch and not with JAX, for example the
results of a `transformers` model. Compiled functions take and return them as a
`Container`. So their own class is built from tensors only, and never sees JAX's
placeholders, which it may reject. `adopt` registers a class with JAX where JAX code
sees the result itself. `static_arguments.py` boxes and unboxes containers.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import torch
from torch.utils import _pytree as torch_pytree

from torchax import rng
from torchax.compat import jax_compat, torch_compat
from torchax.core.partitions import is_tensor
from torchax.core.static_values import StaticValue
from torchax.dispatch.host_operations import require_no_gradient
from torchax.environment import default_env
from torchax.subclasses import SubclassTensor, as_subclass
from torchax.tensor import Tensor, new_tensor


def _register_return_types() -> None:
  found = (v for v in vars(torch.return_types).values() if isinstance(v, type))
  for cls in {value for value in found if issubclass(value, tuple)}:
    jax.tree_util.register_pytree_node(
      cls, lambda named: (tuple(named), type(named)), lambda cls, parts: cls(parts)
    )


_register_return_types()


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
    try:
      return type(other) is _Context and bool(self.value == other.value)
    except (RuntimeError, ValueError):  # tensors and arrays have no truth value
      return False


@jax.tree_util.register_pytree_with_keys_class
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

  def tree_flatten_with_keys(self):
    make_key = jax.tree_util.DictKey if self.cls is dict else jax.tree_util.SequenceKey
    names = self.context.value if self.cls is dict else range(len(self.children))
    return list(zip(map(make_key, names), self.children)), (self.cls, self.context)

  @classmethod
  def tree_unflatten(cls, static, children):
    return cls(*static, children)

  def unbox(self, convert: Callable) -> Any:
    """Rebuild the container; `convert` converts the list of its children."""
    node = _node_of(self.cls)
    assert node is not None
    return node.unflatten_fn(convert(list(self.children)), self.context.value)


class _Wrapper(NamedTuple):
  """Functions that flatten a wrapper subclass of tensors, as torch.compile does."""

  cls: Any

  def flatten_fn(self, tensor) -> tuple[list, Any]:
    require_no_gradient([tensor])
    names, context = tensor.__tensor_flatten__()
    static = names, context, tensor.shape, tensor.stride()
    return [getattr(tensor, name) for name in names], static

  def unflatten_fn(self, parts, static) -> torch.Tensor:
    names, context, shape, strides = static
    parts = dict(zip(names, parts))
    return self.cls.__tensor_unflatten__(parts, context, shape, strides)


class _OfUser(NamedTuple):
  """Functions that flatten a jax tensor of a user's class.

  The children are a plain tensor and the attributes that are jax tensors.
  """

  cls: Any

  def flatten_fn(self, tensor) -> tuple[list, tuple]:
    attributes = dict(tensor.__dict__)
    names = [name for name, x in attributes.items() if isinstance(x, Tensor)]
    tensors = [attributes.pop(name) for name in names]
    return [as_subclass(tensor, Tensor), *tensors], (names, attributes)

  def unflatten_fn(self, parts, static) -> torch.Tensor:
    (names, attributes), (plain, *tensors) = static, parts
    made = as_subclass(plain, self.cls)
    made.__dict__.update(attributes | dict(zip(names, tensors)))
    return made


def _node_of(cls: type) -> torch_pytree.NodeDef | _Wrapper | _OfUser | None:
  if not issubclass(cls, torch.Tensor):
    return torch_pytree.SUPPORTED_NODES.get(cls)
  if issubclass(cls, SubclassTensor):
    return _OfUser(cls)
  has_parts = torch_compat.with_parts([cls], Tensor)
  return _Wrapper(cls) if has_parts and hasattr(cls, "__tensor_flatten__") else None


def box_container(leaf, convert: Callable) -> Container | None:
  """Box a container of torch's pytrees or a user's class; None for others.

  `convert` converts the list of its children.

  Raises:
    NotImplementedError: a wrapper subclass needs a gradient.
  """
  node = _node_of(type(leaf))
  # The shape of a nested tensor has symbols, which a call cannot carry.
  if node is None or isinstance(leaf, torch.Tensor) and leaf.is_nested:
    return None
  children, context = _flatten(node, leaf)
  return Container(type(leaf), context, convert(list(children)))


def adopt(leaf) -> bool:
  """Register the class of a leaf with JAX; return False if torch cannot flatten it."""
  cls = type(leaf)
  node = torch_pytree.SUPPORTED_NODES.get(cls)
  if node is None:
    return False
  with _adopting:
    if cls not in _adopted:
      jax.tree_util.register_pytree_node(
        cls,
        functools.partial(_flatten, node),
        lambda context, children: node.unflatten_fn(children, context.value),
      )
      _adopted.add(cls)
  return True


def is_adopted(value) -> bool:
  return type(value) in _adopted


def _may_have_boxes(structure: Any) -> bool:
  """Return False if a tree has no boxes: its leaves can be converted one by one."""
  try:
    return _has_boxes(structure)
  except TypeError:  # static data of a user's class without a hash
    return True


@functools.lru_cache(maxsize=1024)
def _has_boxes(structure: Any) -> bool:
  node = structure.node_data()
  if node is None:
    return False
  return node[0] in (Container, StaticValue) or any(
    map(_has_boxes, structure.children())
  )


def _flatten(
  node: torch_pytree.NodeDef | _Wrapper | _OfUser, value
) -> tuple[list, _Context]:
  children, context = node.flatten_fn(value)
  return children, _Context(context)


def tensors_of(tree) -> Any:
  """Convert the arrays in a tree to tensors; unbox constants and containers.

  Typed keys and other leaves are unchanged.
  """
  structure: Any  # JAX's annotations lack its methods
  leaves, structure = jax.tree.flatten(tree)
  if _may_have_boxes(structure):
    return jax.tree.map(_tensor_of, tree, is_leaf=lambda v: isinstance(v, _LEAVES))
  return structure.unflatten(map(_tensor_of, leaves))


_LEAVES = (torch.Tensor, Container, StaticValue)


def _tensor_of(leaf):
  if type(leaf) is jax_compat.ArrayImpl:  # typed keys have another class
    return new_tensor(leaf, default_env())
  if isinstance(leaf, jax.Array) and not rng.is_typed_key(leaf):
    return new_tensor(leaf, default_env())
  if type(leaf) is StaticValue:
    return leaf.value
  return leaf.unbox(tensors_of) if type(leaf) is Container else leaf


def arrays_of(tree) -> Any:
  """Convert the tensors in a tree to arrays; other leaves are unchanged.

  Raises:
    MixedDeviceError: a tensor is on another device.
  """
  return jax.tree.map(array_of, tree, is_leaf=is_tensor)


def array_of(leaf) -> Any:
  """Convert a tensor to an array; other leaves are unchanged."""
  if isinstance(leaf, Tensor):
    return leaf.jax()
  if isinstance(leaf, torch.Tensor):
    return default_env().admit(leaf, "a function on jax")
  return leaf
