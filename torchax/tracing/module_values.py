"""Numbers, flags and strings of modules, which a traced function decides by.

Attributes are compared only after one was set: `Module.__setattr__` counts for the
modules that a compiled function has run. Lists and dicts, which change without that,
are compared element by element on each call.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Iterator

import torch

from torchax.compat.patches import patch
from torchax.core.static_values import Identity, in_words, key_of

# What torch keeps in each module for itself.
OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training"}
_HOOKS = (
  *("_forward_pre_hooks", "_forward_hooks"),
  *("_backward_pre_hooks", "_backward_hooks"),
)


class _Writes:
  """Counts assignments to attributes of watched modules.

  Attributes:
    count: how many there were.
    watched: the modules, by identity.
  """

  def __init__(self):
    self.count = 0
    self.watched: dict[int, weakref.ref] = {}

  def watch(self, module: torch.nn.Module) -> None:
    """Counts what is assigned to the module from now on."""
    number = id(module)
    if number not in self.watched:
      _follow_assignments()
      forget = functools.partial(self._forget, number)
      self.watched[number] = weakref.ref(module, forget)

  def _forget(self, number: int, reference) -> None:
    if self.watched.get(number) is reference:
      del self.watched[number]


writes = _Writes()
_following: list[Callable] = []


def _follow_assignments() -> None:
  """Count assignments to attributes of modules, from the first watched module on."""
  cls = torch.nn.Module
  if cls.__setattr__ in _following:
    return
  watched = writes.watched

  def counted(original: Callable) -> Callable:
    @functools.wraps(original)
    def assign(self, *args):
      if id(self) in watched:
        writes.count += 1
      return original(self, *args)

    return assign

  reason = "assignments to modules of compiled functions, which are retraced"
  patch(cls, "__setattr__", counted(cls.__setattr__), reason)
  patch(cls, "__delattr__", counted(cls.__delattr__), reason)
  _following.append(cls.__setattr__)


class Values:
  """The values of one module, by name.

  Attributes:
    first: a key of each, as the module had them when it was noted.
    now: the same as of the last look.
  """

  def __init__(self, module: torch.nn.Module):
    writes.watch(module)
    self._reference = weakref.ref(module)
    self.kind = type(module).__name__
    # A class that has an `__setattr__` of its own may not tell of assignments.
    self.is_silent = type(module).__setattr__ is not torch.nn.Module.__setattr__
    self.first: dict = {}
    self.now: dict = {}
    self.containers: list[tuple] = []
    self.look()
    self.first = self.now

  @property
  def module(self) -> torch.nn.Module | None:
    """The module, if it still exists."""
    return self._reference()

  def look(self) -> None:
    """Takes the values as they are now."""
    module = self._reference()
    if module is None:
      return
    now, containers = {}, []
    for name, value in vars(module).items():
      if name in OF_TORCH:
        continue
      if isinstance(value, torch.Tensor):
        now[name] = torch.Tensor  # that there is one
        continue
      key = key_of(value)
      if key is not None:
        now[name] = key
        containers += containers_in(value)
    for name in _HOOKS:
      hooks = vars(module).get(name)
      if hooks:
        now[name] = tuple(map(Identity, hooks.values()))
        containers.append((hooks.values(), tuple(hooks.values())))
    if self.is_silent:
      containers.append((vars(module).values(), tuple(vars(module).values())))
    self.now, self.containers = now, containers

  def describe(self) -> Iterator[tuple[str, str]]:
    """(name, value) of each, as messages have them."""
    module = self._reference()
    for name in self.now:
      value = vars(module).get(name)
      if name in _HOOKS:
        value = list(value.values())
      yield name, "a tensor" if isinstance(value, torch.Tensor) else in_words(value)

  def changed(self) -> Iterator[tuple]:
    """(name, key) of each value that is another one than at first."""
    first, now = self.first, self.now
    if first is now or first == now:
      return
    for name in {**first, **now}:
      if first.get(name) != now.get(name):
        yield name, now.get(name)


def containers_in(value) -> Iterator[tuple]:
  """The lists and dicts in a value, each with a copy of what it holds."""
  if isinstance(value, dict):
    yield value.keys(), tuple(value)
    yield value.values(), tuple(value.values())
    value = value.values()
  elif isinstance(value, list | set):
    yield value, tuple(value)
  elif not isinstance(value, tuple | frozenset):
    return
  for part in value:
    yield from containers_in(part)


def is_same(entry: tuple) -> bool:
  """True for a container that still holds what its copy holds."""
  container, known = entry
  return len(container) == len(known) and all(map(operator.is_, container, known))
