"""Paths of the running modules, which are the sites of draws.

A path joins the attribute names of nested modules, without the outermost one:
"layers.0.dropout". `compat/torch_compat/active_functions.py` follows calls of modules
while draws are addressed by site, a ledger is open, or a function is traced.
"""

from typing import NamedTuple

from torchax.compat import torch_compat
from torchax.compat.torch_compat.active_functions import Call, innermost, name_in


def _modules(call: Call | None, outside: Call | None = None) -> list:
  """Return the modules from `call` out to `outside` or to the end, outermost first.

  None is a boundary; a str is the path of modules of a graph.
  """
  modules = []
  while call is not None and call is not outside:
    module, call = call
    modules.append(module)
  return modules[::-1]


def here() -> tuple:
  """Return the modules that are running, for `replay`; None for a boundary."""
  return tuple(_modules(innermost()))


class Replay(NamedTuple):
  """Part of a forward pass that a backward pass recomputes.

  Attributes:
    modules: modules that ran when the random state was saved.
    call: innermost call when the state was restored; `modules` replace it in paths.
  """

  modules: tuple
  call: Call | None


def replay(modules: tuple | None) -> Replay | None:
  """Return a `Replay` of modules that starts here; None outside a backward pass.

  `torch.utils.checkpoint` recomputes a part of a model outside of its enclosing
  modules, and the sites must stay the same.
  """
  if modules is None or not torch_compat.in_backward():
    return None
  return Replay(modules, innermost())


def path(replayed: Replay | None = None, from_boundary: bool = False) -> str:
  """Return the path of the running modules.

  With `from_boundary` omit modules outside of the innermost boundary.
  """
  call = enclosing = innermost()
  modules = None
  if replayed is not None:
    while enclosing is not None and enclosing is not replayed.call:
      enclosing = enclosing[1]
    # The call that encloses the replay still runs, in a backward pass.
    if enclosing is replayed.call and torch_compat.in_backward():
      modules = [*replayed.modules, *_modules(call, replayed.call)]
  modules = _modules(call) if modules is None else modules
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
        names.append(name_in(parent, module))
      parent = module
  return ".".join(names)
