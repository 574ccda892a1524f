"""Boxes for arguments and results that are not arrays: generators, flags, containers.

JAX accepts arrays and static values, in registered containers (`conversions.py`). A
generator is static by identity; its random state is an operand
(`rng/keyed_function.py`). Torch functions branch on booleans, strings, dtypes and
devices, so these are static by value. Wrappers box before a call and unbox after it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from torchax.compat import jax_compat
from torchax.core.partitions import is_tensor
from torchax.core.static_values import CONSTANTS, NUMBERS, StaticValue
from torchax.subclasses import SubclassTensor
from torchax.tensor import Tensor
from torchax.tracing.conversions import Container, box_container, is_adopted


@jax.tree_util.register_static
class BoxedGenerator:
  """Generator as part of a tree's structure."""

  __slots__ = ("generator",)
  generator: Any  # torch's annotations lack the `_cdata` of a generator

  def __init__(self, generator: torch.Generator):
    self.generator = generator

  def __hash__(self):
    return self.generator._cdata

  def __eq__(self, other):
    # torch may wrap one generator in several Python objects.
    same = type(other) is BoxedGenerator
    return same and self.generator._cdata == other.generator._cdata


_CONSTANTS = frozenset({bool, str, torch.dtype, torch.device})
_CONSTANT_RESULTS = CONSTANTS - NUMBERS
_UNBOXED = frozenset({Tensor, jax_compat.ArrayImpl, np.ndarray, int, float, complex})
_KNOWN_RESULTS = (torch.Tensor, jax.Array, np.ndarray, np.generic)


def box(
  tree, constants: frozenset[type] = frozenset(), keeps_form: bool = False
) -> Any:
  """Box generators as part of the tree's structure, and torch's containers.

  Args:
    tree: a pytree of JAX.
    constants: classes of leaves that are boxed by value.
    keeps_form: box dicts whose keys JAX would sort, and tensors of a user's class.
  """
  if type(tree) is list and _UNBOXED.issuperset(map(type, tree)):
    return tree
  parts_of = functools.partial(box, constants=constants, keeps_form=keeps_form)
  of_user = SubclassTensor if keeps_form else ()

  def box_leaf(leaf):
    if isinstance(leaf, Tensor) and not isinstance(leaf, of_user):
      return leaf
    if type(leaf) in constants:
      return StaticValue(leaf)
    if isinstance(leaf, torch.Generator):
      return BoxedGenerator(leaf)
    if type(leaf) is dict and _is_sorted(leaf):
      return dict(zip(leaf, parts_of(list(leaf.values()))))
    return box_container(leaf, parts_of) or leaf

  def is_leaf(value) -> bool:
    return is_tensor(value) or is_adopted(value) or keeps_form and type(value) is dict

  return jax.tree.map(box_leaf, tree, is_leaf=is_leaf)


def _is_sorted(mapping: dict) -> bool:
  keys = list(mapping)
  try:
    return keys == sorted(keys)
  except TypeError:  # keys without an order, which JAX refuses
    return False


def box_arguments(tree, keeps_form: bool = False) -> Any:
  """Apply `box`, and box flags, strings, dtypes and devices as well."""
  return box(tree, _CONSTANTS, keeps_form)


def box_results(tree, name: str, keeps_form: bool = False) -> Any:
  """Apply `box` to the result of a function, and box its constants as well.

  Numbers and booleans are not boxed: they become tensors.

  Raises:
    TypeError: a leaf is neither a tensor, an array nor a constant.
  """
  boxed = box(tree, _CONSTANT_RESULTS, keeps_form)
  for leaf in jax.tree.leaves(boxed, is_leaf=is_tensor):
    kind = type(leaf)
    if jax_compat.is_ref(leaf):
      raise TypeError(
        f"{name} returns a jax.Ref, which its caller already has. Return the value: "
        "`ref[...]`."
      )
    if kind not in CONSTANTS and not isinstance(leaf, _KNOWN_RESULTS):
      raise TypeError(
        f"{name} returns a {kind.__module__}.{kind.__qualname__}. A compiled function "
        "returns tensors and constants (numbers, strings, dtypes, devices, None) in "
        "containers that torch's pytrees know: register a class of yours with "
        "`torch.export.register_dataclass`, or return "
        "its tensors in a tuple or dict."
      )
  return boxed


def convert_static(
  options: dict, convert: Callable, args: tuple, kwargs: dict
) -> tuple:
  """Return the arguments; convert those that options of `jax.jit` name as static."""
  numbers, names = [
    (option,) if isinstance(option, int | str) else tuple(option or ())
    for option in map(options.get, ("static_argnums", "static_argnames"))
  ]
  if not (numbers or names):
    return args, kwargs
  positions = {n if n >= 0 else n + len(args) for n in numbers}
  return (
    tuple([convert(v) if n in positions else v for n, v in enumerate(args)]),
    {name: convert(v) if name in names else v for name, v in kwargs.items()},
  )


def unbox(tree) -> Any:
  """Undo `box`, also of arguments and results."""
  return jax.tree.map(_unbox_leaf, tree, is_leaf=lambda v: isinstance(v, _BOXED))


def _unbox_leaf(leaf):
  if isinstance(leaf, BoxedGenerator):
    return leaf.generator
  if type(leaf) is StaticValue:
    return leaf.value
  return leaf.unbox(unbox) if type(leaf) is Container else leaf


_BOXED = (BoxedGenerator, StaticValue, Container, torch.Tensor)
