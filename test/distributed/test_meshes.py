"""Meshes of eight devices: models, inherited shardings, kinds of axes, files.

The laws are in `mesh_cases.py`, which runs once, in a process of its own.
"""

import many_devices
import pytest
from distributed import mesh_cases

pytestmark = pytest.mark.programs


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> dict[str, str]:
  """Return law -> traceback, or "" if the law holds."""
  folder = tmp_path_factory.mktemp("meshes")
  return many_devices.failures(mesh_cases.__file__, folder, timeout=600)


@pytest.mark.parametrize("law", mesh_cases.CASES)
def test_on_a_mesh(failures, law):
  assert failures[law] == "", failures[law]
