"""Where in a program a draw is made: the path of modules.

Both are read off Python's stack, so nothing is paid for them until they are asked for:
by a ledger (`ledger.py`), and by streams whose draws are addressed by site.

A path is made of the names that modules have in one another, from the outermost one on
the stack, which has none: "layers.0.dropout".
"""

import sys
import types
import weakref
from collections.abc import Iterator

import torch

# Modules whose class has this attribute stand for the module that they hold.
TRANSPARENT = "_is_transparent_to_sites"

_names: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()
# Code of functions whose frame is a boundary: what is outside may change by the call.
_boundaries: set[types.CodeType] = set()


def boundary(function):
  """Decorates a function whose callers are not part of the paths inside of it."""
  _boundaries.add(function.__code__)
  return function


class Stack:
  """The modules that are running on this thread, outermost first.

  Attributes:
    modules: all of them.
    inside: how many of them run inside the innermost boundary.
  """

  __slots__ = ("modules", "inside")

  def __init__(self, frame):
    modules, inside = [], None
    for module in _running(frame):
      if module is None:
        inside = len(modules) if inside is None else inside
      elif not modules or modules[-1] is not module:
        modules.append(module)
    self.inside = len(modules) if inside is None else inside
    self.modules = modules[::-1]

  def path(self, anchor: tuple = (), from_boundary: bool = False) -> str:
    """The names of the modules.

    Args:
      anchor: modules that ran when the state was saved to which the stream has
        returned: a recomputation runs without them on the stack.
      from_boundary: only those inside the innermost boundary.
    """
    modules = self.modules
    skipped = len(modules) - self.inside if from_boundary else 0
    if anchor and modules and _is_inside(modules[0], anchor):
      skipped += len(anchor) if skipped else 0
      modules = [*anchor, *modules]
    names = [_name_in(*pair) for pair in zip(modules, modules[1:])]
    return ".".join(names[max(skipped - 1, 0) :])


def _running(frame) -> Iterator:
  """Modules of the frames from the inside out; None for a boundary."""
  while frame is not None:
    code = frame.f_code
    if code in _boundaries:
      yield None
    elif code.co_argcount and code.co_varnames[0] == "self":
      owner = frame.f_locals.get("self")
      if isinstance(owner, torch.nn.Module) and not hasattr(owner, TRANSPARENT):
        yield owner
    frame = frame.f_back


def _is_inside(module, anchor: tuple) -> bool:
  return module is not anchor[0] and _known_name(anchor[-1], module) is not None


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


def here() -> Stack:
  """The modules that are running now."""
  return Stack(sys._getframe(1))


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
