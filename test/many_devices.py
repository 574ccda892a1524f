"""Runs laws of programs with eight devices, which need a process of their own.

A module of laws is a program: `main(CASES)` runs each of them and writes what it found.
`failures` starts it, for a fixture of the tests.
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
# Where a program finds the library and what tests share.
PLACES = (_TESTS, _TESTS.parent)


def failures(program: str, folder: pathlib.Path, timeout: int = 900) -> dict[str, str]:
  """What a program found: a traceback or "", by law and by where it ran."""
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
  """The traceback of a law inside of a context; "" where it holds."""
  try:
    with context():
      law()
  except BaseException:
    return traceback.format_exc()
  return ""


def run(
  cases: Mapping[str, Callable], contexts: Mapping[str, Callable] | None = None
) -> dict[str, str]:
  """What each case fails by, under its name; for each context "context name"."""
  found = {}
  for where, context in (contexts or {"": contextlib.nullcontext}).items():
    for name, law in cases.items():
      found[f"{where} {name}".strip()] = failure(law, context)
      torch.jax.set_device(0)
  return found


def main(
  cases: Mapping[str, Callable], contexts: Mapping[str, Callable] | None = None
) -> None:
  """Runs the cases and writes what was found to the file that is named."""
  with open(sys.argv[1], "w") as file:
    json.dump(run(cases, contexts), file)
