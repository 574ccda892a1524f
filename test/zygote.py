"""Imports torchax in many processes, each with other names of torch and JAX hidden.

  python zygote.py FOLDER < requests

A request is a line of JSON: a program, and a list of cases, which are the names that
are hidden from it. The answer is a line too: for each case the error that the program
ended with, or null. Each case is a fork of a process that has loaded torch and JAX and
has not imported torchax; the folder takes the bytecode that they share.
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
  import torch.distributed.tensor

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "torchax"


class _Hiding(importlib.machinery.SourceFileLoader):
  """Loads a module and hides names from its look-ups."""

  hidden: frozenset = frozenset()

  def exec_module(self, module):
    super().exec_module(module)
    if module.__name__ == "torchax.compat.private":
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
    "torchax.compat.private": PACKAGE / "compat/private.py",
    "torchax.registry.names": PACKAGE / "registry" / "names.py",
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


def _start(program: str, hidden: list[str]) -> tuple[int, int]:
  """A process that runs a case, and the pipe that it writes its outcome to."""
  reading, writing = os.pipe()
  child = os.fork()
  if not child:
    os.write(writing, json.dumps(_outcome(program, hidden)).encode())
    os._exit(0)
  os.close(writing)
  return child, reading


def _result(child: int, reading: int) -> str | None:
  with os.fdopen(reading, "rb") as pipe:
    said = pipe.read()
  os.waitpid(child, 0)
  return json.loads(said) if said else "the process died"


def _outcomes(program: str, cases: list[list[str]]) -> list[str | None]:
  found, at_once = [], min(4, os.cpu_count() or 1)
  for first in range(0, len(cases), at_once):
    started = [_start(program, case) for case in cases[first : first + at_once]]
    found += [_result(*process) for process in started]
  return found


def main() -> None:
  """Answers requests until there are no more."""
  assert "torchax" not in sys.modules
  sys.path.insert(0, str(PACKAGE.parent))
  sys.meta_path.insert(0, _Finder())
  sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False
  torch.set_num_threads(1)
  for request in sys.stdin:
    sys.stdout.write(json.dumps(_outcomes(*json.loads(request))) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
  main()
