"""Where in a program a draw is made: the path of modules.

A path is made of the names that modules have in one another, from the outermost one
that is running, which has none: "layers.0.dropout". Who runs is in `running.py`.
"""

import weakref
from typing import NamedTuple

from torchax import _torch_compat
from torchax.rng import running

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
  if modules is None or not _torch_compat.in_backward():
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
    elif module is not parent:
      if parent is not None:
        names.append(_name_in(parent, module))
      parent = module
  return ".".join(names)


def _is_going_on(replayed: Replay, call: running.Call | None) -> bool:
  return _torch_compat.in_backward() and running.is_below(call, replayed.call)


def _name_in(parent, child) -> str:
  name = _known_name(parent, child)
  return type(child).__name__ if name is None else name


def _known_name(parent, child) -> str | None:
  for name, module in parent._modules.items():
    if module is child:
      return name
  known = _names.setdefault(parent, {})
  name, reference = known.get(id(child), (None, None))
  if reference is None or reference() is not child:
    found = (n for n, module in parent.named_modules() if module is child and n)
    name = next(found, None)
    known[id(child)] = (name, weakref.ref(child))
  return name


class SiteTable:
  """How many draws each site of a stream has made, and with which key.

  Attributes:
    bases: counts that came from outside; may be traced.
    draws: draws made since.
    keys: the sites' keys, as far as they were needed or given.
    missing: sites of a traced function that have no operand yet.
  """

  def __init__(self, counts: dict, keys: dict | None = None):
    self.bases = counts
    self.draws: dict[str, int] = {}
    self.keys = {} if keys is None else keys
    self.missing: list[str] = []
    running.following.hold_for(self)

  def count(self, path: str):
    """Draws that the site has made."""
    return self.bases.get(path, 0) + self.draws.get(path, 0)

  def counts(self) -> dict:
    """The counts of all sites."""
    return {path: self.count(path) for path in {**self.bases, **self.draws}}

  def advance(self, path: str, draws: int) -> None:
    """Counts draws of a site."""
    self.draws[path] = self.draws.get(path, 0) + draws

  def copy(self) -> "SiteTable":
    """A table that counts on its own; it shares the keys."""
    table = SiteTable(dict(self.bases), self.keys)
    table.draws = dict(self.draws)
    table.missing = self.missing
    return table
