"""Optimizer state that a traced step creates or counts, as effects of the program.

The first step of an optimizer may create state from gradients, such as the momentum
buffers of SGD with dampening. In a trace these are tracers, without values outside it.
So `optimizers.py` records the state before the step, `modules.Attributes` removes the
new entries after the trace, and each call assigns them to the optimizer.

Numbers that a step changes, such as a count of steps, are operands
(`core/host_numbers.py`), and each call computes the new ones.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from torchax.core.boundary import Boundary
from torchax.core.chains import WHOLE
from torchax.core.host_numbers import Entry, HostNumber
from torchax.core.static_values import Identity, key_of
from torchax.core.storage import active
from torchax.errors import TracedStateError
from torchax.tensor import Tensor
from torchax.tracing.modules import is_alive, is_born_in, is_same


@dataclasses.dataclass(frozen=True)
class StateTarget:
  """Entry of an optimizer's state; each call assigns a new tensor to it."""

  kind = "assigned"
  optimizer: Identity
  parameter: Identity
  name: str

  def get(self, leaves: list) -> torch.Tensor:
    return self.optimizer.value.state[self.parameter.value][self.name]

  def set(self, tensor: torch.Tensor, leaves: list) -> None:
    optimizer = self.optimizer.value
    if active.boundary is not None:
      # The outer trace turns the assignment into an effect of its own.
      record(optimizer, active.boundary)
    optimizer.state[self.parameter.value][self.name] = tensor.detach()

  def describe(self, paths: dict[int, str], arguments: list[str]) -> str:
    """Return the name of the entry; the arguments are for the other targets."""
    return str(Entry(self.optimizer.value, self.parameter, self.name))


class Groups:
  """Parameter groups of an optimizer at one time."""

  def __init__(self, optimizer: torch.optim.Optimizer):
    self._optimizer = optimizer
    self._groups = [(group, dict(group)) for group in optimizer.param_groups]

  def changed(self, boundary: Boundary | None = None) -> list[str]:
    """Return the names of entries with another value, except tensors of the trace."""
    now = self._optimizer.param_groups
    names = [] if len(now) == len(self._groups) else ["params"]
    for group, (_, before) in zip(now, self._groups):
      names += [
        name
        for name, value in group.items()
        if value is not before.get(name)
        and not is_equal(before.get(name), value)
        and not (boundary and is_born_in(value, boundary))
      ]
    return names

  def require_unchanged(self, boundary: Boundary) -> None:
    """Raise TracedStateError if a traced function has changed the groups."""
    if changed := self.changed(boundary):
      raise TracedStateError(
        f"`{boundary.name}` changes {changed[0]!r} of the parameter groups of "
        f"{type(self._optimizer).__name__}, which a compiled function does only while "
        "it is traced. Step a learning-rate schedule after the call: the next call "
        "reads the new number. Run an optimizer that wraps this one eagerly."
      )

  def restore(self) -> None:
    """Restore the groups and their entries."""
    for group, before in self._groups:
      group.clear()
      group.update(before)
    self._optimizer.param_groups[:] = [group for group, _ in self._groups]


class State:
  """State of an optimizer before its first step in a trace.

  Attributes:
    numbers: new numbers that each call of the program assigns to the optimizer:
      constants and `HostNumber` objects.
  """

  def __init__(self, optimizer: torch.optim.Optimizer):
    self.optimizer = optimizer
    self.numbers: dict[Entry, Any] = {}
    # Parameters whose state `optimizers.py` created before the step.
    self._created: list[torch.Tensor] = []
    self._before = {
      parameter: dict(entries)
      for parameter, entries in optimizer.state.items()
      if isinstance(entries, dict)
    }
    # 0-d CPU tensors with counts.
    self._counting: dict[Entry, torch.Tensor] = {}
    self._containers = list(_containers_of(optimizer))

  def take_numbers(self, boundary: Boundary) -> None:
    """Replace the numbers in the state by operands of the trace, until `undo`.

    A count in a CPU tensor, also of a group, is one as well
    (`dispatch/counting_tensors.py`).
    """
    for parameter, before in self._before.items():
      entries = self.optimizer.state[parameter]
      for name, value in before.items():
        entry = Entry(self.optimizer, Identity(parameter), name)
        if type(value) in (int, float) and entries.get(name) is value:
          entry.in_trace = value
          entries[name] = HostNumber(entry)
        self._count(entry, value, boundary)
    for number, group in enumerate(self.optimizer.param_groups):
      for name, value in group.items() if not is_of_torch(self.optimizer) else ():
        self._count(Entry(self.optimizer, number, name), value, boundary)

  def _count(self, entry: Entry, value, boundary: Boundary) -> None:
    if is_on_host(value) and id(value) not in boundary.host_numbers:
      boundary.host_numbers[id(value)] = (value, HostNumber(entry))
      self._counting[entry] = value

  def extract(self, boundary: Boundary, assigns: bool) -> list[tuple]:
    """Remove the entries that steps in a trace have assigned, to make them results.

    New numbers are added to `numbers`.

    Args:
      boundary: boundary of the trace.
      assigns: the tensors can be results of the function.

    Returns:
      Entries (`StateTarget`), with the tensors for them.

    Raises:
      TracedStateError: there are entries but `assigns` is False, or an entry that has
        changed is neither a jax tensor nor a number.
    """
    for name, container, items in self._containers:
      self._extract_from_container(name, items, dict(_items(container)), boundary)
    for entry, tensor in self._counting.items():
      _, number = boundary.host_numbers[id(tensor)]
      if getattr(number, "node", None) != entry:
        self.numbers[entry] = number
    found: list[tuple[StateTarget, torch.Tensor]] = []
    for parameter, entries in self.optimizer.state.items():
      if isinstance(entries, dict):
        found += self._extract_from_entries(parameter, entries, boundary)
    if found and not assigns:
      raise new_state_error(self.optimizer, found[0][0].name, boundary)
    self.undo()
    return found

  def _extract_from_entries(
    self, parameter, entries: dict, boundary: Boundary
  ) -> Iterator[tuple[StateTarget, torch.Tensor]]:
    """Yield the entries of a parameter that are results; add to `numbers`."""
    before = self._before.get(parameter, {})
    for name in before.keys() - entries.keys():
      raise host_state_error(self.optimizer, name)
    for name, value in entries.items():
      if name in before and before[name] is value:
        continue
      entry = Entry(self.optimizer, Identity(parameter), name)
      if is_born_in(value, boundary):
        if self._can_take_over(before.get(name), value):
          before[name]._storage.write(value.jax())
        else:
          owners = Identity(self.optimizer), Identity(parameter)
          yield StateTarget(*owners, name), value
      elif isinstance(value, HostNumber):
        if value.node != entry:
          self.numbers[entry] = value
      elif not is_equal(before.get(name), value):
        if not (is_constant(value) and counted_state(self.optimizer, boundary)):
          if name not in before:
            raise new_state_error(self.optimizer, name, boundary)
          raise host_state_error(self.optimizer, name)
        self.numbers[entry] = value

  def _extract_from_container(
    self, name: str, before: dict, now: dict, boundary: Boundary
  ) -> None:
    """Write new tensors in a list or dict to the earlier ones."""
    if before.keys() != now.keys():
      raise host_state_error(self.optimizer, name)
    for key, value in now.items():
      if value is before[key] or is_equal(before[key], value):
        continue
      if not (is_born_in(value, boundary) and self._can_take_over(before[key], value)):
        raise host_state_error(self.optimizer, name)
      before[key]._storage.write(value.jax())

  def _can_take_over(self, before, value: Tensor) -> bool:
    """Return True if an earlier tensor can have the new values.

    Then later calls find the tensor that the program was compiled for.
    """
    if not is_alive(before) or before._chain is not WHOLE or before.requires_grad:
      return False
    tensors = itertools.chain(
      parameters_of(self.optimizer),
      *map(dict.values, self._before.values()),
      *[items.values() for name, _, items in self._containers if name != "params"],
    )
    shared = [t for t in tensors if getattr(t, "_storage", None) is before._storage]
    return len(shared) == 1 and (before.shape, before.dtype) == (
      value.shape,
      value.dtype,
    )

  def keep(self, parameters: Sequence[torch.Tensor]) -> None:
    """Record the current state of these parameters, so that `undo` keeps it."""
    self._created += parameters
    for parameter in parameters:
      self._before[parameter] = dict(self.optimizer.state[parameter])

  def undo(self, has_failed: bool = False) -> None:
    """Restore the optimizer's earlier entries.

    Args:
      has_failed: the trace has failed; remove the state passed to `keep` as well.
    """
    for _, container, items in self._containers:
      now = dict(_items(container))
      if now.keys() == items.keys() and is_same((now.values(), items.values())):
        continue
      container.clear()
      if isinstance(container, dict):
        container.update(items)
      else:
        container.extend(items.values())
    state = self.optimizer.state
    for parameter in self._created if has_failed else ():
      self._before.pop(parameter, None)
    for parameter, entries in list(state.items()):
      if not isinstance(entries, dict):
        continue
      before = self._before.get(parameter)
      if before is None:
        del state[parameter]
      else:
        entries.clear()
        entries.update(before)


def _containers_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple]:
  """Yield the lists and dicts in the settings and the state.

  Each comes with the name of the entry that has it, and with its items.
  """
  seen: set[int] = set()
  attributes = {n: v for n, v in vars(optimizer).items() if n not in _TABLES}
  for table in (attributes, *optimizer.param_groups, *optimizer.state.values()):
    for name, value in table.items() if isinstance(table, dict) else ():
      parts = [value]
      for part in parts:
        is_container = isinstance(part, list | dict | collections.deque)
        if is_container and id(part) not in seen:
          seen.add(id(part))
          items = dict(_items(part))
          parts += items.values()
          yield name, part, items


def _items(container) -> Iterable[tuple]:
  return container.items() if isinstance(container, dict) else enumerate(container)


# Attributes of an optimizer that `State` reads by themselves.
_TABLES = ("param_groups", "state")


def is_constant(value) -> bool:
  """Return True for a value that each call can assign again."""
  is_container = isinstance(value, list | dict | set)
  return is_on_host(value) or (key_of(value) is not None and not is_container)


def is_on_host(value) -> bool:
  """Return True for a 0-d tensor on the CPU."""
  return isinstance(value, torch.Tensor) and not (
    isinstance(value, Tensor) or value.dim() or value.is_complex()
  )


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
  """Return True for an optimizer whose class is torch's own."""
  return type(optimizer).__module__.startswith("torch.")


def is_equal(before, value) -> bool:
  """Return True for an equal constant, such as a number, that was assigned again."""
  return (
    not isinstance(value, torch.Tensor | torch.SymFloat | list)
    and type(before) is type(value)
    and (before == value)
  )


def counted_state(optimizer: torch.optim.Optimizer, boundary: Boundary) -> State | None:
  """Return the recorded state, if calls of the function can assign new numbers.

  A compiled function inside another cannot.
  """
  if boundary.attributes is None or boundary.parent or boundary.numbers is None:
    return None
  return boundary.attributes.states.get(id(optimizer))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
  return [p for group in optimizer.param_groups for p in group["params"]]


def new_state_error(
  optimizer: torch.optim.Optimizer, entry: str, boundary: Boundary
) -> TracedStateError:
  """Build the error for an entry that a traced step creates, such as a list."""
  return TracedStateError(
    f"The first step of {type(optimizer).__name__} creates {entry!r} of its state, "
    f"which `{boundary.name}` cannot return. Run one step eagerly before, so that the "
    "state exists."
  )


def host_state_error(optimizer: torch.optim.Optimizer, entry: str) -> TracedStateError:
  """Build the error for an entry that steps change on the host."""
  name = type(optimizer).__name__
  return TracedStateError(
    f"{name} keeps {entry!r} of its state on the host, which a compiled function "
    "changes only while it is traced. Keep it in a tensor on jax, or run its steps "
    "eagerly."
  )


def record(
  optimizer: torch.optim.Optimizer,
  boundary: Boundary,
  created: Sequence[torch.Tensor] = (),
) -> None:
  """Record the state of an optimizer before its first step in a trace.

  The state of the parameters `created` was created for the trace and outlives it.
  """
  record_groups(optimizer, boundary)
  if boundary.attributes is not None:
    states = boundary.attributes.states
    states.setdefault(id(optimizer), State(optimizer)).keep(created)


def record_groups(optimizer: torch.optim.Optimizer, boundary: Boundary) -> None:
  """Record the parameter groups at the start of a trace, or at the first step in it."""
  if boundary.attributes is not None:
    boundary.attributes.groups.setdefault(id(optimizer), Groups(optimizer))
