"""Attributes of the modules of a traced function: changes between calls and in a trace.

`Values` and `Members` find changes between two calls. Numbers, flags and strings are
guards; replaced tensors and submodules are captured again. Values are compared only
after an assignment: `Module.__setattr__` counts for modules that a compiled function
has run. Lists and dicts change without an assignment, so each call compares their
elements.

`Attributes` finds assignments in a trace: `self.c = self.c * 2` assigns a tracer to the
module, which has no value outside the trace. A plain attribute whose tensor was not
read receives a new tensor after each call, a result of the program. A buffer, or a
tensor that was read before, keeps its tensor and receives the new values.

`guards.py` and `trace.py` use these classes.
"""

import dataclasses
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeGuard

import torch

from torchax.compat import jax_compat, torch_compat
from torchax.compat.patches import WhileNeeded, patch
from torchax.core.boundary import Boundary
from torchax.core.chains import WHOLE
from torchax.core.static_values import Identity, describe_value, key_of
from torchax.core.storage import Storage, active
from torchax.dispatch.operands import tensors_in
from torchax.errors import MutationError
from torchax.tensor import Tensor

# Attributes of each module that belong to torch.
OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training"}
HOOKS = (
  *("_forward_pre_hooks", "_forward_hooks"),
  *("_backward_pre_hooks", "_backward_hooks"),
)


class _Writes:
  """Counter of assignments to attributes of watched modules.

  Attributes:
    count: number of assignments.
    watched: watched modules, by identity.
  """

  def __init__(self):
    self.count = 0
    self.watched: dict[int, weakref.ref] = {}

  def watch(self, module: torch.nn.Module) -> None:
    """Count assignments to the module from now on."""
    number = id(module)
    if number not in self.watched:
      _follow_assignments()
      forget = functools.partial(self._forget, number)
      self.watched[number] = weakref.ref(module, forget)

  def _forget(self, number: int, reference) -> None:
    if self.watched.get(number) is reference:
      del self.watched[number]


writes = _Writes()
_following: list[Callable] = []


def _follow_assignments() -> None:
  """Patch `Module.__setattr__` and `__delattr__` to count, at the first watch."""
  cls = torch.nn.Module
  if cls.__setattr__ in _following:
    return
  watched = writes.watched

  def counted(original: Callable) -> Callable:
    @functools.wraps(original)
    def assign(self, *args):
      # Dynamo, which compiles this function too, would guard on all watched modules.
      if not torch.compiler.is_dynamo_compiling() and id(self) in watched:
        writes.count += 1
      return original(self, *args)

    return assign

  reason = "assignments to modules of compiled functions, which are retraced"
  patch(cls, "__setattr__", counted(cls.__setattr__), reason)
  patch(cls, "__delattr__", counted(cls.__delattr__), reason)
  _following.append(cls.__setattr__)


torch_compat.keep_from_dynamo(_follow_assignments, with_calls=False)


class Values:
  """Keys of the attribute values of one module.

  Attributes:
    kind: name of the module's class.
    is_silent: assignments to the module may go uncounted.
    first: keys by name when the module was added.
    now: keys by name at the last look.
    containers: lists and dicts in the values, each with a copy (`containers_in`).
  """

  def __init__(self, module: torch.nn.Module):
    writes.watch(module)
    self._reference = weakref.ref(module)
    self.kind = type(module).__name__
    # A class with its own `__setattr__` may bypass the counter.
    self.is_silent = type(module).__setattr__ is not torch.nn.Module.__setattr__
    self.first: dict = {}
    self.now: dict = {}
    self.containers: list[tuple] = []
    self.look()
    self.first = self.now

  @property
  def module(self) -> torch.nn.Module | None:
    """The module; None once it was garbage-collected."""
    return self._reference()

  def look(self) -> None:
    module = self._reference()
    if module is None:
      return
    now: dict[str, Hashable] = {}
    containers: list[tuple] = []
    for name, value in vars(module).items():
      if name in OF_TORCH:
        continue
      if isinstance(value, torch.Tensor):
        now[name] = torch.Tensor  # guards on its presence; `Members` tracks which
        continue
      key = key_of(value)
      if key is not None:
        now[name] = key
        containers += containers_in(value)
    for name in HOOKS:
      hooks = vars(module).get(name)
      if hooks:
        now[name] = tuple(map(Identity, hooks.values()))
        containers.append((hooks.values(), tuple(hooks.values())))
    if self.is_silent:
      containers.append((vars(module).values(), tuple(vars(module).values())))
    self.now, self.containers = now, containers

  def describe(self) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each value, for messages."""
    module = self._reference()
    for name in () if module is None else self.now:
      value = vars(module).get(name)
      if name in HOOKS and value is not None:
        value = list(value.values())
      yield (
        name,
        "a tensor" if isinstance(value, torch.Tensor) else describe_value(value),
      )

  def changed(self) -> Iterator[tuple]:
    """Yield (name, key) of each value that differs from the first one."""
    for name in changed_names(self.first, self.now):
      yield name, self.now.get(name)


def changed_names(before: dict, now: dict) -> list[str]:
  """Return the names whose values differ."""
  if before is now:
    return []
  return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def containers_in(value) -> Iterator[tuple]:
  """Yield the lists, sets and dicts in a value, each with a copy of its elements."""
  if isinstance(value, dict):
    yield value.keys(), tuple(value)
    yield value.values(), tuple(value.values())
    value = value.values()
  elif isinstance(value, list | set):
    yield value, tuple(value)
  elif not isinstance(value, tuple | frozenset):
    return
  for part in value:
    yield from containers_in(part)


def is_same(entry: tuple) -> bool:
  """Return True if a container still has the elements of its copy."""
  container, known = entry
  return len(container) == len(known) and all(map(operator.is_, container, known))


# Tensors and submodules ---------------------------------------------------------------


# Marks the end of the members of all modules.
_END = object()


class Members:
  """Parameters, buffers and submodules of modules, compared by identity.

  Plain attributes with tensors are compared only after `follow`.

  Attributes:
    edition: number of times that a member was found replaced, added or removed.
  """

  def __init__(self):
    self.edition = 0
    self._modules: dict[int, weakref.ref] = {}
    self._views: list = []
    self._known: list = []
    # (attributes of a module, name, value), and lists and dicts in such values.
    self._followed: list[tuple] = []
    self._containers: list[tuple] = []
    self.record()

  def add(self, module: torch.nn.Module) -> None:
    """Add a module without its submodules; the next `record` reads its members."""
    self._modules[id(module)] = weakref.ref(module)

  def record(self) -> None:
    """Record the current members of the modules."""
    self._views = []
    for key, reference in list(self._modules.items()):
      module = reference()
      if module is None:
        del self._modules[key]
        continue
      tables = (module._parameters, module._buffers, module._modules)
      self._views += [table.values() for table in tables]
    self._views.append((_END,))
    self._known = list(itertools.chain.from_iterable(self._views))

  def follow(self, is_needed: Callable[[torch.Tensor], bool]) -> None:
    """Compare the plain attributes with a needed tensor from now on."""
    known = {(id(attributes), name) for attributes, name, _ in self._followed}
    for reference in self._modules.values():
      module = reference()
      for name, value in () if module is None else vars(module).items():
        if (id(vars(module)), name) in known or not any(
          map(is_needed, tensors_in(value))
        ):
          continue
        self._followed.append((vars(module), name, value))
        self._containers += containers_in(value)

  def have_changed(self) -> bool:
    """Return True if a member was replaced, added or removed since `record`."""
    # Runs on every call. `_END` reveals a member added or removed at the end.
    if self._followed:
      if any(now.get(name) is not value for now, name, value in self._followed):
        return True
      if not all(map(is_same, self._containers)):
        return True
    found = itertools.chain.from_iterable(self._views)
    return not all(map(operator.is_, found, self._known))

  def look(self) -> int:
    """Check for replaced members, and return the edition."""
    if self.have_changed():
      self.edition += 1
      self.record()
      # The next trace follows the attributes that it needs.
      self._followed, self._containers = [], []
    return self.edition


# Assignments in a trace ---------------------------------------------------------------


_MISSING = object()


@dataclasses.dataclass
class Assignment:
  """Assignment of a traced tensor to an attribute of a module.

  Attributes:
    module: the module.
    name: name of the attribute.
    table: dict with the attribute: parameters, buffers, or plain attributes.
    before: earlier value of the attribute; `_MISSING` if it had none.
    value: assigned tensor, born in the trace.
  """

  module: torch.nn.Module
  name: str
  table: dict
  before: Any
  value: Tensor

  @property
  def is_registered(self) -> bool:
    """True for a parameter or buffer, False for a plain attribute."""
    return self.table is not vars(self.module)

  @property
  def target(self) -> "Target":
    """The plain attribute, for the effects of each call."""
    return Target(Identity(self.module), self.name, self.value.requires_grad)

  def undo(self) -> None:
    if self.before is _MISSING:
      self.table.pop(self.name, None)
    else:
      self.table[self.name] = self.before

  def __str__(self) -> str:
    return f"{type(self.module).__name__}.{self.name}"


@dataclasses.dataclass(frozen=True)
class Target:
  """Plain attribute of a module; each call assigns a new tensor to it."""

  kind = "assigned"
  module: Identity
  name: str
  has_gradient: bool

  def get(self, leaves: list) -> torch.Tensor:
    """Return the tensor; `leaves` is for `ArgumentTarget` only."""
    return vars(self.module.value)[self.name]

  def set(self, tensor: torch.Tensor, leaves: list) -> None:
    """Assign a tensor; `leaves` is for `ArgumentTarget` only."""
    boundary = active.boundary
    if boundary is not None and boundary.attributes is not None:
      # The outer trace turns the assignment into an effect of its own.
      boundary.attributes.record(self.module.value)
    attributes = vars(self.module.value)
    if not isinstance(attributes.get(self.name), torch.Tensor):
      writes.count += 1  # Python may branch on the presence of a tensor
    attributes[self.name] = tensor if self.has_gradient else tensor.detach()

  def describe(self, paths: dict[int, str], arguments: list[str]) -> str:
    """Return the path of the attribute, given paths by the identity of modules."""
    module = self.module.value
    return f"{paths.get(id(module), type(module).__name__)}.{self.name}"


class Attributes:
  """Module attributes and optimizer states from before a trace.

  Attributes:
    states: states of optimizers with a traced step, by the optimizer's identity
      (`optimizer_state.py`).
    groups: parameter groups of optimizers, by the optimizer's identity.
  """

  def __init__(self):
    self.states: dict[int, Any] = {}
    self.groups: dict[int, Any] = {}
    self._before: dict[int, tuple[torch.nn.Module, list[tuple[dict, dict]]]] = {}

  def record(self, module: torch.nn.Module) -> None:
    """Record the current attributes of a module and its submodules, once."""
    if id(module) in self._before:
      return
    for part in module.modules():
      tables = (part._parameters, part._buffers, vars(part))
      self._before.setdefault(
        id(part), (part, [(table, dict(table)) for table in tables])
      )

  def assigned(self, boundary: Boundary) -> Iterator[Assignment]:
    """Yield the attributes that now have a tensor born in the trace."""
    for module, tables in self._before.values():
      for table, before in tables:
        for name, value in list(table.items()):
          known = before.get(name, _MISSING)
          # Any other change restores a module's own tensor after a functional call.
          if value is not known and is_born_in(value, boundary):
            yield Assignment(module, name, table, known, value)

  def undo(self, boundary: Boundary) -> None:
    """Undo all assignments of a failed trace."""
    for assignment in list(self.assigned(boundary)):
      assignment.undo()
    for state in self.states.values():
      state.undo(has_failed=True)
    for groups in self.groups.values():
      groups.restore()

  def extract(self, boundary: Boundary, assigns: bool) -> list[tuple]:
    """Undo the assignments of a trace, and turn them into effects of the function.

    Args:
      boundary: boundary of the trace.
      assigns: the tensors of plain attributes can be results of the function.
        Otherwise an attribute that had no tensor keeps the traced one, which raises a
        clear error when it is used.

    Returns:
      Plain attributes (`Target`) and state entries (`StateTarget`) whose tensors are
      results, with these tensors. Other assignments become in-place changes of the
      modules' earlier tensors.

    Raises:
      MutationError: the assigned tensor cannot be written to the earlier one.
      TracedStateError: state of an optimizer cannot be a result (`State.extract`), or
        its parameter groups have changed.
    """
    for groups in self.groups.values():
      groups.require_unchanged(boundary)
      groups.restore()
    found, results = [], []
    for assignment in self.assigned(boundary):
      if assigns and not self._was_read(assignment, boundary):
        results.append(assignment)
      elif assignment.is_registered or is_alive(assignment.before):
        found.append(assignment)
    arrays = []
    for assignment in found:
      reason = self._obstacle(assignment)
      if reason:
        raise MutationError(
          f"{boundary.name} assigns a new tensor to {assignment} {reason}, which "
          "cannot be handed back to the module. Write the numbers to the tensor it "
          f"has, such as `self.{assignment.name}.copy_(…)` or `.mul_(…)`, or return "
          "the new tensor."
        )
      arrays.append(assignment.value.jax())
    for assignment in (*found, *results):
      assignment.undo()
    for assignment, array in zip(found, arrays):
      assignment.before._storage.write(array)
    assigned = [(assignment.target, assignment.value) for assignment in results]
    for state in self.states.values():
      assigned += state.extract(boundary, assigns)
    return assigned

  def _was_read(self, assignment: Assignment, boundary: Boundary) -> bool:
    """Return True if a later call may read the value that this call assigns.

    Shared memory, as after `spectral_norm(module)`, counts as not read: the read may
    have been of another attribute. If it was of this one, the attribute's guard
    retraces the next call, where the memory is no longer shared.
    """
    before = assignment.before
    if assignment.is_registered:
      return True
    if not is_alive(before):
      return False
    storage = before._storage
    shadow = boundary.shadows.get(id(storage))
    is_touched = shadow is not None and shadow.is_touched
    return storage.birth is boundary or (is_touched and self._sharers(storage) == 1)

  def _sharers(self, storage: Storage) -> int:
    """Count the distinct tensors of the modules with this storage before the trace."""
    tensors = {id(v): v for v in self._values_before() if isinstance(v, Tensor)}
    return sum(tensor._storage is storage for tensor in tensors.values())

  def _obstacle(self, assignment: Assignment) -> str | None:
    before, value = assignment.before, assignment.value
    if not is_alive(before):
      return "that had no jax tensor before"
    if isinstance(before, torch.nn.Parameter):
      return "that is a parameter"
    if before.shape != value.shape or before.dtype != value.dtype:
      was, now = [f"{t.dtype}{list(t.shape)}" for t in (before, value)]
      return f"of another shape or dtype ({now}, but it was {was})"
    if value.requires_grad or before.requires_grad:
      return "that needs a gradient (`.detach()` it if it should not)"
    holders = sum(earlier is before for earlier in self._values_before())
    if before._chain is not WHOLE or holders > 1:
      return "whose memory other tensors share"
    return None

  def _values_before(self) -> Iterator:
    """Yield the values of all attributes before the trace."""
    for _, tables in self._before.values():
      for _, before in tables:
        yield from before.values()


def is_born_in(tensor, boundary: Boundary) -> TypeGuard[Tensor]:
  """Return True for a jax tensor that was born in the trace of `boundary`."""
  return isinstance(tensor, Tensor) and tensor._storage.birth is boundary


def is_alive(value) -> TypeGuard[Tensor]:
  """Return True for a jax tensor, unless it was born in a trace that has ended."""
  if not isinstance(value, Tensor):
    return False
  birth = value._storage.birth
  return birth is None or not birth.closed


def _is_traced(tensor) -> bool:
  return isinstance(tensor, Tensor) and not jax_compat.is_top_level()


without_reads = WhileNeeded(lambda: torch_compat.patch_modules(_is_traced))
"""Context manager: modules of `torch.nn` read no numbers of traced tensors."""
