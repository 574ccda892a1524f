"""Meshes, placements and plans of torch on eight devices.

The laws are in `dtensor_cases.py`, which runs once, in a process of its own.
"""

import many_devices
import pytest
from distributed import dtensor_cases

pytestmark = pytest.mark.programs


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> dict[str, str]:
  """Return law -> traceback, or "" if the law holds."""
  folder = tmp_path_factory.mktemp("dtensors")
  return many_devices.failures(dtensor_cases.__file__, folder, timeout=400)


@pytest.mark.parametrize("law", dtensor_cases.CASES)
def test_on_eight_devices(failures, law):
  assert failures[law] == "", failures[law]
