"""Device indices: the devices of tensors in a process with eight of them.

The laws are in `eight_devices.py`, which runs once, in a process of its own.
"""

import eight_devices
import many_devices
import pytest

pytestmark = pytest.mark.programs


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> dict[str, str]:
  """Return traceback, or "" if the law holds, by law and context."""
  return many_devices.failures(
    eight_devices.__file__, tmp_path_factory.mktemp("devices")
  )


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("law", eight_devices.CASES)
def test_on_eight_devices(failures, law, where):
  assert failures[f"{where} {law}"] == "", failures[f"{where} {law}"]
