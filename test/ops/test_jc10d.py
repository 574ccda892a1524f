"""Functional collectives on eight devices, against their laws in numpy.

The laws are in `collective_cases.py`, which runs once, in a process of its own.
"""

import many_devices
import pytest
from distributed import collective_cases

pytestmark = pytest.mark.programs


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> dict[str, str]:
  """Return law -> traceback, or "" if the law holds."""
  folder = tmp_path_factory.mktemp("collectives")
  return many_devices.failures(collective_cases.__file__, folder, timeout=300)


@pytest.mark.parametrize("kind", collective_cases.KINDS)
@pytest.mark.parametrize("law", collective_cases.CASES)
def test_on_eight_devices(failures, law, kind):
  found = failures[f"{kind} {law}"]
  assert found == "", found
