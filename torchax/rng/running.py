"""Which modules are running, on each thread and in each task.

Calls of modules are followed while somebody asks for sites (`sites.py`): while draws
are addressed by site, a ledger is open, or a function is traced. For that time
`torch.nn.Module.__call__` is wrapped, which Dynamo and `torch.fx` expect; a hook would
not see every exception leave. At other times torch is as it was.

Modules that were called before are not known, nor methods that are called by another
name: `inside` says that a module is running.
"""

import contextlib
import contextvars
import functools
import threading
import weakref
from collections.abc import Callable, Iterator

import torch

# Modules whose class has this attribute stand for the module that they hold under the
# name which it gives.
TRANSPARENT = "_is_transparent_to_sites"

# Modules whose class has this attribute are no modules of the user's: parts of graphs.
UNSEEN = "_is_unseen_by_sites"

# A running module and the call around it. In place of the module None for a boundary:
# what is outside may change by the call; and a path for modules of a graph, which were
# running when it was captured.
Call = tuple[torch.nn.Module | str | None, "Call | None"]

_innermost: contextvars.ContextVar[Call | None] = contextvars.ContextVar(
  "innermost", default=None
)


# What our forms of `torch.nn.Module.__call__` stand in for.
_originals: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def innermost() -> Call | None:
  """The call that is running now; a chain to the outermost one."""
  return _innermost.get()


def modules(call: Call | None, outside: Call | None = None) -> list:
  """The modules of a chain, outermost first.

  Args:
    call: where the chain ends.
    outside: what it is below of; the whole chain by default.

  Returns:
    None for a boundary, and a path for modules of a graph.
  """
  found = []
  while call is not None and call is not outside:
    module, call = call
    found.append(module)
  return found[::-1]


def is_below(call: Call | None, outer: Call | None) -> bool:
  """True where `outer` is still running, around `call` or as `call` itself."""
  while call is not None and call is not outer:
    call = call[1]
  return call is outer


def meant(module: torch.nn.Module) -> torch.nn.Module:
  """The module, or the one that it stands for."""
  while hasattr(type(module), TRANSPARENT):
    module = getattr(module, getattr(type(module), TRANSPARENT))
  return module


def _wrapped(call: Callable) -> Callable:
  """A module's `__call__`, which says that the module is running."""

  @functools.wraps(call)
  def __call__(self, *args, **kwargs):
    if torch.compiler.is_dynamo_compiling():  # it knows the paths of modules itself
      return call(self, *args, **kwargs)
    if hasattr(type(self), UNSEEN):
      return call(self, *args, **kwargs)
    outer = _innermost.get()
    _innermost.set((meant(self), outer))
    try:
      return call(self, *args, **kwargs)
    finally:
      _innermost.set(outer)

  _originals[__call__] = call
  return __call__


class _Following:
  """Who asks that calls are followed."""

  def __init__(self):
    self._lock = threading.RLock()
    self._holders = 0
    self._owners: weakref.WeakSet = weakref.WeakSet()

  def hold(self) -> None:
    """Follows calls until `release`."""
    with self._lock:
      self._holders += 1
      self.settle()

  def release(self) -> None:
    """Undoes one `hold`."""
    with self._lock:
      self._holders -= 1
      self.settle()

  def hold_for(self, owner) -> None:
    """Follows calls as long as an object lives; longer where nobody notices its end."""
    with self._lock:
      self._owners.add(owner)
      self.settle()

  def settle(self) -> None:
    """Follows calls if somebody asks for it, and else no more."""
    # Others may have wrapped it since, or put back what they had found.
    current = torch.nn.Module.__call__
    original = _originals.get(current)
    is_wanted = bool(self._holders or self._owners)
    if is_wanted and original is None:
      torch.nn.Module.__call__ = _wrapped(current)
    elif original is not None and not is_wanted:
      torch.nn.Module.__call__ = original


following = _Following()


@contextlib.contextmanager
def followed() -> Iterator[None]:
  """Follows calls inside the block."""
  following.hold()
  try:
    yield
  finally:
    following.release()


@contextlib.contextmanager
def _below(call: Call | None) -> Iterator[None]:
  outer = _innermost.get()
  _innermost.set(call)
  try:
    yield
  finally:
    _innermost.set(outer)


def boundary():
  """A context whose callers are not part of the paths inside of it."""
  return _below((None, _innermost.get()))


def at(path: str):
  """A context in which modules of a graph are running, below the innermost boundary."""
  return _below((path, _innermost.get()))


def alone():
  """A context without any module around it."""
  return _below(None)


def inside(module: torch.nn.Module) -> contextlib.AbstractContextManager:
  """A context in which a module is running, as inside of `module(…)`.

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
  return _below((meant(module), _innermost.get()))
