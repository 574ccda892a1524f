"""Meshes of eight devices: models, what follows a sharding, both kinds of axes, files.

`mesh_cases.py` has the laws; it runs once, in a process of its own.
"""

import many_devices
import pytest
from distributed import mesh_cases

pytestmark = pytest.mark.programs


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> dict[str, str]:
  """What the program found: a traceback or "", by law."""
  folder = tmp_path_factory.mktemp("meshes")
  return many_devices.failures(mesh_cases.__file__, folder, timeout=600)


@pytest.mark.parametrize("law", mesh_cases.CASES)
def test_on_a_mesh(failures, law):
  assert failures[law] == "", failures[law]
