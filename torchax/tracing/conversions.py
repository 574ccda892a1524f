"""Conversion of trees of tensors to trees of arrays, and back, for traced functions."""

from typing import Any

import jax
import torch

from torchax import rng
from torchax.core.partitions import is_tensor
from torchax.core.static_values import StaticValue
from torchax.environment import default_env
from torchax.tensor import Tensor, new_tensor
from torchax.tracing import pytrees


def _register_return_types() -> None:
  found = (v for v in vars(torch.return_types).values() if isinstance(v, type))
  for cls in {value for value in found if issubclass(value, tuple)}:
    jax.tree_util.register_pytree_node(
      cls, lambda named: (tuple(named), type(named)), lambda cls, parts: cls(parts)
    )


_register_return_types()


def tensors_of(tree) -> Any:
  """Convert the arrays in a tree to tensors; unbox constants and containers.

  Typed keys and other leaves are unchanged.
  """
  return jax.tree.map(_tensor_of, tree, is_leaf=lambda v: isinstance(v, _LEAVES))


_LEAVES = (torch.Tensor, pytrees.Container, StaticValue)


def _tensor_of(leaf):
  if isinstance(leaf, jax.Array) and not rng.is_typed_key(leaf):
    return new_tensor(leaf, default_env())
  if type(leaf) is StaticValue:
    return leaf.value
  return leaf.unbox(tensors_of) if type(leaf) is pytrees.Container else leaf


def arrays_of(tree) -> Any:
  """Convert the tensors in a tree to arrays; other leaves are unchanged.

  Raises:
    MixedDeviceError: a tensor is on another device.
  """
  return jax.tree.map(_array_of, tree, is_leaf=is_tensor)


def _array_of(leaf):
  if isinstance(leaf, Tensor):
    return leaf.jax()
  if isinstance(leaf, torch.Tensor):
    return default_env().admit(leaf, "a function on jax")
  return leaf
