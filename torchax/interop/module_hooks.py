"""Hooks of compiled modules.

torch runs hooks in `Module.__call__`. So a compiled `forward` includes the hooks of
submodules; to include those of the module itself, its whole call is compiled.
Registering or removing a hook triggers recompilation.
"""

import operator
import types
from collections.abc import Callable

import torch

from torchax.compat import torch_compat
from torchax.tracing.modules import HOOKS


def has_hooks(module: torch.nn.Module) -> bool:
  """Return True if the module itself has hooks."""
  own = module.__dict__  # fast: every call of a compiled module runs this
  return bool(
    own["_forward_pre_hooks"]
    or own["_forward_hooks"]
    or own["_backward_pre_hooks"]
    or own["_backward_hooks"]
  )


def with_hooks(module: torch.nn.Module, name: str) -> Callable:
  """Return the method of this name; `forward` with the module's hooks around it."""
  if name == "forward" and has_hooks(module):
    return types.MethodType(forward, module)
  return getattr(module, name)


def forward(module: torch.nn.Module, *args, **kwargs):
  """Run the module with its hooks; its name is `forward`, for programs and messages."""
  return module(*args, **kwargs)


class Hooks:
  """Hooks of a module and its submodules, recorded now and by each `changed`."""

  def __init__(self, module: torch.nn.Module):
    self._module = module
    self._look()

  def _look(self) -> None:
    self._registrations = torch_compat.count_of_hooks()
    tables = (
      vars(module).get(name) for module in self._module.modules() for name in HOOKS
    )
    self._tables = tuple([(table, tuple(table.values())) for table in tables if table])

  def changed(self) -> bool:
    """Return True if hooks were added or removed since the last call."""
    is_known = self._registrations == torch_compat.count_of_hooks()
    if is_known and all(map(_is_unchanged, self._tables)):
      return False
    before = [(id(table), hooks) for table, hooks in self._tables]
    self._look()
    return before != [(id(table), hooks) for table, hooks in self._tables]


def _is_unchanged(entry) -> bool:
  table, hooks = entry
  return len(table) == len(hooks) and all(map(operator.is_, table.values(), hooks))
