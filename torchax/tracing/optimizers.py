"""Steps of `torch.optim` optimizers inside compiled functions.

A traced step runs on a copy of the optimizer. The numbers in the copy's parameter
groups are operands (`core/host_numbers.py`), so a learning-rate schedule does not
trigger recompilation. The state is created before the step is traced, and torch's
optimizers count their steps on the device, as with `capturable=True`. Other optimizers
count in Python: these numbers are operands too, and each call computes the new ones.

`trace.py` enters `tracing_steps`. State from gradients, and numbers that a step
changes, are in `optimizer_state.py`.
"""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch
from torch.optim.optimizer import (
  register_optimizer_step_post_hook,
  register_optimizer_step_pre_hook,
)

from torchax.compat import torch_compat
from torchax.compat.math_functions import patch_math
from torchax.compat.patches import WhileNeeded
from torchax.core.host_numbers import Entry, HostNumber, calculate
from torchax.core.static_values import Identity, describe_value, key_of
from torchax.core.storage import active
from torchax.errors import TracedStateError
from torchax.rng import NewOperands
from torchax.tensor import Tensor
from torchax.tracing import optimizer_state
from torchax.tracing.modules import is_same
from torchax.tracing.optimizer_state import State


class OptimizerGuard:
  """Guard on an optimizer with a traced step (`Guards.guard_on_optimizer`)."""

  def __init__(self, optimizer: torch.optim.Optimizer):
    self._reference = weakref.ref(optimizer)
    self._number = id(optimizer)
    self._known: list = []
    self._kinds: tuple = ()
    self._values: list = []
    self._state: list = []

  def __hash__(self):
    return self._number

  def __eq__(self, other):
    return type(other) is OptimizerGuard and self._reference() is other._reference()

  def now(self) -> tuple:
    """Return a key of the settings that a step branches on.

    Numbers that are operands count by their type, other settings by their value, and
    parameters by identity.
    """
    optimizer = self._reference()
    if optimizer is None:
      return ()
    tables = _tables(optimizer)
    changed = _changed_in_steps.get(optimizer, ())
    values = [*itertools.chain.from_iterable(map(dict.values, tables.values()))]
    values.append(len(changed))
    if not is_same((values, self._known)):
      self._known = values
      self._kinds = tuple(
        [
          (name, _kind(value, (owner, name) in changed))
          for owner, table in tables.items()
          for name, value in table.items()
        ]
      )
    return self._kinds

  def __str__(self) -> str:
    return f"{type(self._reference()).__name__}.param_groups"

  def describe(self) -> str:
    """Describe the settings, except for the numbers that are operands."""
    optimizer = self._reference()
    if optimizer is None:
      return "0 of {}"
    changed = _changed_in_steps.get(optimizer, ())
    settings = {
      name: len(value) if name == "params" else value
      for owner, table in _tables(optimizer).items()
      for name, value in table.items()
      if _kind(value, (owner, name) in changed) is not float
    }
    return f"{len(optimizer.param_groups)} of {describe_value(settings)}"

  def tensors(self) -> Iterator[tuple[str, Tensor]]:
    """Yield the jax tensors of the optimizer's state, with their names."""
    optimizer = self._reference()
    if optimizer is None:
      return
    kind = type(optimizer).__name__
    for number, parameter in enumerate(optimizer_state.parameters_of(optimizer)):
      for name, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor):
          yield f"{kind}.state[{number}][{name!r}]", value

  def update_state(self) -> bool:
    """Refresh the state; return True if more than numbers in it was replaced."""
    optimizer = self._reference()
    if optimizer is None:
      return False
    tables = [table for table in optimizer.state.values() if isinstance(table, dict)]
    state = list(itertools.chain.from_iterable(map(dict.values, tables)))
    if is_same((state, self._values)):
      return False
    self._values = state
    # Numbers that change are operands.
    state = [type(v) if type(v) in (int, float) else v for v in state]
    is_replaced = not is_same((state, self._state))
    self._state = state
    return is_replaced


# Entries of parameter groups, and attributes, that steps of an optimizer change, by
# owner and name (`Entry`). Numbers among them are operands.
_changed_in_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[tuple]]
_changed_in_steps = weakref.WeakKeyDictionary()


def _tables(optimizer: torch.optim.Optimizer) -> dict[int | None, dict]:
  """Return the dicts with the settings of an optimizer, by the owner (`Entry`)."""
  tables: dict[int | None, dict] = dict(enumerate(optimizer.param_groups))
  attributes = [n for o, n in _changed_in_steps.get(optimizer, ()) if o is None]
  if attributes:
    tables[None] = {name: vars(optimizer).get(name) for name in attributes}
  return tables


def _kind(value, is_changed: bool = False):
  """Return a key of a setting; for a number that is an operand, its type."""
  if _is_number(value) or (is_changed and type(value) is int):
    return float
  if _are_numbers(value):
    return (float, len(value))
  if isinstance(value, list):  # the parameters
    return tuple(map(Identity, value))
  key = key_of(value)
  return Identity(value) if key is None else key


def _is_number(value) -> bool:
  """Return True for a float or a 0-d floating-point tensor on the CPU."""
  if isinstance(value, float):
    return True
  return optimizer_state.is_on_host(value) and value.is_floating_point()


def _are_numbers(value) -> bool:
  return isinstance(value, tuple) and bool(value) and all(map(_is_number, value))


@contextlib.contextmanager
def _eager() -> Iterator[None]:
  """Run operations inside the block eagerly, on the values from before the trace."""
  boundary, active.boundary = active.boundary, None
  try:
    with jax.ensure_compile_time_eval(), torch.no_grad():
      yield
  finally:
    active.boundary = boundary


class _Step:
  """Traced step of an optimizer, on a copy of it.

  The copy has its own parameter groups, so other threads never see traced numbers in
  them. It shares the optimizer's state.

  Attributes:
    copy: the copy of the optimizer.
  """

  def __init__(self, optimizer: torch.optim.Optimizer, state: State | None):
    self._optimizer = optimizer
    self._groups = optimizer_state.Groups(optimizer)
    self.copy = object.__new__(type(optimizer))
    vars(self.copy).update(vars(optimizer))
    groups = _groups_of(optimizer)
    if groups:
      groups = [_traced_group(optimizer, number) for number in range(len(groups))]
      self.copy.param_groups = groups
    for owner, name in _changed_in_steps.get(optimizer, ()):
      table = vars(self.copy) if owner is None else groups[owner]
      if type(table.get(name)) in (int, float):
        table[name] = HostNumber(Entry(optimizer, owner, name))
    self._is_followed = state is not None
    self._numbers = {} if state is None else state.numbers
    for entry, value in self._numbers.items():
      table = vars(self.copy) if entry.owner is None else groups[entry.owner]
      table[entry.name] = value  # of an earlier step in the same trace
    vars(self.copy)[_STEP] = self
    self._before = [dict(table) for _, table in _settings_of(self.copy)]

  def end(self) -> None:
    """Hand the changes of settings to the optimizer, or to the effects of each call.

    Raises:
      NewOperands: the step changes a number that was a constant of the trace.
      TracedStateError: the step changes the parameter groups in another way.
    """
    refused = self._groups.changed()
    if len(_groups_of(self.copy)) != len(_groups_of(self._optimizer)):
      refused.append("params")
    followed = _changed_in_steps.setdefault(self._optimizer, set())
    new: dict[tuple, Any] = {}
    constants = set()
    for owner, name, before, value in self._changes():
      if isinstance(value, HostNumber) or self._is_setting(owner, value):
        new[owner, name] = value
        if type(before) in (int, float) and (owner, name) not in followed:
          constants.add((owner, name))
      elif owner is None:
        vars(self._optimizer)[name] = value
      else:
        refused.append(name)
    if not self._is_followed:
      refused += [name for _, name in new]
    if refused:
      self._groups.restore()
      raise TracedStateError(
        f"{type(self._optimizer).__name__} changes {refused[0]!r} of its settings in a "
        "step, which a compiled function does only while it is traced. Run its steps "
        "eagerly."
      )
    if constants:
      raise NewOperands([functools.partial(followed.update, constants)])
    followed.update(new)
    for (owner, name), value in new.items():
      self._numbers[Entry(self._optimizer, owner, name)] = value

  def _changes(self) -> Iterator[tuple]:
    """Yield owner (`Entry`), name, earlier and new value of each changed setting."""
    for before, (owner, now) in zip(self._before, _settings_of(self.copy)):
      for name, value in now.items():
        known = before.get(name, _MISSING)
        if value is not known and not optimizer_state.is_equal(known, value):
          yield owner, name, known, value

  def _is_setting(self, owner, value) -> bool:
    """Return True for a constant that later steps may depend on."""
    is_private = owner is None and optimizer_state.is_of_torch(self._optimizer)
    return optimizer_state.is_constant(value) and not is_private


def _settings_of(optimizer: torch.optim.Optimizer) -> list[tuple[int | None, dict]]:
  """Return the attributes and the parameter groups, each with its owner (`Entry`)."""
  return [(None, vars(optimizer)), *enumerate(_groups_of(optimizer))]


def _groups_of(optimizer: torch.optim.Optimizer) -> list[dict]:
  """Return its parameter groups; none if they are the ones of another optimizer."""
  return vars(optimizer).get("param_groups", [])


# Attribute that links a copy to its `_Step`.
_STEP = "_torchax_step"
_MISSING = object()


def _traced_group(optimizer: torch.optim.Optimizer, number: int) -> dict:
  """Return a copy of a parameter group for a traced step, with numbers as operands."""
  original = optimizer.param_groups[number]
  group = dict(original)
  is_of_torch = optimizer_state.is_of_torch(optimizer)
  counts_when_fused = _counts_when_fused(optimizer)
  if group.get("capturable") is False:
    group["capturable"] = True
    if group.get("fused"):  # fused kernels need Python numbers, not operands
      group["fused"], group["foreach"] = False, True
  elif counts_when_fused:
    group["fused"], group["foreach"] = True, False
  for name, value in original.items():
    counts = isinstance(value, torch.Tensor) and not is_of_torch
    if _is_number(value) and not counts:
      group[name] = HostNumber(Entry(optimizer, number, name))
      if name == "lr" and counts_when_fused:
        group[name] = _as_tensor(group[name], group["params"])
    elif _are_numbers(value):
      group[name] = tuple(
        [HostNumber(Entry(optimizer, number, name, n)) for n in range(len(value))]
      )
  return group


def _begin_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict):
  """Pre-hook that runs a step inside a compiled function on a copy."""
  boundary = active.boundary
  if boundary is None or _STEP in vars(optimizer):
    return None
  parameters = optimizer_state.parameters_of(optimizer)
  # The state outlives the trace if the parameters do. Some optimizers wrap another one,
  # and have its state.
  if "state" in vars(optimizer) and all(
    isinstance(p, Tensor) and p._storage.birth is None for p in parameters
  ):
    optimizer_state.record(optimizer, boundary, _create_state(optimizer))
  state = optimizer_state.counted_state(optimizer, boundary)
  if state is not None:
    state.take_numbers(boundary)
  followed = (Tensor,) if state is None else (torch.Tensor, HostNumber, int, float)
  tables = [table for table in optimizer.state.values() if isinstance(table, dict)]
  counts = [table["step"] for table in tables if "step" in table]
  if not all(isinstance(count, followed) for count in counts):
    raise optimizer_state.host_state_error(optimizer, "step")
  for guards in boundary.guards_around():
    guards.guard_on_optimizer(OptimizerGuard(optimizer))
  return (_Step(optimizer, state).copy, *args[1:]), kwargs


def _end_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
  step = vars(args[0]).get(_STEP)
  if step is not None and optimizer is not args[0]:
    step.end()


def _install() -> Callable[[], None]:
  handles = (
    register_optimizer_step_pre_hook(_begin_step),
    register_optimizer_step_post_hook(_end_step),
  )
  undo_math = patch_math(HostNumber, calculate)

  def remove() -> None:
    undo_math()
    for handle in handles:
      handle.remove()

  return remove


tracing_steps = WhileNeeded(_install)
"""Context manager: optimizer steps inside a trace run on copies."""


def _create_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
  """Create the state of a first step, and move step counts to jax.

  Returns the parameters whose state was created.
  """
  parameters = optimizer_state.parameters_of(optimizer)
  known = set(map(id, optimizer.state))
  with _eager():
    for group in optimizer.param_groups:
      if "capturable" in group or _counts_when_fused(optimizer):
        for parameter in group["params"]:
          state = optimizer.state.get(parameter, {})
          count = state.get("step")
          if isinstance(count, torch.Tensor) and not isinstance(count, Tensor):
            state["step"] = count.to("jax")
      capturable = {"capturable": True} if "capturable" in group else {}
      _create_group_state(optimizer, {**group, **capturable})
  return [p for p in parameters if p in optimizer.state and id(p) not in known]


def _create_group_state(optimizer: torch.optim.Optimizer, group: dict) -> None:
  trained = [p for p in group["params"] if p.grad is not None]
  missing = [p for p in trained if not optimizer.state.get(p)]
  if not missing:
    return
  if isinstance(optimizer, torch.optim.SGD):
    # SGD starts its buffer with the gradient: equal to 0 * momentum + gradient.
    if group["momentum"] and not group["dampening"]:
      for parameter in missing:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return
  torch_compat.init_optimizer_group(optimizer, group)


def _as_tensor(number: HostNumber, parameters: list[torch.Tensor]) -> torch.Tensor:
  """Return a 0-d tensor for a number that a fused step reads on the host."""
  dtypes = [torch.float32, *(p.dtype for p in parameters)]
  dtype = functools.reduce(torch.promote_types, dtypes)
  device = parameters[0].device if parameters else None
  return torch.ones((), dtype=dtype, device=device) * number


def _counts_when_fused(optimizer: torch.optim.Optimizer) -> bool:
  """Return True if the optimizer counts on the device only with `fused=True`."""
  return isinstance(optimizer, torch.optim.Adagrad) and not any(
    group["differentiable"] or any(p.is_complex() for p in group["params"])
    for group in optimizer.param_groups
  )
