"""What a module holds by name, and its hooks: noticing that one is another by now.

torch calls hooks in `Module.__call__`, so a compiled `forward` runs those of submodules
by itself and those of the module where the whole call is compiled. A hook that is
registered or removed later asks for another compilation.
"""

import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterator

import torch

from torchax.compat import torch_compat
from torchax.tracing.module_values import containers_in, is_same

# Stands after everything that modules hold.
_END = object()


class Members:
  """The parameters, buffers and submodules of modules, by identity.

  Tensors that are plain attributes are looked at where they are followed.

  Args:
    module: is added with its submodules.

  Attributes:
    edition: how often one was found replaced, added or removed.
  """

  def __init__(self, module: torch.nn.Module | None = None):
    self.edition = 0
    self._modules: dict[int, weakref.ref] = {}
    self._views: list = []
    self._known: list = []
    # (attributes of a module, name, value), and lists and dicts in such values.
    self._followed: list[tuple] = []
    self._containers: list[tuple] = []
    if module is not None:
      for part in module.modules():
        self.add(part)
    self.note()

  def add(self, module: torch.nn.Module) -> None:
    """Adds a module without its submodules, as `note` is going to find it."""
    self._modules[id(module)] = weakref.ref(module)

  def note(self) -> None:
    """Takes what the modules have now for what they should have."""
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
    """Follows the plain attributes that hold a tensor which is needed, from now on.

    Args:
      is_needed: says of a tensor whether it is.
    """
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
    """True where something was replaced, added or removed since `note`."""
    # Every call asks. The mark at the end tells of what was added or removed there.
    if self._followed:
      if any(now.get(name) is not value for now, name, value in self._followed):
        return True
      if not all(map(is_same, self._containers)):
        return True
    found = itertools.chain.from_iterable(self._views)
    return not all(map(operator.is_, found, self._known))

  def look(self) -> int:
    """The edition; what was replaced since the last look is noted, and counts."""
    if self.have_changed():
      self.edition += 1
      self.note()
      # What is needed is found again by the trace that follows.
      self._followed, self._containers = [], []
    return self.edition


def tensors_in(value) -> Iterator[torch.Tensor]:
  """The tensors in lists, tuples and dicts of each other; a tensor itself."""
  if isinstance(value, torch.Tensor):
    yield value
  elif isinstance(value, dict):
    for part in value.values():
      yield from tensors_in(part)
  elif isinstance(value, list | tuple):
    for part in value:
      yield from tensors_in(part)


# Hooks --------------------------------------------------------------------------------

_TABLES = (
  *("_forward_pre_hooks", "_forward_hooks"),
  *("_backward_pre_hooks", "_backward_hooks"),
)


def has_hooks(module: torch.nn.Module) -> bool:
  """True for a module that has hooks itself."""
  own = module.__dict__  # as quick as can be: every call of a compiled module asks
  return bool(
    own["_forward_pre_hooks"]
    or own["_forward_hooks"]
    or own["_backward_pre_hooks"]
    or own["_backward_hooks"]
  )


def called(module: torch.nn.Module, name: str) -> Callable:
  """The method of that name; for `forward` with the module's hooks around it."""
  if name == "forward" and has_hooks(module):
    return types.MethodType(forward, module)
  return getattr(module, name)


def forward(module: torch.nn.Module, *args, **kwargs):
  """`forward` of a module, as `module(…)` calls it: with its hooks."""
  return module(*args, **kwargs)


class Hooks:
  """The hooks of a module and its submodules.

  Args:
    module: looked at now, and by `changed`.
  """

  def __init__(self, module: torch.nn.Module):
    self._module = module
    self._look()

  def _look(self) -> None:
    self._registrations = torch_compat.count_of_hooks()
    tables = (
      vars(module).get(name) for module in self._module.modules() for name in _TABLES
    )
    self._tables = tuple([(table, tuple(table.values())) for table in tables if table])

  def changed(self) -> bool:
    """True if hooks were added or removed since this was last asked."""
    is_known = self._registrations == torch_compat.count_of_hooks()
    if is_known and all(map(_is_unchanged, self._tables)):
      return False
    before = [hooks for _, hooks in self._tables]
    known = [id(table) for table, _ in self._tables]
    self._look()
    after = [hooks for _, hooks in self._tables]
    return known != [id(table) for table, _ in self._tables] or before != after


def _is_unchanged(entry) -> bool:
  table, hooks = entry
  return len(table) == len(hooks) and all(map(operator.is_, table.values(), hooks))
