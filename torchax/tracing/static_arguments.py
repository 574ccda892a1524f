"""Arguments of a compiled function that are no arrays: generators, flags, containers.

JAX takes arrays and static values, in containers that it knows (`pytrees.py`). A
generator is static, by its identity; what it draws are operands
(`rng/keyed_function.py`). Booleans, strings, dtypes and devices decide in Python what a
torch function does, so they are static by their values.
"""

from typing import Any

import jax
import numpy as np
import torch

from torchax.core.static_values import CONSTANTS, StaticValue
from torchax.tracing import pytrees


def require_constant(leaf, name: str) -> None:
  """Raises TypeError for a result that is neither a tensor nor a constant."""
  if type(leaf) not in CONSTANTS:
    kind = type(leaf)
    raise TypeError(
      f"{name} returns a {kind.__module__}.{kind.__qualname__}. A compiled function "
      "returns tensors and constants (numbers, strings, dtypes, devices, None) in "
      "containers that torch's pytrees know: register a class of yours with "
      "`torch.export.register_dataclass`, or return "
      "its tensors in a tuple or dict."
    )


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


_CONSTANTS = frozenset({bool, str, torch.dtype, torch.device})
_CONSTANT_RESULTS = CONSTANTS - {bool, int, float, complex}
_KNOWN_RESULTS = (torch.Tensor, jax.Array, np.ndarray, np.generic, pytrees.Container)


def hidden(tree) -> Any:
  """The tree with its generators as structure, and torch's containers as JAX's."""
  return jax.tree.map(_hidden, tree, is_leaf=_is_whole)


def hidden_arguments(tree) -> Any:
  """`hidden`, with flags, strings, dtypes and devices as structure as well."""
  return jax.tree.map(_hidden_argument, tree, is_leaf=_is_whole)


def hidden_results(tree, name: str) -> Any:
  """`hidden` for what a function returns, with its constants as structure.

  Numbers and booleans stay: they become tensors.

  Args:
    tree: the result.
    name: of the function.

  Raises:
    TypeError: a leaf is neither a tensor, an array nor a constant.
  """

  def hide(leaf):
    leaf = _hidden(leaf, lambda part: hidden_results(part, name))
    if type(leaf) in _CONSTANT_RESULTS:
      return StaticValue(leaf)
    if not isinstance(leaf, _KNOWN_RESULTS):
      require_constant(leaf, name)
    return leaf

  return jax.tree.map(hide, tree, is_leaf=_is_whole)


def _hidden_argument(leaf):
  if type(leaf) in _CONSTANTS:
    return StaticValue(leaf)
  return _hidden(leaf, hidden_arguments)


def _hidden(leaf, convert=hidden):
  if isinstance(leaf, torch.Generator):
    return HiddenGenerator(leaf)
  return pytrees.closed(leaf, convert) or leaf


def _is_whole(value) -> bool:
  return isinstance(value, torch.Tensor) or pytrees.is_adopted(value)


def shown(tree) -> Any:
  """The tree with generators and containers again where `hidden` has hidden them."""
  return jax.tree.map(_shown, tree, is_leaf=_is_hidden)


def _shown(leaf):
  if isinstance(leaf, HiddenGenerator):
    return leaf.generator
  if type(leaf) is StaticValue:
    return leaf.value
  return leaf.opened(shown) if type(leaf) is pytrees.Container else leaf


def _is_hidden(value) -> bool:
  return isinstance(value, _HIDDEN)


_HIDDEN = (HiddenGenerator, StaticValue, pytrees.Container, torch.Tensor)
