"""Short programs of users, each in a process of its own, agree with CPU torch."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from ecosystem.programs import load
from source_tree import ROOT
from torch.testing import assert_close

MODULES = {
  "pyro-ppl": "pyro",
  "sentence-transformers": "sentence_transformers",
  "torch-geometric": "torch_geometric",
  "x-transformers": "x_transformers",
}


def _is_missing(library: str | None) -> bool:
  name = MODULES.get(library, library)
  return name is not None and importlib.util.find_spec(name) is None


def _row(name: str, program):
  marks = []
  if _is_missing(program.library):
    reason = f"{program.library} of the extra `ecosystem` is not installed"
    marks.append(pytest.mark.skip(reason=reason))
  if program.fails:
    marks.append(pytest.mark.xfail(strict=True, reason=program.fails))
  return pytest.param(program, id=name, marks=marks)


def _run(name: str) -> dict:
  paths = (ROOT, ROOT / "test" / "suites")
  done = subprocess.run(
    [sys.executable, "-m", "ecosystem.programs.run", name],
    env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    capture_output=True,
    text=True,
    check=False,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


@pytest.mark.parametrize("program", [_row(*item) for item in load().items()])
def test_program_agrees_with_cpu(program, record_property):
  record_property("program", program.title)
  record_property("lines", program.lines)
  if program.library is not None:
    record_property("version", importlib.metadata.version(program.library))
  report = _run(program.run.__name__)
  for device, said in report.items():
    for run in ("first", "later"):
      record_property(f"{device} {run}", f"{said[run]:.2f}")
  expected, actual = report["cpu"]["values"], report["jax"]["values"]
  assert actual.keys() == expected.keys()
  for name, value in expected.items():
    if isinstance(value, bool):
      assert value and actual[name], f"{name} does not hold"
    else:
      given = torch.tensor(actual[name]), torch.tensor(value)
      assert_close(*given, rtol=program.rtol, atol=program.atol)
