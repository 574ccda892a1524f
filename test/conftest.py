"""Settings of every test run."""

import os

import hypothesis
import pytest

# Tests state what must hold on any machine; `make test-accelerator` leaves the platform
# to JAX, which multiplies matrices there in fewer bits unless it is told not to.
if os.environ.get("TORCHAX_ACCELERATOR"):
  os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
else:
  os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A test that fails inside of the library shows where.
os.environ.setdefault("TORCHAX_TRACEBACK", "full")

# The rows of operator tests are asserted in a helper; show their values as well.
pytest.register_assert_rewrite("ops.harness", "rng.goodness")

# A first example compiles, a later one does not: times say nothing here.
hypothesis.settings.register_profile(
  "torchax",
  deadline=None,
  derandomize=True,
  suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("torchax")
