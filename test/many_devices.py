"""Runs laws of programs with eight devices, which need a process of their own.

A module of laws is a program: `main(CASES, contexts)` runs each of them and writes what
it found. `failures` starts it, for a fixture of the tests.
"""

import json
import os
import pathlib
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

_TESTS = pathlib.Path(__file__).parent


def failures(program: str, folder: pathlib.Path, timeout: int = 900) -> dict[str, str]:
  """What a program found: a traceback or "", by law and by where it ran."""
  path = folder / "found.json"
  flag = "--xla_force_host_platform_device_count=8"
  places = [str(_TESTS), str(_TESTS.parent), os.environ.get("PYTHONPATH", "")]
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


def run(cases: Mapping[str, Callable], contexts: Mapping[str, Any]) -> dict[str, str]:
  """The tracebacks of all cases, by name and by where they ran; "" for none."""
  found = {}
  for where, context in contexts.items():
    for name, law in cases.items():
      try:
        with context():
          law()
        found[f"{where} {name}"] = ""
      except BaseException:
        found[f"{where} {name}"] = traceback.format_exc()
      torch.jax.set_device(0)
  return found


def main(cases: Mapping[str, Callable], contexts: Mapping[str, Any]) -> None:
  """Runs the cases and writes what was found to the file that is named."""
  with open(sys.argv[1], "w") as file:
    json.dump(run(cases, contexts), file)
