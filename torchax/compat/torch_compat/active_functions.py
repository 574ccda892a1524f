"""Stack of the modules that are being called, per thread and async task.

Draws get their sites from it (`rng/counter.py`). While a caller needs the stack,
`torch.nn.Module.__call__` is wrapped, which Dynamo and `torch.fx` support. A hook would
miss exceptions. At other times torch is unpatched.
"""

import contextlib
import contextvars
import functools
import threading
import weakref
from collections.abc import Callable, Iterator

import torch

from torchax.compat.patches import PATCHES, patch
from torchax.compat.torch_compat import named_scopes
from torchax.compat.torch_compat.graphs import is_compiling

# Class attribute of modules that wrap another one: name of the attribute with it.
TRANSPARENT = "_is_transparent_to_sites"

# Class attribute of captured graphs, which are no modules of the user.
UNSEEN = "_is_unseen_by_sites"

# A running module and the call around it. None instead of the module is a boundary,
# whose callers may differ from call to call. A path means modules of a captured graph.
Call = tuple[torch.nn.Module | str | None, "Call | None"]

_innermost: contextvars.ContextVar[Call | None] = contextvars.ContextVar(
  "innermost", default=None
)

_REASON = (
  "paths of the modules that run, while a function is traced or as long as asked"
)

# Original of each wrapped `torch.nn.Module.__call__`.
_originals: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def innermost() -> Call | None:
  """Return the innermost running call, which links to the outer ones."""
  return _innermost.get()


@contextlib.contextmanager
def as_innermost(call: Call | None) -> Iterator[None]:
  """Make `call` the innermost running call inside the block."""
  outer = _innermost.get()
  _innermost.set(call)
  try:
    yield
  finally:
    _innermost.set(outer)


def unwrap_module(module: torch.nn.Module) -> torch.nn.Module:
  """Return the module without its wrappers."""
  while hasattr(type(module), TRANSPARENT):
    module = getattr(module, getattr(type(module), TRANSPARENT))
  return module


# Module -> {id of an inner module: (path or None, weak reference to the inner module)}.
_names: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def name_in(parent: torch.nn.Module, child: torch.nn.Module) -> str:
  """Return the path of a module inside another one, or the name of its class."""
  for name, module in parent._modules.items():
    if module is child or module is not None and unwrap_module(module) is child:
      return name
  name_by_id = _names.setdefault(parent, {})
  name, reference = name_by_id.get(id(child), (None, None))
  if reference is None or reference() is not child:
    paths = (name for name, module in _inside(parent, set()) if module is child)
    name = next(paths, None)
    name_by_id[id(child)] = (name, weakref.ref(child))
  return name or type(child).__name__


def _inside(parent, seen: set) -> Iterator[tuple]:
  """Yield inner modules with their paths; a wrapper is replaced by its module."""
  for name, module in parent._modules.items():
    if module is None or id(module) in seen:
      continue
    seen.add(id(module))
    module = unwrap_module(module)
    yield name, module
    for path, inner in _inside(module, seen):
      yield f"{name}.{path}", inner


def _name_in_caller(module: torch.nn.Module, caller: Call | None) -> str:
  """Return the path of a module inside its caller; "" for an outermost module."""
  parent = None if caller is None else caller[0]
  is_inner = isinstance(parent, torch.nn.Module) and parent is not module
  return name_in(parent, module) if is_inner else ""


def boundary():
  """Return a context in which paths do not include the callers."""
  return as_innermost((None, _innermost.get()))


def at_path(path: str):
  """Return a context in which modules of a graph run, below the innermost boundary."""
  return as_innermost((path, _innermost.get()))


def outside_modules():
  """Return a context in which no module is running."""
  return as_innermost(None)


def inside(module: torch.nn.Module) -> contextlib.AbstractContextManager:
  """Return a context in which a module is running, as inside `module(…)`.

  Use it in methods other than `forward` if draws are addressed by site. Submodules then
  have their paths inside the module.

  Args:
    module: the outermost module, or a submodule of a running one.

  Raises:
    TypeError: the argument is no module.

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
  return as_innermost((unwrap_module(module), _innermost.get()))


def _wrap(call: Callable) -> Callable:
  """Wrap `Module.__call__` so that it records the running module."""

  @functools.wraps(call)
  def __call__(self, *args, **kwargs):
    if torch.compiler.is_dynamo_compiling():  # Dynamo records module paths itself
      return call(self, *args, **kwargs)
    if hasattr(type(self), UNSEEN):
      return call(self, *args, **kwargs)
    outer, module = _innermost.get(), unwrap_module(self)
    _innermost.set((module, outer))
    try:
      if not named_scopes.is_recording():
        return call(self, *args, **kwargs)
      with named_scopes.entered(_name_in_caller(module, outer)):
        return call(self, *args, **kwargs)
    finally:
      _innermost.set(outer)

  _originals[__call__] = call
  return __call__


class _Following:
  """Patch of `torch.nn.Module.__call__`, active while a user of the stack needs it."""

  def __init__(self):
    self._lock = threading.RLock()
    self._holders = 0
    self._owners: weakref.WeakSet = weakref.WeakSet()

  @contextlib.contextmanager
  def hold(self) -> Iterator[None]:
    """Track calls inside the block."""
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
    """Track calls until `release`, or until `owner` is deleted."""
    with self._lock:
      # The oldest callback runs last: the set has lost the owner by then.
      weakref.finalize(owner, self._forget).atexit = False
      self._owners.add(owner)
      self.update()

  def _forget(self) -> None:
    # Dynamo may be about to guard on the wrapper; the next update restores it then.
    if not is_compiling():
      self.update()

  def release(self, owner) -> None:
    """Undo `hold_for`."""
    with self._lock:
      self._owners.discard(owner)
      self.update()

  def update(self) -> None:
    """Wrap the call of modules if it is needed, else restore the original."""
    # Other code may have wrapped it since, or restored an earlier function.
    current = torch.nn.Module.__call__
    original = _originals.get(current)
    is_wanted = bool(self._holders or self._owners)
    if is_wanted and original is None:
      patch(torch.nn.Module, "__call__", _wrap(current), _REASON)
    elif original is not None and not is_wanted:
      for entry in [each for each in PATCHES if each.replacement is current]:
        entry.undo()


following = _Following()
