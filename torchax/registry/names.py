"""torch's operations by name, where a name that this torch lacks is no error.

  from torchax.registry.names import aten

  @op(aten.cholesky)  # torch 2.15 has dropped it: nothing is registered

`aten.name` and `aten.name.overload` are written as with `torch.ops.aten`. An overload
is torch's own object. A packet is a view of torch's that equals it and finds overloads
in the same way. What torch does not have is `Missing`: it can be registered, stand in
a table and be given an overload's name, all without effect; calling it raises.
"""

from collections.abc import Mapping

import torch

from torchax.compat.torch_compat import OpOverloadPacket
from torchax.errors import OperatorNotFound


class Missing:
  """An operation or a function that this version of torch does not have."""

  def __init__(self, name: str):
    self._name = name
    self.__name__ = name.rpartition(".")[2]

  def __getattr__(self, name: str) -> "Missing":
    if name.startswith("_"):
      raise AttributeError(f"{self!r} has no attribute {name!r}.")
    return Missing(f"{self._name}.{name}")

  def __call__(self, *args, **kwargs):
    """Raises `OperatorNotFound`, as calling what does not exist must."""
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
  """A packet of torch's whose overloads may be missing.

  Attributes:
    packet: torch's own, `OpOverloadPacket`.
  """

  def __init__(self, path: str, packet):
    self.packet = packet
    self._path = path

  def __getattr__(self, name: str):
    # What is not an overload, such as `overloads` and dunder names, is the packet's.
    path = f"{self._path}.{name}"
    found = find(path, self.packet, name)
    if not isinstance(found, Missing):
      setattr(self, name, found)
    elif name.startswith("_"):
      raise AttributeError(f"{self.packet} has no attribute {name!r}.")
    return found

  def __call__(self, *args, **kwargs):
    """Runs torch's packet."""
    return self.packet(*args, **kwargs)

  def __eq__(self, other) -> bool:
    return self.packet == (other.packet if isinstance(other, Packet) else other)

  def __hash__(self) -> int:
    return hash(self.packet)

  def __repr__(self) -> str:
    return repr(self.packet)


class Namespace:
  """The attributes of a module or namespace of torch, or `Missing`.

  Args:
    path: how messages name it, such as "torch.ops.aten".
    owner: what is looked up in.
  """

  def __init__(self, path: str, owner):
    self._path, self._owner = path, owner

  def __getattr__(self, name: str):
    path = f"{self._path}.{name}"
    found = find(path, self._owner, name)
    if isinstance(found, OpOverloadPacket):
      found = Packet(path, found)
    if not isinstance(found, Missing):
      # An operation that is defined later must be found then.
      setattr(self, name, found)
    return found


def find(path: str, owner, name: str):
  """An attribute, or `Missing` for one that does not exist."""
  try:
    return getattr(owner, name)
  except AttributeError:
    return Missing(path)


def resolve(operation):
  """torch's own object for an operation; None for one that is missing."""
  if isinstance(operation, Packet):
    return operation.packet
  return None if isinstance(operation, Missing) else operation


def present(table):
  """A table of operations without what is missing, with torch's own objects.

  Args:
    table: a mapping, of which an entry is left out where its key or its value is
      missing; or an iterable.
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
# Functions and methods that are caught above ATen.
F = Namespace("torch.nn.functional", torch.nn.functional)
functions = Namespace("torch", torch)
methods = Namespace("torch.Tensor", torch.Tensor)
