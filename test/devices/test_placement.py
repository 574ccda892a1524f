"""Device numbers: where tensors lie when a process has eight devices.

`eight_devices.py` has the laws; it runs once, in a process of its own.
"""

import eight_devices
import many_devices
import pytest

pytestmark = pytest.mark.programs


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> dict[str, str]:
  """What the program found: a traceback or "", by law and by where it ran."""
  return many_devices.failures(
    eight_devices.__file__, tmp_path_factory.mktemp("devices")
  )


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("law", eight_devices.CASES)
def test_on_eight_devices(failures, law, where):
  assert failures[f"{where} {law}"] == "", failures[f"{where} {law}"]
