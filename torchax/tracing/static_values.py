"""Arguments of a compiled function that are no arrays: generators, flags, containers.

JAX takes arrays and static values, in containers that it knows (`pytrees.py`). A
generator is static, by its identity; what it draws are operands
(`torchax/rng/carry.py`). Booleans, strings, dtypes and devices decide in Python what a
torch function does, so they are static by their values.
"""

import enum
import functools
import reprlib
import types
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
import torch

from torchax.tracing import pytrees

# Of these no number depends on an argument: they are what Python made of them when the
# function was traced.
CONSTANTS = frozenset(
  {type(None), bool, int, float, complex, str, bytes}
  | {torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout}
)


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


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlist = _short.maxtuple = _short.maxdict = 8


def key_of(value) -> Hashable:
  """What tells a value that Python decides by from any other one.

  1, 1.0 and True differ, so do 0.0 and -0.0, and NaN is itself.

  Args:
    value: a constant, a class or function (by identity), or a list, tuple, dict or set
      of these.

  Returns:
    None where the value is nothing of this.
  """
  cls = type(value)
  if cls is float:
    return (cls, value.hex())
  if cls is complex:
    return (cls, value.real.hex(), value.imag.hex())
  if cls in CONSTANTS or isinstance(value, enum.Enum):
    return (cls, value)
  if isinstance(value, np.generic):
    return (cls, value.tobytes())
  if isinstance(value, list | tuple):
    return _key_of_parts(cls, value)
  if isinstance(value, dict):
    keys = _key_of_parts(cls, value)
    values = _key_of_parts(cls, value.values())
    return None if keys is None or values is None else (keys, values)
  if isinstance(value, set | frozenset):
    parts = _key_of_parts(cls, value)
    return None if parts is None else (cls, frozenset(parts[1]))
  return (cls, Identity(value)) if isinstance(value, _BY_IDENTITY) else None


def in_words(value) -> str:
  """A value in one line, long ones shortened."""
  if isinstance(value, list) and value and callable(value[0]):
    return f"[{', '.join(map(in_words, value))}]"
  name = getattr(value, "__qualname__", None)
  return _short.repr(value) if name is None else name


def _key_of_parts(cls, parts) -> tuple | None:
  keys = tuple(map(key_of, parts))
  return None if None in keys else (cls, keys)


class Identity:
  """Hashes and compares an object by what it is, not by what it holds."""

  __slots__ = ("value",)

  def __init__(self, value):
    self.value = value

  def __hash__(self):
    return id(self.value)

  def __eq__(self, other):
    return type(other) is Identity and self.value is other.value

  def __repr__(self):
    return getattr(self.value, "__qualname__", repr(self.value))


_BY_IDENTITY = (
  *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
  *(type, functools.partial),
)


@jax.tree_util.register_static
class StaticValue:
  """A value that Python decides by, as a part of a tree's structure or of a key.

  Raises:
    TypeError: the value is no constant and cannot be hashed.
  """

  __slots__ = ("value", "_key")

  def __init__(self, value):
    self.value = value
    key = key_of(value)
    self._key = (type(value), value) if key is None else key
    hash(self._key)

  def __hash__(self):
    return hash(self._key)

  def __eq__(self, other):
    return type(other) is StaticValue and self._key == other._key

  def __repr__(self):
    return repr(self.value)


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
