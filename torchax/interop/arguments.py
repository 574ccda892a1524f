"""Arguments of a compiled function that are no arrays: `torch.Generator`.

JAX takes arrays and static values. A generator is static, by its identity; what it
draws are operands (`torchax/rng/carry.py`).
"""

from typing import Any

import jax
import torch


@jax.tree_util.register_static
class HiddenGenerator:
  """A generator as a part of a tree's structure."""

  __slots__ = ("generator",)

  def __init__(self, generator: torch.Generator):
    self.generator = generator

  def __hash__(self):
    return self.generator._cdata

  def __eq__(self, other):
    # torch may wrap one generator in several objects.
    same = type(other) is HiddenGenerator
    return same and self.generator._cdata == other.generator._cdata


def hidden(tree) -> Any:
  """The tree with its generators as structure."""
  return jax.tree.map(
    lambda leaf: HiddenGenerator(leaf) if isinstance(leaf, torch.Generator) else leaf,
    tree,
    is_leaf=_is_tensor,
  )


def shown(tree) -> Any:
  """The tree with generators again where `hidden` has hidden them."""
  return jax.tree.map(
    lambda leaf: leaf.generator if isinstance(leaf, HiddenGenerator) else leaf,
    tree,
    is_leaf=lambda leaf: isinstance(leaf, HiddenGenerator | torch.Tensor),
  )


def _is_tensor(value) -> bool:
  return isinstance(value, torch.Tensor)
