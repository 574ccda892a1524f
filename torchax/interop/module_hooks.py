"""Hooks of modules that run compiled.

torch calls hooks in `Module.__call__`, so a compiled `forward` runs those of submodules
by itself, and those of the module where the whole call is compiled. A hook that is
registered or removed later asks for another compilation.
"""

import operator
import types
from collections.abc import Callable

import torch

from torchax.compat import torch_compat

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
