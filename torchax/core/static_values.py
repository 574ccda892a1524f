"""Python values as parts of cache keys, with one definition of equality.

A compiled function may branch on such values. So 1, 1.0 and True differ, 0.0 and -0.0
differ, and NaN equals itself, unlike with `==`. `partitions.py` uses these keys.
"""

import enum
import functools
import reprlib
import types
from collections.abc import Hashable

import jax
import numpy as np
import torch

from torchax.core.bounded_cache import BoundedCache

# Types of Python numbers.
NUMBERS: frozenset[type] = frozenset({bool, int, float, complex})
# Types of values that are constants in a trace: they depend on no operand.
CONSTANTS = NUMBERS.union(
  (type(None), str, bytes),
  (torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
)

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlist = _short.maxtuple = _short.maxdict = 8


def key_of(value) -> Hashable:
  """Return the cache key of a Python value.

  1, 1.0 and True differ, so do 0.0 and -0.0, and NaN equals itself.

  Args:
    value: a constant, a class or function (by identity), or a list, tuple, dict or set
      of these.

  Returns:
    A hashable key; None for any other value.
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


def describe_value(value) -> str:
  """Describe a value in one line; shorten long ones."""
  if isinstance(value, list) and value and callable(value[0]):
    return f"[{', '.join(map(describe_value, value))}]"
  name = getattr(value, "__qualname__", None)
  return _short.repr(value) if name is None else name


def _key_of_parts(cls, parts) -> tuple | None:
  keys = tuple(map(key_of, parts))
  return None if None in keys else (cls, keys)


class Identity:
  """Wrapper of an object with hash and equality by identity."""

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
  """Python value as part of a tree's structure or of a cache key.

  Raises:
    TypeError: the value is no constant and is not hashable.
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


_numbers: BoundedCache[tuple, StaticValue] = BoundedCache(8192)


_FLAGS = (StaticValue(False), StaticValue(True))


def static_number(value) -> StaticValue:
  """Return a number as a `StaticValue`, cached for most numbers."""
  if type(value) is bool:
    return _FLAGS[value]
  if value == 0 or value != value:  # 0.0, -0.0 and NaN are unsuitable dict keys
    return StaticValue(value)
  box = _numbers.get((type(value), value))
  if box is None:
    box = _numbers[type(value), value] = StaticValue(value)
  return box
