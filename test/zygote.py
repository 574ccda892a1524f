"""Server that imports torchax in forks, with some names of torch and JAX hidden.

  python zygote.py FOLDER < requests

A request is a line of JSON: a program, and a list of cases, each a list of names to
hide. The reply is a line of JSON with the error of the program, or null, for each case.
Each case runs in a fork of a process that has imported torch and JAX but not torchax.
FOLDER stores their bytecode.
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
  # The first operation on a tensor subclass imports this, which takes a second.
  import torch.distributed.tensor

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "torchax"


class _Hiding(importlib.machinery.SourceFileLoader):
  """Loader that hides names from the look-ups of a module."""

  hidden: frozenset = frozenset()

  def exec_module(self, module):
    super().exec_module(module)
    if module.__name__ == "torchax.compat.private":
      self._hide_private(module)
    else:
      self._hide_operations(module)

  def _hide_private(self, module):
    resolve = module.resolve

    def hiding(path):
      if path in self.hidden:
        raise AttributeError(path)
      return resolve(path)

    module.resolve = hiding

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
  """Fork a process that runs a case; return it and the pipe with its outcome."""
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
  """Answer requests until the end of the input."""
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
