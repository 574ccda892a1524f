"""Runner of checks that need eight devices, and hence a process of their own.

A module of checks is a program: `main(CASES)` runs them and writes their failures.
`failures` starts the program, for a fixture of the tests.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping

import torch

_TESTS = pathlib.Path(__file__).parent
# Import paths of a program: the library and the helpers of tests.
PLACES = (_TESTS, _TESTS.parent)


def failures(program: str, folder: pathlib.Path, timeout: int = 900) -> dict[str, str]:
  """Run a program; return a traceback or "" by "context check"."""
  path = folder / "found.json"
  flag = "--xla_force_host_platform_device_count=8"
  places = [*map(str, PLACES), os.environ.get("PYTHONPATH", "")]
  environment = {
    **os.environ,
    "XLA_FLAGS": flag,
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": os.pathsep.join(filter(None, places)),
  }
  result = subprocess.run(
    [sys.executable, program, str(path)],
    env=environment,
    capture_output=True,
    text=True,
    check=False,
    timeout=timeout,
  )
  assert result.returncode == 0, result.stderr[-4000:]
  return json.loads(path.read_text())


def failure(law: Callable, context: Callable = contextlib.nullcontext) -> str:
  """Return the traceback of a check inside a context; "" if it passes."""
  try:
    with context():
      law()
  except BaseException:
    return traceback.format_exc()
  return ""


def run(
  cases: Mapping[str, Callable], contexts: Mapping[str, Callable] | None = None
) -> dict[str, str]:
  """Return the failures of the cases, by name or "context name"."""
  found = {}
  for where, context in (contexts or {"": contextlib.nullcontext}).items():
    for name, law in cases.items():
      found[f"{where} {name}".strip()] = failure(law, context)
      torch.jax.set_device(0)
  return found


def main(
  cases: Mapping[str, Callable], contexts: Mapping[str, Callable] | None = None
) -> None:
  """Run the cases; write the failures to the file named on the command line."""
  with open(sys.argv[1], "w") as file:
    json.dump(run(cases, contexts), file)
