"""Assignments to attributes of modules: `self.c = self.c * 2` in a traced function.

An assignment during a trace gives the module a traced value, which has no numbers
outside of the trace. So the tensors that modules hold are noted before, and what the
function has assigned is found by comparing. A plain attribute whose tensor was not read
gets a new tensor after each call, which is a result of the program like any other. A
buffer, or what was read before, keeps its tensor, which takes the new numbers.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from torchax.core.boundary import Boundary
from torchax.core.chains import WHOLE
from torchax.core.static_values import Identity
from torchax.core.storage import Storage, active
from torchax.errors import MutationError
from torchax.tensor import Tensor
from torchax.tracing.module_values import writes

_MISSING = object()


@dataclasses.dataclass
class Assignment:
  """A tensor that was assigned to an attribute of a module.

  Attributes:
    module: the module.
    name: of the attribute.
    table: the dict that holds it: parameters, buffers, or plain attributes.
    before: the value that it had; anything where it had no tensor.
    value: the tensor that it has now.
  """

  module: torch.nn.Module
  name: str
  table: dict
  before: object
  value: torch.Tensor

  @property
  def is_registered(self) -> bool:
    """True for a parameter or buffer, False for a plain attribute."""
    return self.table is not vars(self.module)

  @property
  def target(self) -> "Target":
    """The plain attribute, as a call finds it."""
    return Target(Identity(self.module), self.name, self.value.requires_grad)

  def undo(self) -> None:
    """Gives the attribute the value that it had."""
    if self.before is _MISSING:
      self.table.pop(self.name, None)
    else:
      self.table[self.name] = self.before

  def __str__(self) -> str:
    return f"{type(self.module).__name__}.{self.name}"


@dataclasses.dataclass(frozen=True)
class Target:
  """Plain attribute of a module that each call gives a new tensor."""

  module: Identity
  name: str
  has_gradient: bool

  def get(self) -> torch.Tensor:
    """The tensor that it has."""
    return vars(self.module.value)[self.name]

  def set(self, tensor: torch.Tensor) -> None:
    """Gives it a tensor."""
    boundary = active.boundary
    if boundary is not None and boundary.attributes is not None:
      boundary.attributes.note(self.module.value)  # it is handed on from there
    attributes = vars(self.module.value)
    if not isinstance(attributes.get(self.name), torch.Tensor):
      writes.count += 1  # that there is a tensor now is what Python may decide by
    attributes[self.name] = tensor if self.has_gradient else tensor.detach()

  def describe(self, paths: dict[int, str]) -> str:
    """Return its name, given the paths of modules by their identities."""
    module = self.module.value
    return f"{paths.get(id(module), type(module).__name__)}.{self.name}"


class Attributes:
  """Attributes of modules, and states of optimizers, before a trace.

  Attributes:
    states: of the optimizers that were stepped, by identity (`optimizer_state.py`).
  """

  def __init__(self):
    self.states: dict[int, Any] = {}
    self._noted: dict[int, tuple[torch.nn.Module, list[tuple[dict, dict]]]] = {}

  def note(self, module: torch.nn.Module) -> None:
    """Adds a module with its submodules, as they are now."""
    if id(module) in self._noted:
      return
    for part in module.modules():
      tables = (part._parameters, part._buffers, vars(part))
      self._noted.setdefault(
        id(part), (part, [(table, dict(table)) for table in tables])
      )

  def assigned(self) -> Iterator[Assignment]:
    """The tensors that were assigned since."""
    for module, tables in self._noted.values():
      for table, before in tables:
        for name, value in list(table.items()):
          known = before.get(name, _MISSING)
          if isinstance(value, torch.Tensor) and value is not known:
            yield Assignment(module, name, table, known, value)

  def undo_traced(self, boundary: Boundary) -> None:
    """Takes the tensors that were born in a trace out of the attributes."""
    for assignment in list(self.assigned()):
      if is_born_in(assignment.value, boundary):
        assignment.undo()

  def take_out(self, boundary: Boundary, name: str, hands_out: bool) -> list[tuple]:
    """Takes back what was assigned; it takes effect when the function has run.

    Args:
      boundary: the trace.
      name: of the function.
      hands_out: the tensors of plain attributes can be results of the function.
        Otherwise an attribute that had no tensor keeps the traced one, which says what
        is wrong when it is used.

    Returns:
      Plain attributes whose tensors are results (`Target`), with these tensors. The
      other assignments are changes of the tensors that the modules have.

    Raises:
      MutationError: the assigned tensor cannot be written to the one before.
    """
    found, results = [], []
    for assignment in self.assigned():
      # Anything else is a module's own tensor, back after a call with others.
      if not is_born_in(assignment.value, boundary):
        continue
      if hands_out and not self._was_read(assignment, boundary):
        results.append(assignment)
      elif assignment.is_registered or _is_alive(assignment.before):
        found.append(assignment)
    arrays = []
    for assignment in found:
      reason = self._obstacle(assignment)
      if reason:
        raise MutationError(
          f"{name} assigns a new tensor to {assignment} {reason}, which cannot be "
          f"handed back to the module. Write the numbers to the tensor it has, such as "
          f"`self.{assignment.name}.copy_(…)` or `.mul_(…)`, or return the new tensor."
        )
      arrays.append(assignment.value.jax())
    for assignment in (*found, *results):
      assignment.undo()
    for assignment, array in zip(found, arrays):
      assignment.before._storage.write(array)
    return [(assignment.target, assignment.value) for assignment in results]

  def _was_read(self, assignment: Assignment, boundary: Boundary) -> bool:
    """True where a later call may depend on what is assigned in this one.

    Memory that another attribute shares, as after `spectral_norm(module)`, may have
    been read by that one. If not, the guard of the attribute has the next call traced
    again, and there its memory is its own.
    """
    before = assignment.before
    if assignment.is_registered:
      return True
    if not _is_alive(before):
      return False
    storage = before._storage
    shadow = boundary.shadows.get(id(storage))
    is_touched = shadow is not None and shadow.is_touched
    return storage.birth is boundary or (is_touched and self._sharers(storage) == 1)

  def _sharers(self, storage: Storage) -> int:
    """How many different tensors of the modules had a storage."""
    values = itertools.chain.from_iterable(
      before.values() for _, tables in self._noted.values() for _, before in tables
    )
    tensors = {id(v): v for v in values if isinstance(v, Tensor)}
    return sum(tensor._storage is storage for tensor in tensors.values())

  def _obstacle(self, assignment: Assignment) -> str | None:
    before, value = assignment.before, assignment.value
    if not _is_alive(before) or not isinstance(value, Tensor):
      return "that had no jax tensor before"
    if isinstance(before, torch.nn.Parameter):
      return "that is a parameter"
    if before.shape != value.shape or before.dtype != value.dtype:
      was, now = [f"{t.dtype}{list(t.shape)}" for t in (before, value)]
      return f"of another shape or dtype ({now}, but it was {was})"
    if value.requires_grad or before.requires_grad:
      return "that needs a gradient (`.detach()` it if it should not)"
    if before._chain is not WHOLE or self.holders(before) > 1:
      return "whose memory other tensors share"
    return None

  def holders(self, tensor: torch.Tensor) -> int:
    """In how many places of the modules a tensor was."""
    return sum(
      value is tensor
      for _, tables in self._noted.values()
      for _, before in tables
      for value in before.values()
    )


def is_born_in(tensor, boundary: Boundary) -> bool:
  """True for a jax tensor that was made in a trace."""
  return isinstance(tensor, Tensor) and tensor._storage.birth is boundary


def _is_alive(value) -> bool:
  """True for a jax tensor that is not left over from a trace that has ended."""
  if not isinstance(value, Tensor):
    return False
  birth = value._storage.birth
  return birth is None or not birth.closed
