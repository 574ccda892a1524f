"""Names that a carried function needs: imports, helpers, constants."""

import importlib

from tools.porting.changes import PortError
from tools.porting.syntax import Definition, Source
from tools.porting.tree import Tree


class Missing(PortError):
  """Error of a function that needs a name that is not known here."""


# Usual imports of operator files, for patches that do not show them.
USUAL = {
  "collections": "import collections",
  "functools": "import functools",
  "itertools": "import itertools",
  "jax": "import jax",
  "jnp": "import jax.numpy as jnp",
  "lax": "from jax import lax",
  "mappings": "from torchax.ops import mappings",
  "math": "import math",
  "np": "import numpy as np",
  "op_base": "from torchax.ops import op_base",
  "ops_registry": "from torchax.ops import ops_registry",
  "pytest": "import pytest",
  "torch": "import torch",
  "torchax": "import torchax",
  "unittest": "import unittest",
  "Any": "from typing import Any",
  "Callable": "from collections.abc import Callable",
  "List": "from typing import List",
  "Optional": "from typing import Optional",
  "Sequence": "from collections.abc import Sequence",
  "Tuple": "from typing import Tuple",
  "Union": "from typing import Union",
}
_DECORATORS = ("op", "register_function")


def complete(
  tree: Tree, one: Definition, new: Source, target: str
) -> tuple[list[str], list[Definition]]:
  """Return the imports and the helpers that a definition needs in a file.

  Args:
    tree: tree of this project.
    one: definition that goes into the file.
    new: upstream's file with the definition.
    target: path of the file here.

  Raises:
    Missing: a name has no definition.
  """
  there = tree.source(target)
  imports: dict[str, str] = {}
  helpers: dict[str, Definition] = {}
  waiting = [one]
  while waiting:
    current = waiting.pop()
    for name in sorted(current.names()):
      if name in helpers or name in imports or name == one.name:
        continue
      if name in there.definitions or name in there.imports or name in _DECORATORS:
        _require_same(name, new, there, target)
      elif name in new.imports:
        imports[name] = _importable(new.imports[name])
      elif name in new.definitions:
        helper = new.definitions[name]
        # Import our lowering: a copy of upstream's would replace it.
        same = [
          path
          for path, mine in tree.find(name)
          if mine.body() == helper.body() or helper.registered()
        ]
        if same:
          imports[name] = f"from {_module(same[0])} import {name}"
        elif helper.registered():
          raise Missing(f"it calls {name}, a lowering that is not here")
        else:
          helpers[name] = helper
          waiting.append(helper)
      elif name in USUAL:
        imports[name] = USUAL[name]
      elif len(found := tree.find(name)) == 1:
        imports[name] = f"from {_module(found[0][0])} import {name}"
      else:
        raise Missing(
          f"it needs {name}, which the patch does not show; name the commit and "
          "--upstream, which has it"
        )
  # A helper precedes the function that uses it.
  return sorted(imports.values()), list(reversed(helpers.values()))


def _require_same(name: str, new: Source, there: Source, target: str) -> None:
  """Raise `Missing` if an imported name means something else here."""
  theirs, ours = new.imports.get(name), there.imports.get(name)
  if (
    theirs and ours and theirs != ours and name not in USUAL and name not in _DECORATORS
  ):
    raise Missing(f"{name} is {theirs!r} there and {ours!r} in {target}")


def _importable(statement: str) -> str:
  """Return an import statement if it works here.

  Raises:
    Missing: the import fails.
  """
  module = statement.split()[1]
  try:
    if module.startswith("."):
      raise ImportError(f"{module} is a part of upstream's folder")
    found = importlib.import_module(module)
    name = statement.split()[3] if statement.startswith("from ") else None
    if name and not hasattr(found, name):
      importlib.import_module(f"{module}.{name}")
  except ImportError as error:
    raise Missing(f"it needs `{statement}`: {error}") from None
  return statement


def _module(path: str) -> str:
  return path.removesuffix(".py").replace("/", ".")
