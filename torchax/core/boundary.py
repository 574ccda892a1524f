"""Boundary of a function that is being traced: what it reads and writes of outside.

A storage from outside is read and written through a `Shadow`, so that no tracer reaches
a tensor that outlives the trace. The wrapper returns what shadows were written.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import jax

from torchax.core.storage import Ended, Start, Storage, active
from torchax.errors import TracedStateError


class Shadow:
  """Copy of an outer storage, as a traced function sees it.

  Attributes:
    storage: the storage.
    tensor: by which it was reached.
    array: what it holds, as far as the function has come.
    written: the function has changed it.
    writers: outer tensors without a graph by which it was changed in place.
    is_touched: the function has read or changed it.
  """

  __slots__ = ("storage", "tensor", "array", "written", "writers", "is_touched")

  def __init__(self, storage: Storage, array: jax.Array, tensor=None):
    self.storage = storage
    self.tensor = tensor
    self.array = array
    self.written = self.is_touched = False
    self.writers: list = []


def _leaf_of(tensor, storage: Storage):
  """The leaf that a tensor is, or is a view of; None for any other tensor.

  Only leaves are kept beyond a trace: others hold a graph of traced values.
  """
  for candidate in (tensor, tensor._base):
    if candidate is None or not candidate.is_leaf:
      continue
    if candidate._storage is storage and not candidate._chain.infos:
      return candidate
  return None


def _hashable(value):
  return tuple(value) if isinstance(value, list) else value


class Boundary:
  """A function that is being traced.

  Attributes:
    parent: the boundary around it on this thread.
    shadows: the outer storages it has touched, by identity.
    closed: True once the trace has ended; tensors born in it have no value then.
    roots: outer tensors that were read and need a gradient, by identity; None where
      no gradient is recorded.
    reshapes: by identity, tensors whose shape was changed in place, and how.
    guards: of the function (`tracing/guards.py`), which record what it decides by; None
      where another boundary's stand for it.
    attributes: what modules and optimizers had when the trace began
      (`tracing/modules.py`); None where nothing is handed out.
    made: by identity, tensors on the CPU that were made in the trace.
    numbers: values of numbers of the host, by the expression of each: operands, and
      those that are no operands yet. None where no number becomes an operand.
    name: of the function, for messages.
    is_trace: a trace of JAX ends with it; else it is a part of a larger one.
    born: references to the storages that were made in it.
  """

  def __init__(
    self,
    records: bool = False,
    name: str = "a function",
    is_trace: bool = True,
    guards=None,
  ):
    self.parent = active.boundary
    self.name = name
    self.is_trace = is_trace
    self.born: list[weakref.ref] = []
    self.shadows: dict[int, Shadow] = {}
    self.closed = False
    self.roots: dict[int, Any] | None = {} if records else None
    self.reshapes: dict[int, tuple[Any, list]] = {}
    self.guards = guards
    self.attributes: Any = None
    self.made: dict[int, object] = {}
    self.numbers: dict | None = None

  def read(self, storage: Storage, tensor=None) -> jax.Array:
    """The array of any storage, inside this boundary."""
    if storage.birth is self:
      return storage.array
    if self.roots is not None and tensor is not None and tensor.requires_grad:
      base = tensor._base
      root = tensor if base is None or not base.requires_grad else base
      self.roots[id(root)] = root
    return self._shadow(storage, tensor).array

  def write(self, storage: Storage, array: jax.Array, tensor=None) -> None:
    """Changes this boundary's copy of an outer storage."""
    shadow = self._shadow(storage, None)
    shadow.array = array
    shadow.written = True
    if tensor is not None and tensor.grad_fn is None:
      shadow.writers.append(tensor)

  def guard_on_host(self, value) -> None:
    """Notes a tensor on the CPU, or a numpy array, whose numbers are constants."""
    boundary: Boundary | None = self
    while boundary is not None and id(value) not in boundary.made:
      if boundary.guards is not None:
        boundary.guards.guard_on_host(value)
      boundary = boundary.parent

  def guards_around(self) -> Iterator:
    """The guards of this function and of those around it, which decide by the same."""
    boundary: Boundary | None = self
    while boundary is not None:
      if boundary.guards is not None:
        yield boundary.guards
      boundary = boundary.parent

  def number(self, expression):
    """Return the operand for a number of the host, or the number before it has one."""
    if self.numbers is None:
      return expression.now() if self.parent is None else self.parent.number(expression)
    found = self.numbers.get(expression)
    if found is None:
      found = self.numbers[expression] = expression.now()
    return found

  def record_reshape(self, tensor, op, args, kwargs) -> None:
    """Record a change of shape in place, to replay it on the caller's tensor.

    Args:
      tensor: the changed tensor.
      op: the operation.
      args, kwargs: of the operation after the tensor; lists of integers and integers.
    """
    _, steps = self.reshapes.setdefault(id(tensor), (tensor, []))
    named = [(name, _hashable(value)) for name, value in kwargs.items()]
    steps.append((op, tuple(map(_hashable, args)), tuple(named)))

  def lift(self, storage: Storage, array: jax.Array, tensor) -> None:
    """Shows an outer storage as `array`, an operand of the traced function."""
    self.shadows[id(storage)] = Shadow(storage, array, tensor)

  def written(self) -> list[Shadow]:
    """The outer storages that the function has changed."""
    return [shadow for shadow in self.shadows.values() if shadow.written]

  def _shadow(self, storage: Storage, tensor) -> Shadow:
    shadow = self.shadows.get(id(storage))
    if shadow is None:
      if storage.birth is not None and storage.birth.closed:
        raise TracedStateError(
          f"A tensor that was made while `{storage.birth.name}` was being traced is "
          "used after the trace: it may be another one in each call. Return it from "
          "the function; or, if an optimizer or a module made it on first use, run one "
          "step eagerly before."
        )
      outer = (
        storage.array if self.parent is None else self.parent.read(storage, tensor)
      )
      shadow = self.shadows[id(storage)] = Shadow(storage, outer)
    shadow.is_touched = True
    if tensor is not None and (
      shadow.tensor is None or not shadow.tensor.requires_grad
    ):
      leaf = _leaf_of(tensor, storage)
      shadow.tensor = shadow.tensor if leaf is None else leaf
    return shadow

  @contextlib.contextmanager
  def enter(self) -> Iterator["Boundary"]:
    """Makes this the active boundary of the thread for the block."""
    active.boundary = self
    try:
      yield self
    finally:
      active.boundary = self.parent
      self.closed = True
      self._end()

  def _end(self) -> None:
    """Lets any use of what was made here, and is still there, say what it is."""
    for reference in self.born:
      storage = reference()
      if type(storage) is not Start and isinstance(
        getattr(storage, "array", None), jax.core.Tracer
      ):
        storage.__class__ = Ended
    self.born.clear()
