"""Boundary of a traced function: records its reads and writes of outer storages.

Outer storages are read and written through a `Shadow`, so no tracer reaches a tensor
that outlives the trace. The wrapper of the traced function (`torchax/tracing`) returns
the arrays of written shadows as results. `storage.py` has the storages.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax

from torchax.config import Configuration
from torchax.core.static_values import Identity
from torchax.core.storage import Escaped, Prefix, Storage, active
from torchax.errors import TracedStateError


class Shadow:
  """Copy of an outer storage, as a traced function sees it.

  Attributes:
    storage: the outer storage.
    tensor: the leaf tensor through which it was reached, or None.
    array: its current value in the trace.
    written: True once the function has changed it.
    writers: outer tensors without a `grad_fn` that changed it in place.
    is_touched: True once the function has read or changed it.
    version: `version_of` the outer tensor before the function changed it.
  """

  __slots__ = (
    *("storage", "tensor", "array", "written", "writers", "is_touched", "version"),
  )

  def __init__(
    self, storage: Storage, array: jax.Array, version: int | None, tensor=None
  ):
    self.storage = storage
    self.tensor = tensor
    self.version = version
    self.array = array
    self.written = self.is_touched = False
    self.writers: list = []


def version_of(tensor) -> int | None:
  """Return torch's count of in-place changes; None without a tensor that has one."""
  return None if tensor is None or tensor.is_inference() else tensor._version


def _leaf_of(tensor, storage: Storage):
  """Return the tensor or its base if that is a leaf over `storage`; else None.

  Only leaves outlive a trace: other tensors hold a graph of traced values.
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
  """State of one function that is being traced.

  Attributes:
    parent: the enclosing boundary on this thread.
    shadows: shadows of the outer storages it has touched, by identity.
    closed: True once the trace has ended; tensors born in it have no value then.
    roots: outer tensors that were read and require a gradient, by identity; None if
      no gradient is recorded.
    reshapes: tensors whose shape was changed in place, and the changes, by identity.
    guards: guards of the function (`tracing/guards.py`); None if an outer boundary's
      guards cover it.
    attributes: attributes of modules and optimizers when the trace began
      (`tracing/modules.py`); None if they are not tracked.
    made: CPU tensors created in the trace, by identity.
    gradients: `.grad` of outer leaves before the trace (`tracing/gradients.py`), by
      the leaf's identity.
    argument_gradients: `.grad` of the arguments, by the tensor's identity.
    stand_in: (value, name) -> tracer for an operand that is missing, or None.
    numbers: operands for host numbers, by expression; a number that is no operand yet
      has its Python value or a stand-in. None if no number becomes an operand.
    host_numbers: 0-d CPU tensors that count for an optimizer, and the `HostNumber` that
      each has at this point of the trace, by identity.
    name: name of the function, for messages.
    is_trace: True if a JAX trace ends with it; False for a part of a larger trace.
    born: weak references to the storages created in it.
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
    self.gradients: dict[int, Any] = {}
    self.argument_gradients: dict[int, Any] = {}
    self.stand_in: Callable[[Any, Hashable], Any] | None = None
    self.numbers: dict | None = None
    self.host_numbers: dict[int, tuple[Any, Any]] = {}

  def read(self, storage: Storage, tensor=None) -> jax.Array:
    """Return the array of any storage, as seen inside this boundary."""
    if storage.birth is self:
      return storage.array
    if self.roots is not None and tensor is not None and tensor.requires_grad:
      base = tensor._base
      root = tensor if base is None or not base.requires_grad else base
      self.roots[id(root)] = root
    return self._shadow(storage, tensor).array

  def write(self, storage: Storage, array: jax.Array, tensor=None) -> None:
    """Replace this boundary's copy of an outer storage."""
    shadow = self._shadow(storage, None)
    if shadow.version is None:
      shadow.version = version_of(tensor)
    shadow.array = array
    shadow.written = True
    if tensor is not None and tensor.grad_fn is None:
      shadow.writers.append(tensor)

  def guard_on_host(self, value) -> None:
    """Guard on a CPU tensor or a numpy array whose numbers the trace uses."""
    boundary: Boundary | None = self
    while boundary is not None and id(value) not in boundary.made:
      if boundary.guards is not None:
        boundary.guards.guard_on_host(value)
      boundary = boundary.parent

  def guards_around(self) -> Iterator:
    """Yield the guards of this function and of all enclosing ones."""
    boundary: Boundary | None = self
    while boundary is not None:
      if boundary.guards is not None:
        yield boundary.guards
      boundary = boundary.parent

  def number(self, expression):
    """Return the operand of a host number, or its value while it has no operand."""
    if self.numbers is None:
      return expression.now() if self.parent is None else self.parent.number(expression)
    value = self.numbers.get(expression)
    if value is None:
      value = expression.now()
      if self.stand_in is not None:
        value = self.stand_in(value, expression)
      self.numbers[expression] = value
    return value

  def record_reshape(self, tensor, op, args, kwargs) -> None:
    """Record an in-place change of shape, to replay it on the caller's tensor.

    Args:
      tensor: the changed tensor.
      op: the in-place operation.
      args, kwargs: its other arguments: integers and lists of integers.
    """
    _, steps = self.reshapes.setdefault(id(tensor), (tensor, []))
    named = [(name, _hashable(value)) for name, value in kwargs.items()]
    steps.append((op, tuple(map(_hashable, args)), tuple(named)))

  def lift(self, storage: Storage, array: jax.Array, tensor) -> None:
    """Represent an outer storage by `array`, an operand of the traced function."""
    self.shadows[id(storage)] = Shadow(storage, array, version_of(tensor), tensor)

  def leaves(self) -> list:
    """Return the leaves that require a gradient: arguments, and outer tensors met."""
    boundary: Boundary | None = self
    found = []
    while boundary is not None:
      found += [each.leaf for each in boundary.argument_gradients.values()]
      found += [shadow.tensor for shadow in boundary.shadows.values()]
      boundary = boundary.parent
    return [t for t in found if t is not None and t.is_leaf and t.requires_grad]

  def changed_shadows(self) -> list[Shadow]:
    """Return the shadows of the outer storages that the function has changed."""
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
      if self.stand_in is not None:
        outer = self.stand_in(outer, storage)
      shadow = self.shadows[id(storage)] = Shadow(storage, outer, version_of(tensor))
    shadow.is_touched = True
    if tensor is not None and (
      shadow.tensor is None or not shadow.tensor.requires_grad
    ):
      leaf = _leaf_of(tensor, storage)
      shadow.tensor = shadow.tensor if leaf is None else leaf
    return shadow

  @contextlib.contextmanager
  def enter(self) -> Iterator["Boundary"]:
    """Make this the thread's active boundary inside the block."""
    active.boundary = self
    try:
      yield self
    finally:
      active.boundary = self.parent
      self.closed, self.stand_in = True, None
      self._end()

  def _end(self) -> None:
    """Turn storages that hold a tracer into `Escaped`, whose use raises an error."""
    for reference in self.born:
      storage = reference()
      if type(storage) is not Prefix and isinstance(
        getattr(storage, "array", None), jax.core.Tracer
      ):
        storage.__class__ = Escaped
    self.born.clear()


@dataclasses.dataclass(frozen=True)
class _Field:
  """Guard on one field of a configuration."""

  config: Identity
  name: str

  def now(self):
    return getattr(self.config.value, self.name)

  def describe(self) -> str:
    return str(self.now())

  def __str__(self):
    return f"Configuration.{self.name}"


def guard_on_field(config: Configuration, name: str) -> None:
  """Guard on a field of the configuration in the functions that are being traced."""
  if active.boundary is not None:
    for guards in active.boundary.guards_around():
      guards.guard_on_number(_Field(Identity(config), name))
