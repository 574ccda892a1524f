"""Paths of the modules that are running: the sites of draws.

A path is made of the names that modules have in one another, from the outermost one,
which has none: "layers.0.dropout". `compat/torch_compat/active_functions.py` follows
the calls while draws are addressed by site, a ledger is open, or a function is traced.
"""

import weakref
from collections.abc import Iterator
from typing import NamedTuple

from torchax.compat import torch_compat
from torchax.compat.torch_compat.active_functions import Call, innermost, unwrapped


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
  return tuple(_modules(innermost()))


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
  return Replay(modules, innermost())


def path(replayed: Replay | None = None, from_boundary: bool = False) -> str:
  """The names of the modules that are running.

  Args:
    replayed: the part that runs again.
    from_boundary: only those inside the innermost boundary.
  """
  call = innermost()
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
  """True if the call around a replay is still running, in a backward pass."""
  while call is not None and call is not replayed.call:
    call = call[1]
  return call is replayed.call and torch_compat.in_backward()


# Module -> {id of an inner module: (path in it or None, reference to the inner one)}.
_names: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _name_in(parent, child) -> str | None:
  for name, module in parent._modules.items():
    if module is child or module is not None and unwrapped(module) is child:
      return name
  known = _names.setdefault(parent, {})
  name, reference = known.get(id(child), (None, None))
  if reference is None or reference() is not child:
    found = (name for name, module in _inside(parent, set()) if module is child)
    name = next(found, None)
    known[id(child)] = (name, weakref.ref(child))
  return name


def _inside(parent, seen: set) -> Iterator[tuple]:
  """The modules in a module with their paths, which leave out wrappers of modules."""
  for name, module in parent._modules.items():
    if module is None or id(module) in seen:
      continue
    seen.add(id(module))
    module = unwrapped(module)
    yield name, module
    for path, inner in _inside(module, seen):
      yield f"{name}.{path}", inner
