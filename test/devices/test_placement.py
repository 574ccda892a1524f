"""Device numbers: where tensors lie when a process has eight devices.

`eight_devices.py` has the laws; it runs once, in a process of its own.
"""

import json
import os
import pathlib
import subprocess
import sys

import eight_devices
import pytest

pytestmark = pytest.mark.programs

_PROGRAM = pathlib.Path(eight_devices.__file__)


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> dict[str, str]:
  """What the program found: a traceback or "", by law and by where it ran."""
  path = tmp_path_factory.mktemp("devices") / "found.json"
  flag = "--xla_force_host_platform_device_count=8"
  result = subprocess.run(
    [sys.executable, str(_PROGRAM), str(path)],
    env={**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    check=False,
    timeout=900,
  )
  assert result.returncode == 0, result.stderr[-4000:]
  return json.loads(path.read_text())


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("law", eight_devices.CASES)
def test_on_eight_devices(failures, law, where):
  assert failures[f"{where} {law}"] == "", failures[f"{where} {law}"]
