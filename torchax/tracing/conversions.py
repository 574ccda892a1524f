"""Trees of tensors as trees of arrays, and back, for functions that are compiled."""

from typing import Any

import jax
import torch

from torchax import rng
from torchax.core.static_values import StaticValue
from torchax.environment import default_env
from torchax.tensor import Tensor, new_tensor
from torchax.tracing import pytrees


def _register_return_types() -> None:
  """Named tuples that torch's operations return, as pytrees of their fields."""
  found = (v for v in vars(torch.return_types).values() if isinstance(v, type))
  for cls in {value for value in found if issubclass(value, tuple)}:
    jax.tree_util.register_pytree_node(
      cls, lambda named: (tuple(named), type(named)), lambda cls, parts: cls(parts)
    )


_register_return_types()


def is_leaf(value) -> bool:
  """True for a tensor, which is no tree."""
  return isinstance(value, torch.Tensor)


def tensors_of(tree) -> Any:
  """Arrays in a tree as tensors, boxed constants and containers unboxed.

  Typed keys and anything else stay as they are.
  """
  return jax.tree.map(_tensor_of, tree, is_leaf=_is_leaf_or_container)


def _is_leaf_or_container(value) -> bool:
  return isinstance(value, _LEAVES)


_LEAVES = (torch.Tensor, pytrees.Container, StaticValue)


def _tensor_of(leaf):
  if isinstance(leaf, jax.Array) and not rng.is_typed_key(leaf):
    return new_tensor(leaf, default_env())
  if type(leaf) is StaticValue:
    return leaf.value
  return leaf.unbox(tensors_of) if type(leaf) is pytrees.Container else leaf


def arrays_of(tree) -> Any:
  """Tensors in a tree as arrays; anything else as it is.

  Raises:
    MixedDeviceError: a tensor of another device.
  """
  return jax.tree.map(_array_of, tree, is_leaf=is_leaf)


def _array_of(leaf):
  if isinstance(leaf, Tensor):
    return leaf.jax()
  if isinstance(leaf, torch.Tensor):
    return default_env().admit(leaf, "a function on jax")
  return leaf
