"""Calls of modules: which ones are running, on each thread and in each task.

Calls are followed while somebody needs to know. Meanwhile `torch.nn.Module.__call__` is
wrapped, which Dynamo and `torch.fx` expect; a hook would not see every exception leave.
At other times torch is as it was.
"""

import contextlib
import contextvars
import functools
import threading
import weakref
from collections.abc import Callable, Iterator

import torch

from torchax.compat.patches import PATCHES, patch

# Class attribute of modules that wrap another one: the name under which they hold it.
TRANSPARENT = "_is_transparent_to_sites"

# Class attribute of modules that are parts of graphs and no modules of the user's.
UNSEEN = "_is_unseen_by_sites"

# A running module and the call around it. In place of the module None for a boundary,
# whose callers may change from call to call; and a path for modules of a graph, which
# ran when it was captured.
Call = tuple[torch.nn.Module | str | None, "Call | None"]

_innermost: contextvars.ContextVar[Call | None] = contextvars.ContextVar(
  "innermost", default=None
)

_REASON = (
  "the paths of modules that draw, while a function is traced or as long as asked"
)

# Wrapped forms of `torch.nn.Module.__call__` -> the original.
_originals: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def innermost() -> Call | None:
  """The call that is running now; a chain to the outermost one."""
  return _innermost.get()


@contextlib.contextmanager
def below(call: Call | None) -> Iterator[None]:
  """A context in which a call is running."""
  outer = _innermost.get()
  _innermost.set(call)
  try:
    yield
  finally:
    _innermost.set(outer)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
  """The module, or the one that it wraps."""
  while hasattr(type(module), TRANSPARENT):
    module = getattr(module, getattr(type(module), TRANSPARENT))
  return module


def boundary():
  """A context whose callers are not part of the paths inside it."""
  return below((None, _innermost.get()))


def at(path: str):
  """A context in which modules of a graph are running, below the innermost boundary."""
  return below((path, _innermost.get()))


def alone():
  """A context without any module around it."""
  return below(None)


def inside(module: torch.nn.Module) -> contextlib.AbstractContextManager:
  """A context in which a module is running, as inside `module(…)`.

  For methods that are called by their own name, with draws that are addressed by site:
  their submodules then have the paths that they have in the module.

  Args:
    module: the outermost one, or one of what is running.

  Raises:
    TypeError: not a module.

  >>> class Model(torch.nn.Module):
  ...   def __init__(self):
  ...     super().__init__()
  ...     self.decoder = torch.nn.Dropout(0.5)
  ...
  ...   def sample(self, z):
  ...     with inside(self):
  ...       return self.decoder(z)
  """
  if not isinstance(module, torch.nn.Module):
    raise TypeError(
      f"Expected the torch.nn.Module that is running, but got {type(module).__name__}."
    )
  if torch.compiler.is_dynamo_compiling():
    return contextlib.nullcontext()
  return below((unwrapped(module), _innermost.get()))


def _wrapped(call: Callable) -> Callable:
  """A module's `__call__` that records that the module is running."""

  @functools.wraps(call)
  def __call__(self, *args, **kwargs):
    if torch.compiler.is_dynamo_compiling():  # it knows the paths of modules itself
      return call(self, *args, **kwargs)
    if hasattr(type(self), UNSEEN):
      return call(self, *args, **kwargs)
    outer = _innermost.get()
    _innermost.set((unwrapped(self), outer))
    try:
      return call(self, *args, **kwargs)
    finally:
      _innermost.set(outer)

  _originals[__call__] = call
  return __call__


class _Following:
  """Wraps `torch.nn.Module.__call__` while somebody needs it."""

  def __init__(self):
    self._lock = threading.RLock()
    self._holders = 0
    self._owners: weakref.WeakSet = weakref.WeakSet()

  @contextlib.contextmanager
  def hold(self) -> Iterator[None]:
    """Follows calls inside the block."""
    self._count(1)
    try:
      yield
    finally:
      self._count(-1)

  def _count(self, holders: int) -> None:
    with self._lock:
      self._holders += holders
      self.update()

  def hold_for(self, owner) -> None:
    """Follows calls until `release`, or until the object is gone."""
    with self._lock:
      self._owners.add(owner)
      self.update()

  def release(self, owner) -> None:
    """Undoes `hold_for`."""
    with self._lock:
      self._owners.discard(owner)
      self.update()

  def update(self) -> None:
    """Wraps the call of modules if somebody needs it, else puts the original back."""
    # Others may have wrapped it since, or put back what they had found.
    current = torch.nn.Module.__call__
    original = _originals.get(current)
    is_wanted = bool(self._holders or self._owners)
    if is_wanted and original is None:
      patch(torch.nn.Module, "__call__", _wrapped(current), _REASON)
    elif original is not None and not is_wanted:
      for made in [each for each in PATCHES if each.replacement is current]:
        made.undo()


following = _Following()
