"""State that optimizers make in a traced function: results of its calls.

What the first step of an optimizer makes of its gradients, such as the buffers of SGD
with dampening, has no numbers outside of the trace. So the state is recorded before the
step; what is new in it when the function has been traced is taken away again, and each
call gives it to the optimizer.
"""

import dataclasses
from collections.abc import Sequence

import torch

from torchax.core.boundary import Boundary
from torchax.core.static_values import Identity
from torchax.core.storage import active
from torchax.errors import TracedStateError
from torchax.tensor import Tensor


@dataclasses.dataclass(frozen=True)
class StateTarget:
  """Entry of an optimizer's state that each call gives a new tensor."""

  optimizer: Identity
  parameter: Identity
  name: str

  def get(self) -> torch.Tensor:
    """The tensor that it has."""
    return self.optimizer.value.state[self.parameter.value][self.name]

  def set(self, tensor: torch.Tensor) -> None:
    """Gives it a tensor, which has no gradient."""
    optimizer = self.optimizer.value
    if active.boundary is not None:
      record(optimizer, active.boundary)  # it is handed on from there
    optimizer.state[self.parameter.value][self.name] = tensor.detach()

  def describe(self, paths: dict[int, str]) -> str:
    """Return its name."""
    optimizer = self.optimizer.value
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    number = [id(p) for p in parameters].index(id(self.parameter.value))
    return f"{type(optimizer).__name__}.state[{number}][{self.name!r}]"


class State:
  """State of an optimizer before its first step in a trace."""

  def __init__(self, optimizer: torch.optim.Optimizer):
    self.optimizer = optimizer
    # Parameters whose state was made for the trace.
    self._made: list[torch.Tensor] = []
    self._before = {
      parameter: dict(entries)
      for parameter, entries in optimizer.state.items()
      if isinstance(entries, dict)
    }

  def made(self, boundary: Boundary) -> list[tuple[StateTarget, torch.Tensor]]:
    """Return the entries that steps in a trace have put there, and their tensors.

    Raises:
      TracedStateError: an entry is no jax tensor, so that a call cannot give it back.
    """
    found: list[tuple[StateTarget, torch.Tensor]] = []
    for parameter, entries in self.optimizer.state.items():
      if not isinstance(entries, dict):
        continue
      before = self._before.get(parameter, {})
      for name, value in entries.items():
        if name in before and before[name] is value:
          continue
        if isinstance(value, Tensor) and value._storage.birth is boundary:
          owners = Identity(self.optimizer), Identity(parameter)
          found.append((StateTarget(*owners, name), value))
        elif not isinstance(value, Tensor) and not _is_equal(before.get(name), value):
          raise on_host(self.optimizer, name)
    return found

  def keep(self, parameters: Sequence[torch.Tensor]) -> None:
    """Take the state of these parameters, made for the trace, for what was there."""
    self._made += parameters
    for parameter in parameters:
      self._before[parameter] = dict(self.optimizer.state[parameter])

  def undo(self, has_failed: bool = False) -> None:
    """Give the optimizer the entries that it had.

    Args:
      has_failed: the trace has; what was made for it goes as well.
    """
    state = self.optimizer.state
    for parameter in self._made if has_failed else ():
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
  """True for a number or another constant that was assigned again."""
  return (
    not isinstance(value, torch.Tensor)
    and type(before) is type(value)
    and (before == value)
  )


def on_host(optimizer: torch.optim.Optimizer, entry: str) -> TracedStateError:
  """The error for an entry that steps change on the host."""
  name = type(optimizer).__name__
  return TracedStateError(
    f"{name} keeps {entry!r} of its state on the host, which a compiled function "
    "changes only while it is traced. Keep it in a tensor on jax, or run its steps "
    "eagerly."
  )


def record(
  optimizer: torch.optim.Optimizer,
  boundary: Boundary,
  made: Sequence[torch.Tensor] = (),
) -> None:
  """Record the state of an optimizer before its first step in a trace.

  Args:
    optimizer: the optimizer.
    boundary: of the trace.
    made: parameters whose state was made for the trace since, and stays.
  """
  if boundary.attributes is not None:
    states = boundary.attributes.states
    states.setdefault(id(optimizer), State(optimizer)).keep(made)


def take_out(boundary: Boundary, states: dict[int, State], hands_out: bool) -> list:
  """Take out of the optimizers what a trace has made; it is a result of each call.

  Args:
    boundary: of the trace.
    states: of the optimizers that were stepped in it.
    hands_out: the tensors can be results of the function.

  Returns:
    Entries of states (`StateTarget`), with the tensors for them.

  Raises:
    TracedStateError: they cannot, or something else than tensors has changed.
  """
  made = []
  for state in states.values():
    found = state.made(boundary)
    if found and not hands_out:
      name = type(state.optimizer).__name__
      raise TracedStateError(
        f"{name} would make its state inside `{boundary.name}`. Run one step before, "
        "so that the state exists."
      )
    made += found
  undo(states)
  return made


def undo(states: dict[int, State], has_failed: bool = False) -> None:
  """Give the optimizers that were stepped in a trace the state from before it."""
  for state in states.values():
    state.undo(has_failed)
