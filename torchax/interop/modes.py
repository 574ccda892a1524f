"""Training and evaluation: which modules a traced function ran, and in which mode.

A compiled function that ran a module in training mode must not be used after `eval()`.
So the modules that run while a function is traced are noted with their mode, and a call
in other modes is traced anew.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator

import torch
from torch.nn.modules.module import register_module_forward_pre_hook


class ModuleModes:
  """The modules that a function runs, with the mode in which each was first seen."""

  def __init__(self):
    self._seen: dict[int, tuple[weakref.ref, bool]] = {}

  def note(self, module: torch.nn.Module) -> None:
    """Adds a module, in its present mode."""
    known = self._seen.get(id(module))
    if known is None or known[0]() is None:
      self._seen[id(module)] = (weakref.ref(module), module.training)

  def changed(self) -> tuple[int, ...]:
    """Which modules are in another mode than when they were first seen."""
    if not self._seen:
      return ()
    return tuple(
      [
        number
        for number, (reference, mode) in enumerate(self._seen.values())
        if getattr(reference(), "training", mode) is not mode
      ]
    )

  @contextlib.contextmanager
  def watching(self, note: Callable) -> Iterator[None]:
    """Notes every module that this thread runs inside the block.

    Args:
      note: is also called with each of them, before it runs.
    """
    thread = threading.get_ident()

    def hook(module, args):
      if threading.get_ident() == thread:
        self.note(module)
        note(module)

    handle = register_module_forward_pre_hook(hook)
    try:
      yield
    finally:
      handle.remove()
