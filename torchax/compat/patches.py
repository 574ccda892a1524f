"""Attributes of torch that torchax replaces: one function, one list, one way back.

The table of `docs/devices.md` is made from the list by `tools/patch_table.py`.
"""

import dataclasses
import types
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Patch:
  """An attribute of a module, class or function that has another value now.

  Attributes:
    owner: the module, class or function.
    name: of the attribute.
    original: its value before, as it is stored; `MISSING` where there was none.
    replacement: its value now.
    reason: the feature that needs it.
  """

  owner: Any
  name: str
  original: Any
  replacement: Any
  reason: str

  @property
  def path(self) -> str:
    """Dotted name of the attribute, such as "torch.utils.swap_tensors"."""
    module = getattr(self.owner, "__module__", None)
    owner = getattr(self.owner, "__qualname__", None) or self.owner.__name__
    return ".".join(part for part in (module, owner, self.name) if part)

  def undo(self) -> None:
    """Set the attribute to what it was, and leave the list."""
    PATCHES.remove(self)
    if self.original is MISSING:
      delattr(self.owner, self.name)
    else:
      setattr(self.owner, self.name, self.original)


MISSING = object()

PATCHES: list[Patch] = []
"""The patches that are in place, in the order in which they were made."""


def patch(owner: Any, name: str, replacement: Any, reason: str) -> Patch:
  """Replace an attribute for the whole process, until `Patch.undo` or `unpatch`.

  Args:
    owner: a module, a class or a function of torch's.
    name: of the attribute.
    replacement: its new value; a method that is static is given as a `staticmethod`.
    reason: the feature that needs it, as the page prints it.
  """
  if isinstance(owner, types.FunctionType) and name not in vars(owner):
    original = getattr(owner, name, MISSING)
  else:
    original = vars(owner).get(name, MISSING)
  setattr(owner, name, replacement)
  PATCHES.append(Patch(owner, name, original, replacement, reason))
  return PATCHES[-1]


def unpatch() -> None:
  """Give torch back every attribute that torchax has replaced.

  For tests, and for programs that no longer use jax tensors: the features that
  `docs/devices.md` lists stop working. What torch itself made for the device stays:
  its name, `torch.jax` and `Tensor.jax`. Import torchax in a new process to have
  the patches again.

  >>> import torch, torchax
  >>> torchax.unpatch()
  >>> torch.Generator.__module__
  'torch._C'
  """
  while PATCHES:
    PATCHES[-1].undo()
