"""Where in a program a draw is made: the path of modules.

A path is made of the names that modules have in one another, from the outermost one
that is running, which has none: "layers.0.dropout". Who runs is in `running.py`.
"""

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import jax
import torch

from torchax.compat import jax_compat, torch_compat
from torchax.rng import running
from torchax.rng import state as rng_state
from torchax.rng.counter import Counter, DrawOperands

_names: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


class Replay(NamedTuple):
  """A part of a forward pass that a backward pass runs again.

  Attributes:
    modules: those that ran when the state was saved to which the stream has returned.
    call: what was running when it returned; it stands for these modules.
  """

  modules: tuple
  call: running.Call | None


def replay(modules: tuple | None) -> Replay | None:
  """What runs from now on runs in place of what ran in these modules.

  `torch.utils.checkpoint` runs a part of a model again outside of the modules around
  it, and the sites are to be the same. None where nothing is run again.
  """
  if modules is None or not torch_compat.in_backward():
    return None
  return Replay(modules, running.innermost())


def here() -> tuple:
  """The modules that are running now, for `replay`; None stands for a boundary."""
  return tuple(running.modules(running.innermost()))


def path(replayed: Replay | None = None, from_boundary: bool = False) -> str:
  """The names of the modules that are running.

  Args:
    replayed: what is being run again.
    from_boundary: only those inside the innermost boundary.
  """
  call = running.innermost()
  if replayed is None or not _is_going_on(replayed, call):
    modules = running.modules(call)
  else:
    modules = [*replayed.modules, *running.modules(call, replayed.call)]
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
        names.append(_name_in(parent, module))
      parent = module
  return ".".join(names)


def _is_going_on(replayed: Replay, call: running.Call | None) -> bool:
  return torch_compat.in_backward() and running.is_below(call, replayed.call)


def _name_in(parent, child) -> str:
  name = _known_name(parent, child)
  return type(child).__name__ if name is None else name


def _known_name(parent, child) -> str | None:
  for name, module in parent._modules.items():
    if module is child or module is not None and running.meant(module) is child:
      return name
  known = _names.setdefault(parent, {})
  name, reference = known.get(id(child), (None, None))
  if reference is None or reference() is not child:
    found = (name for name, module in _inside(parent, set()) if module is child)
    name = next(found, None)
    known[id(child)] = (name, weakref.ref(child))
  return name


def _inside(parent: torch.nn.Module, seen: set) -> Iterator[tuple]:
  """The modules in a module, with paths, in which wrappers of modules have no part."""
  for name, module in parent._modules.items():
    if module is None or id(module) in seen:
      continue
    seen.add(id(module))
    module = running.meant(module)
    yield name, module
    for path, inner in _inside(module, seen):
      yield f"{name}.{path}", inner


class SiteTable:
  """The draws of each site of a stream: a site is a stream by itself.

  Args:
    key: of the stream.
    counts: draws made before, by the path; may be traced.
    counters: those of sites whose key was carried in.
  """

  def __init__(self, key, counts: dict, counters: dict[str, Counter] | None = None):
    self._key = key
    self._before = dict(counts)
    self._counters = {} if counters is None else dict(counters)
    # Draws made since.
    self.draws: dict[str, int] = {}
    running.following.hold_for(self)

  def __contains__(self, path: str) -> bool:
    return path in self._before

  def __getitem__(self, path: str) -> Counter:
    counter = self._counters.get(path)
    if counter is None:
      # A concrete key has concrete ones, also where a function is being traced.
      is_traced = isinstance(self._key, jax.core.Tracer)
      free = contextlib.nullcontext if is_traced else jax_compat.outside_of_traces
      with free():
        key = rng_state.named_key(self._key, path)
      counter = self._counters[path] = Counter(key, self._count(path))
    return counter

  def add(self, path: str, counter: Counter) -> None:
    """A site whose key was carried in."""
    self._before[path] = counter.next().count
    self._counters[path] = counter

  def _count(self, path: str):
    return self._before.get(path, 0) + self.draws.get(path, 0)

  def progress(self, path: str) -> int:
    """Draws that a site has made; in a trace those since it was carried in."""
    count = self._count(path)
    return count if isinstance(count, int) else self.draws.get(path, 0)

  def operands(self, path: str, turn: int) -> DrawOperands:
    """The operands of a draw of a site; its number is one of `progress`."""
    key, count = self[path].next()
    total = self._count(path)
    # A site counts all its draws, its key those that were made with it.
    return DrawOperands(key, turn - (total - count) if type(total) is int else turn)

  def counts(self) -> dict:
    """The counts of all sites."""
    return {path: self._count(path) for path in {**self._before, **self.draws}}

  def advance(self, path: str, draws: int) -> None:
    """Counts draws of a site."""
    self[path].step(draws)
    self.draws[path] = self.draws.get(path, 0) + draws

  def go_to(self, path: str, draws: int) -> None:
    """Sets the number of draws of a site since it was carried in."""
    self.advance(path, draws - self.draws.get(path, 0))

  def copy(self) -> "SiteTable":
    """A table that counts on its own."""
    counters = {path: copy.copy(each) for path, each in self._counters.items()}
    table = SiteTable(self._key, self._before, counters)
    table.draws = dict(self.draws)
    return table
