"""Optimizer state that a traced step creates, as results of the program.

The first step of an optimizer may create state from gradients, such as the momentum
buffers of SGD with dampening. In a trace these are tracers, without values outside it.
So `optimizers.py` records the state before the step, `modules.Attributes` removes the
new entries after the trace, and each call assigns them to the optimizer.
"""

import dataclasses
from collections.abc import Sequence

import torch

from torchax.core.boundary import Boundary
from torchax.core.static_values import Identity
from torchax.core.storage import active
from torchax.errors import TracedStateError
from torchax.tensor import Tensor
from torchax.tracing.modules import is_born_in


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
    optimizer = self.optimizer.value
    numbers = list(map(id, parameters_of(optimizer)))
    number = numbers.index(id(self.parameter.value))
    return f"{type(optimizer).__name__}.state[{number}][{self.name!r}]"


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
        and not _is_equal(before.get(name), value)
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
        "reads the new number."
      )

  def restore(self) -> None:
    """Restore the groups and their entries."""
    for group, before in self._groups:
      group.clear()
      group.update(before)
    self._optimizer.param_groups[:] = [group for group, _ in self._groups]


class State:
  """State of an optimizer before its first step in a trace."""

  def __init__(self, optimizer: torch.optim.Optimizer):
    self.optimizer = optimizer
    # Parameters whose state `optimizers.py` created before the step.
    self._created: list[torch.Tensor] = []
    self._before = {
      parameter: dict(entries)
      for parameter, entries in optimizer.state.items()
      if isinstance(entries, dict)
    }

  def extract(self, boundary: Boundary, assigns: bool) -> list[tuple]:
    """Remove the entries that steps in a trace have assigned, to make them results.

    Args:
      boundary: boundary of the trace.
      assigns: the tensors can be results of the function.

    Returns:
      Entries (`StateTarget`), with the tensors for them.

    Raises:
      TracedStateError: there are entries but `assigns` is False, or a changed entry is
        not a jax tensor.
    """
    found: list[tuple[StateTarget, torch.Tensor]] = []
    for parameter, entries in self.optimizer.state.items():
      if not isinstance(entries, dict):
        continue
      before = self._before.get(parameter, {})
      for name, value in entries.items():
        if name in before and before[name] is value:
          continue
        if is_born_in(value, boundary):
          owners = Identity(self.optimizer), Identity(parameter)
          found.append((StateTarget(*owners, name), value))
        elif not isinstance(value, Tensor) and not _is_equal(before.get(name), value):
          raise host_state_error(self.optimizer, name)
    if found and not assigns:
      name = type(self.optimizer).__name__
      raise TracedStateError(
        f"{name} would make its state inside `{boundary.name}`. Run one step before, "
        "so that the state exists."
      )
    self.undo()
    return found

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


def _is_equal(before, value) -> bool:
  """Return True for an equal constant, such as a number, that was assigned again."""
  return (
    not isinstance(value, torch.Tensor | list)
    and type(before) is type(value)
    and (before == value)
  )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
  return [p for group in optimizer.param_groups for p in group["params"]]


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
