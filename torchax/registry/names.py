"""Namespaces of torch's operations that tolerate names this torch lacks.

  from torchax.registry.names import aten

  @op(aten.cholesky)  # torch 2.15 has dropped it: nothing is registered

`aten.name` and `aten.name.overload` work as with `torch.ops.aten`. An overload is
torch's own object. A `Packet` wraps torch's packet, equals it, and finds its overloads.
An absent operation is `Missing`: it can be registered, put in a table, or asked for an
overload, all without effect; calling it raises.
"""

from collections.abc import Mapping

import torch

from torchax.compat.torch_compat import OpOverloadPacket
from torchax.errors import OperatorNotFound


class Missing:
  """Operation or function that this version of torch does not have."""

  def __init__(self, name: str):
    self._name = name
    self.__name__ = name.rpartition(".")[2]

  def __getattr__(self, name: str) -> "Missing":
    if name.startswith("_"):
      raise AttributeError(f"{self!r} has no attribute {name!r}.")
    return Missing(f"{self._name}.{name}")

  def __call__(self, *args, **kwargs):
    raise OperatorNotFound(
      f"torch {torch.__version__} has no {self._name}. The documentation lists the "
      "versions of torch that torchax is tested with."
    )

  def __bool__(self) -> bool:
    return False

  def __eq__(self, other) -> bool:
    return isinstance(other, Missing) and other._name == self._name

  def __hash__(self) -> int:
    return hash((Missing, self._name))

  def __repr__(self) -> str:
    return f"<{self._name}, which torch {torch.__version__} lacks>"


class Packet:
  """Packet of torch whose overloads may be missing.

  Attributes:
    packet: torch's `OpOverloadPacket`.
  """

  def __init__(self, path: str, packet):
    self.packet = packet
    self._path = path

  def __getattr__(self, name: str):
    # Other attributes, such as `overloads` and dunder names, are the packet's.
    path = f"{self._path}.{name}"
    member = find(path, self.packet, name)
    if not isinstance(member, Missing):
      setattr(self, name, member)
    elif name.startswith("_"):
      raise AttributeError(f"{self.packet} has no attribute {name!r}.")
    return member

  def __call__(self, *args, **kwargs):
    return self.packet(*args, **kwargs)

  def __eq__(self, other) -> bool:
    return self.packet == (other.packet if isinstance(other, Packet) else other)

  def __hash__(self) -> int:
    return hash(self.packet)

  def __repr__(self) -> str:
    return repr(self.packet)


class Namespace:
  """Module or namespace of torch; absent attributes are `Missing`.

  Args:
    path: name for messages, such as "torch.ops.aten".
    owner: the module or namespace.
  """

  def __init__(self, path: str, owner):
    self._path, self._owner = path, owner

  def __getattr__(self, name: str):
    path = f"{self._path}.{name}"
    member = find(path, self._owner, name)
    if isinstance(member, OpOverloadPacket):
      member = Packet(path, member)
    if not isinstance(member, Missing):
      # `Missing` is not cached: the operation may be defined later.
      setattr(self, name, member)
    return member


def find(path: str, owner, name: str):
  """Return an attribute, or `Missing(path)` if it does not exist."""
  try:
    return getattr(owner, name)
  except AttributeError:
    return Missing(path)


def resolve(operation):
  """Return torch's own object for an operation; None for one that is missing."""
  if isinstance(operation, Packet):
    return operation.packet
  return None if isinstance(operation, Missing) else operation


def present(table):
  """Return a table of operations without missing ones, with torch's own objects.

  Args:
    table: an iterable; or a mapping, whose entries with a missing key or value are
      left out.
  """
  if not isinstance(table, Mapping):
    return tuple(resolve(row) for row in table if not isinstance(row, Missing))
  return {
    resolve(key): resolve(value)
    for key, value in table.items()
    if not (isinstance(key, Missing) or isinstance(value, Missing))
  }


aten = Namespace("torch.ops.aten", torch.ops.aten)
prims = Namespace("torch.ops.prims", torch.ops.prims)
higher_order = Namespace("torch.ops.higher_order", torch.ops.higher_order)
# Functions and methods caught above ATen.
F = Namespace("torch.nn.functional", torch.nn.functional)
functions = Namespace("torch", torch)
methods = Namespace("torch.Tensor", torch.Tensor)
