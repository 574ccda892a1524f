"""Functional collectives on jax, against CPU torch's gloo in two and four processes.

The collectives are in `gloo_cases.py`, which runs once in each of the processes, and
once with eight devices of the host.
"""

import contextlib
import sys

import many_devices
import pytest
import torch.distributed
from distributed import gloo_cases, worlds

pytestmark = [
  pytest.mark.programs,
  pytest.mark.skipif(
    not torch.distributed.is_gloo_available(), reason="this torch has no gloo"
  ),
]


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> dict[str, str]:
  """Return law -> traceback, or "" if the law holds."""
  folder = tmp_path_factory.mktemp("gloo")
  # Use the loopback address, independent of the name of the host.
  environment = worlds.environment() | {"GLOO_SOCKET_IFNAME": "lo"}
  for size in gloo_cases.SIZES:
    with contextlib.ExitStack() as scope:
      members = [
        scope.enter_context(
          worlds.started(
            *(sys.executable, "-W", "ignore", gloo_cases.__file__),
            *(rank, size, folder),
            env=environment,
          )
        )
        for rank in range(size)
      ]
      for member in members:
        output, _ = member.communicate(timeout=120)
        assert member.returncode == 0, output[-4000:]
  return many_devices.failures(gloo_cases.__file__, folder, timeout=240)


@pytest.mark.parametrize("size", gloo_cases.SIZES)
@pytest.mark.parametrize("name", gloo_cases.CASES)
def test_collectives_and_gradients_equal_gloo(failures, name, size):
  found = failures[f"{name} of {size}"]
  assert found == "", found
