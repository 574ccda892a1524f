"""Imports torchax in many processes, each with other names of torch and JAX hidden.

  python zygote.py FOLDER < cases

A line of the input is a JSON list: a program, and the names that are hidden from it. A
line of the output is the error that the program ended with, or null. Each case is a
fork of a process that has loaded torch and JAX and has not imported torchax; what they
share by way of the folder is bytecode.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import sys

import jax
import jax.experimental.pallas  # noqa: F401
import torch

if torch.distributed.is_available():
  # The first operation on a tensor that is not plain imports this, in a second.
  import torch.distributed.tensor  # noqa: F401

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "torchax"


class _Hiding(importlib.machinery.SourceFileLoader):
  """Loads a module and hides names from its look-ups."""

  hidden: frozenset = frozenset()

  def exec_module(self, module):
    super().exec_module(module)
    if module.__name__ == "torchax.private":
      self._hide_private(module)
    else:
      self._hide_operations(module)

  def _hide_private(self, module):
    walk = module.walk

    def hiding(path):
      if path in self.hidden:
        raise AttributeError(path)
      return walk(path)

    module.walk = hiding

  def _hide_operations(self, module):
    find = module.find

    def hiding(path, owner, name):
      return module.Missing(path) if path in self.hidden else find(path, owner, name)

    module.find = hiding


class _Finder(importlib.abc.MetaPathFinder):
  FILES = {
    "torchax.private": PACKAGE / "private.py",
    "torchax.ops.names": PACKAGE / "ops" / "names.py",
  }

  def find_spec(self, name, path=None, target=None):
    file = self.FILES.get(name)
    if file is None:
      return None
    loader = _Hiding(name, str(file))
    return importlib.util.spec_from_file_location(name, file, loader=loader)


def _outcome(program: str, hidden: list[str]) -> str | None:
  _Hiding.hidden = frozenset(hidden)
  try:
    exec(compile(program, "program", "exec"), {"__name__": "program"})
  except BaseException as error:
    return f"{type(error).__name__}: {error}"
  return None


def main() -> None:
  """Runs the cases one after the other."""
  assert "torchax" not in sys.modules
  sys.path.insert(0, str(PACKAGE.parent))
  sys.meta_path.insert(0, _Finder())
  sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False
  torch.set_num_threads(1)
  for line in sys.stdin:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
      outcome = _outcome(*json.loads(line))
      os.write(writing, json.dumps(outcome).encode())
      os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
      said = pipe.read().decode()
    os.waitpid(child, 0)
    print(said or json.dumps("the process died"), flush=True)


if __name__ == "__main__":
  main()
