"""Trees split into arrays and the rest, and merged again."""

import collections
import math

import numpy as np
import pytest
import torch
from torch.utils import _pytree as torch_pytree

from torchax.core.partitions import Partition

Pair = collections.namedtuple("Pair", "first second")
X, Y = torch.zeros(2), torch.ones(2)

TREES = {
  "a_leaf": X,
  "nested": {"a": [X, 1], "b": (None, Y, "mode")},
  "named": Pair(X, 2.5),
  "nothing_given": [1, True, None],
  "empty": (),
}


@pytest.mark.parametrize("of_torch", [False, True])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_tree_comes_back_with_other_leaves(tree, of_torch):
  parts = Partition(tree, is_torch_tree=of_torch)
  assert all(isinstance(leaf, torch.Tensor) for leaf in parts.dynamic)
  given = [number + 10 for number in range(len(parts.dynamic))]
  remaining = iter(given)
  expected = torch_pytree.tree_map_only(torch.Tensor, lambda _: next(remaining), tree)
  for found in (parts.unflatten(given), parts.without_arrays().unflatten(given)):
    assert found == expected and type(found) is type(expected)


def test_the_caller_chooses_the_dynamic_leaves():
  parts = Partition([1.5, np.ones(2), 3], np.ndim)
  assert [np.ndim(leaf) for leaf in parts.dynamic] == [1]
  assert parts.unflatten(["array"]) == [1.5, "array", 3]


DIFFERENT = {
  "number": ((X, 1), (X, 2)),
  "type": ((X, 1), (X, True)),
  "sign_of_zero": ((X, 0.0), (X, -0.0)),
  "structure": ((X, 1), [X, 1]),
  "none_and_a_tensor": ({"a": X, "b": 1}, {"a": 1, "b": X}),
}


@pytest.mark.parametrize("trees", DIFFERENT.values(), ids=DIFFERENT)
def test_keys_tell_trees_apart(trees):
  first, second = map(Partition, trees)
  assert first != second


def test_keys_do_not_depend_on_the_arrays():
  first, second = Partition((X, math.nan)), Partition((Y, math.nan))
  assert first == second and hash(first) == hash(second)


def test_a_static_leaf_without_a_hash_is_refused():
  with pytest.raises(TypeError, match="unhashable"):
    hash(Partition([X, np.ones(2)]))
