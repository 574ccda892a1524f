"""Partition of a tree into dynamic leaves (arrays) and static leaves.

Wrappers of functions pass the dynamic leaves to JAX as operands. The static leaves are
a part of the cache key (`static_values.py`).
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree as torch_pytree

from torchax.core.static_values import StaticValue


def is_tensor(value) -> bool:
  """Return True for a tensor on any device."""
  return isinstance(value, torch.Tensor)


def is_array(value) -> bool:
  """Return True for a tensor and for an array of JAX or numpy."""
  return isinstance(value, torch.Tensor | jax.Array | np.ndarray)


class Partition:
  """Tree whose dynamic leaves can be replaced; the others are static.

  Two partitions are equal if they have the same structure and static leaves.

  Args:
    tree: a pytree of JAX.
    is_dynamic: predicate that selects the dynamic leaves.
    is_torch_tree: flatten by torch's pytree registry instead of JAX's.

  Attributes:
    dynamic: the dynamic leaves, in order.
    leaves: all leaves, with None for dynamic ones.
    is_dynamic: one bool per leaf.
    structure: treedef of JAX, or `TreeSpec` of torch.

  >>> tree = Partition({"x": 1.5, "dim": 0}, lambda leaf: isinstance(leaf, float))
  >>> tree.dynamic, tree.unflatten([2.5])
  ([1.5], {'dim': 0, 'x': 2.5})
  """

  __slots__ = ("dynamic", "leaves", "is_dynamic", "structure", "_key")

  def __init__(
    self,
    tree: Any,
    is_dynamic: Callable[[Any], bool] = is_tensor,
    is_torch_tree: bool = False,
  ):
    flatten = torch_pytree.tree_flatten if is_torch_tree else jax.tree.flatten
    leaves, self.structure = flatten(tree)
    self.is_dynamic = tuple(map(is_dynamic, leaves))
    pairs = list(zip(leaves, self.is_dynamic))
    self.dynamic = [leaf for leaf, dynamic in pairs if dynamic]
    self.leaves = [None if dynamic else leaf for leaf, dynamic in pairs]
    self._key: Hashable = None

  @property
  def key(self) -> Hashable:
    """Cache key: the structure and the static leaves.

    Raises:
      TypeError: a static leaf has no hash.
    """
    if self._key is None:
      static = tuple(map(StaticValue, self.leaves))
      self._key = (self.structure, self.is_dynamic, static)
    return self._key

  def __hash__(self):
    return hash(self.key)

  def __eq__(self, other):
    return type(other) is Partition and self.key == other.key

  def without_arrays(self) -> "Partition":
    """Return a copy without the dynamic leaves, so that a cache keeps no arrays."""
    copy = Partition.__new__(Partition)
    copy.dynamic, copy.leaves, copy._key = [], self.leaves, self._key
    copy.is_dynamic, copy.structure = self.is_dynamic, self.structure
    return copy

  def unflatten(self, values: Iterable) -> Any:
    """Return the tree with `values` as its dynamic leaves."""
    values = iter(values)
    leaves = [
      next(values) if dynamic else leaf
      for leaf, dynamic in zip(self.leaves, self.is_dynamic)
    ]
    if isinstance(self.structure, torch_pytree.TreeSpec):
      return torch_pytree.tree_unflatten(leaves, self.structure)
    return jax.tree.unflatten(self.structure, leaves)
