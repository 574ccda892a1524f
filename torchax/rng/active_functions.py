"""Which modules are running, on each thread and in each task, and their paths.

Calls of modules are followed while paths are needed: while draws are addressed by
site, a ledger is open, or a function is traced. Meanwhile `torch.nn.Module.__call__` is
wrapped, which Dynamo and `torch.fx` expect; a hook would not see every exception leave.
At other times torch is as it was.

A path is made of the names that modules have in one another, from the outermost one,
which has none: "layers.0.dropout". Modules that were called before following began are
not known, nor methods that are called by another name; `inside` declares those.
"""

import contextlib
import contextvars
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from torchax.compat import torch_compat

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

# Wrapped forms of `torch.nn.Module.__call__` -> the original.
_originals: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def innermost() -> Call | None:
  """The call that is running now; a chain to the outermost one."""
  return _innermost.get()


def _modules(call: Call | None, outside: Call | None = None) -> list:
  """The modules of a chain, outermost first.

  Args:
    call: where the chain ends.
    outside: the call around the chain; None for the whole one.

  Returns:
    Modules; None for a boundary, and a path for modules of a graph.
  """
  found = []
  while call is not None and call is not outside:
    module, call = call
    found.append(module)
  return found[::-1]


def here() -> tuple:
  """The modules that are running now, for `replay`; None for a boundary."""
  return tuple(_modules(_innermost.get()))


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
  """The module, or the one that it wraps."""
  while hasattr(type(module), TRANSPARENT):
    module = getattr(module, getattr(type(module), TRANSPARENT))
  return module


# Following calls ----------------------------------------------------------------------


def _wrapped(call: Callable) -> Callable:
  """A module's `__call__` that records that the module is running."""

  @functools.wraps(call)
  def __call__(self, *args, **kwargs):
    if torch.compiler.is_dynamo_compiling():  # it knows the paths of modules itself
      return call(self, *args, **kwargs)
    if hasattr(type(self), UNSEEN):
      return call(self, *args, **kwargs)
    outer = _innermost.get()
    _innermost.set((_unwrapped(self), outer))
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
    """Follows calls until an object is gone; `update` notices that."""
    with self._lock:
      self._owners.add(owner)
      self.update()

  def update(self) -> None:
    """Wraps the call of modules if somebody needs it, else puts the original back."""
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
def _below(call: Call | None) -> Iterator[None]:
  outer = _innermost.get()
  _innermost.set(call)
  try:
    yield
  finally:
    _innermost.set(outer)


def boundary():
  """A context whose callers are not part of the paths inside it."""
  return _below((None, _innermost.get()))


def at(path: str):
  """A context in which modules of a graph are running, below the innermost boundary."""
  return _below((path, _innermost.get()))


def alone():
  """A context without any module around it."""
  return _below(None)


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
  return _below((_unwrapped(module), _innermost.get()))


# Paths --------------------------------------------------------------------------------


class Replay(NamedTuple):
  """A part of a forward pass that a backward pass runs again.

  Attributes:
    modules: those that ran when the random state was saved.
    call: what was running when the state was restored; replaced by these modules.
  """

  modules: tuple
  call: Call | None


def replay(modules: tuple | None) -> Replay | None:
  """Calls from now on run in place of these modules; None outside a backward pass.

  `torch.utils.checkpoint` runs a part of a model again outside of the modules around
  it, and the sites are to be the same.
  """
  if modules is None or not torch_compat.in_backward():
    return None
  return Replay(modules, _innermost.get())


def path(replayed: Replay | None = None, from_boundary: bool = False) -> str:
  """The names of the modules that are running.

  Args:
    replayed: the part that runs again.
    from_boundary: only those inside the innermost boundary.
  """
  call = _innermost.get()
  if replayed is not None and _is_going_on(replayed, call):
    modules = [*replayed.modules, *_modules(call, replayed.call)]
  else:
    modules = _modules(call)
  names: list[str] = []
  parent = None
  for module in modules:
    if module is None:
      if from_boundary:
        names.clear()
    elif isinstance(module, str):
      names += [module] if module else []
      parent = None
    elif module is not parent:
      if parent is not None:
        names.append(_name_in(parent, module) or type(module).__name__)
      parent = module
  return ".".join(names)


def _is_going_on(replayed: Replay, call: Call | None) -> bool:
  """Whether the call around a replay is still running, in a backward pass."""
  while call is not None and call is not replayed.call:
    call = call[1]
  return call is replayed.call and torch_compat.in_backward()


# Module -> {id of an inner module: (path in it or None, reference to the inner one)}.
_names: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _name_in(parent: torch.nn.Module, child: torch.nn.Module) -> str | None:
  for name, module in parent._modules.items():
    if module is child or module is not None and _unwrapped(module) is child:
      return name
  known = _names.setdefault(parent, {})
  name, reference = known.get(id(child), (None, None))
  if reference is None or reference() is not child:
    found = (name for name, module in _inside(parent, set()) if module is child)
    name = next(found, None)
    known[id(child)] = (name, weakref.ref(child))
  return name


def _inside(parent: torch.nn.Module, seen: set) -> Iterator[tuple]:
  """The modules in a module with their paths, which leave out wrappers of modules."""
  for name, module in parent._modules.items():
    if module is None or id(module) in seen:
      continue
    seen.add(id(module))
    module = _unwrapped(module)
    yield name, module
    for path, inner in _inside(module, seen):
      yield f"{name}.{path}", inner
