"""Replaced attributes of torch: `patch` replaces one, `unpatch` restores all.

`reroute` replaces the code of a function object. `WhileNeeded` installs a patch only
while a thread needs it; `setting` sets an attribute of ours, such as a flag of a
thread, inside a block.

`tools/patch_table.py` writes the table of `docs/devices.md` from `PATCHES`.
"""

import contextlib
import dataclasses
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Patch:
  """Replaced attribute of a module, class or function.

  Attributes:
    owner: the module, class or function.
    name: name of the attribute.
    original: value before, as stored; `MISSING` if there was none.
    replacement: value now.
    reason: feature that needs it.
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
    """Restore the original attribute, and leave the list."""
    PATCHES.remove(self)
    if self.original is MISSING:
      delattr(self.owner, self.name)
    else:
      setattr(self.owner, self.name, self.original)


MISSING = object()

PATCHES: list[Patch] = []
"""Active patches, oldest first."""


def patch(owner: Any, name: str, replacement: Any, reason: str) -> Patch:
  """Replace an attribute for the whole process, until `Patch.undo` or `unpatch`.

  Args:
    owner: a module, class or function of torch.
    name: name of the attribute.
    replacement: new value; pass a static method as a `staticmethod`.
    reason: feature that needs it, for the page.
  """
  if isinstance(owner, types.FunctionType) and name not in vars(owner):
    original = getattr(owner, name, MISSING)
  else:
    original = vars(owner).get(name, MISSING)
  setattr(owner, name, replacement)
  PATCHES.append(Patch(owner, name, original, replacement, reason))
  return PATCHES[-1]


def _trampoline(*args, _route, **kwargs):
  return _route(*args, **kwargs)


def reroute(function: Callable, instead: Callable, reason: str) -> list[Patch]:
  """Make a function of torch run `instead(original, *args, **kwargs)`.

  The function object stays the same, so earlier imports of it are rerouted too.

  Args:
    function: the function, decorated or not; it must have no closure.
    instead: calls `original(*args, **kwargs)` for calls that it does not handle.
    reason: see `patch`.

  Returns:
    The patches, in the order to undo them; none if the function is rerouted already.
  """
  inner: Any = inspect.unwrap(function)
  if inner.__code__.co_name == _trampoline.__name__ or inner.__closure__:
    return []
  original = types.FunctionType(
    inner.__code__, inner.__globals__, inner.__name__, inner.__defaults__
  )
  original.__kwdefaults__ = inner.__kwdefaults__
  original.__doc__, original.__module__ = inner.__doc__, inner.__module__
  route = {"_route": functools.partial(instead, original)}
  made = [
    patch(inner, name, value, reason)
    for name, value in (
      ("__signature__", inspect.signature(inner)),
      ("__kwdefaults__", route),
      ("__defaults__", None),
      ("__code__", _trampoline.__code__),
    )
  ]
  return made[::-1]


def unpatch() -> None:
  """Restore every attribute of torch that torchax has replaced.

  Use it in tests, or in programs that no longer use jax tensors: the features listed in
  `docs/devices.md` stop working. The device's name, `torch.jax` and `Tensor.jax` stay,
  since torch itself defines them. Only a new process can apply the patches again.
  """
  while PATCHES:
    PATCHES[-1].undo()


@contextlib.contextmanager
def setting(owner: Any, name: str, value: Any) -> Iterator[None]:
  """Set an attribute inside the block, and restore its value after it."""
  before = getattr(owner, name)
  setattr(owner, name, value)
  try:
    yield
  finally:
    setattr(owner, name, before)


class WhileNeeded:
  """Context manager that keeps a patch installed while any thread is inside it.

  Args:
    install: function that installs the patch and returns the function to remove it.
  """

  def __init__(self, install: Callable[[], Callable[[], object]]):
    self._install = install
    self._lock = threading.Lock()
    self._users = 0
    self._remove: Callable[[], object] | None = None

  def __enter__(self) -> None:
    with self._lock:
      if not self._users:
        self._remove = self._install()
      self._users += 1

  def __exit__(self, *exception) -> None:
    with self._lock:
      self._users -= 1
      if not self._users and self._remove is not None:
        self._remove()
