"""Meshes, placements and plans of torch on eight devices.

`dtensor_cases.py` has the laws; it runs once, in a process of its own.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from dist import dtensor_cases

pytestmark = pytest.mark.programs

_PROGRAM = pathlib.Path(dtensor_cases.__file__)


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> dict[str, str]:
  """What the program found: a traceback or "", by law."""
  path = tmp_path_factory.mktemp("dtensors") / "found.json"
  flag = "--xla_force_host_platform_device_count=8"
  result = subprocess.run(
    [sys.executable, str(_PROGRAM), str(path)],
    env={**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    check=False,
    timeout=400,
  )
  assert result.returncode == 0, result.stderr[-4000:]
  return json.loads(path.read_text())


@pytest.mark.parametrize("law", dtensor_cases.CASES)
def test_on_eight_devices(failures, law):
  assert failures[law] == "", failures[law]
