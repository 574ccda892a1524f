"""Settings of every test run."""

import gc
import os

import hypothesis
import parts
import pytest

# Tests must pass on any machine. For `make test-accelerator` JAX selects the platform,
# where the default precision of matrix products is too low for the tolerances.
if os.environ.get("TORCHAX_ACCELERATOR"):
  os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
else:
  os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Show frames of the library when a test fails.
os.environ.setdefault("TORCHAX_TRACEBACK", "full")

# Helpers assert the rows of operator tests; show values there, too.
pytest.register_assert_rewrite("ops.harness", "rng.goodness")

# No deadline: the first example compiles and the others do not.
hypothesis.settings.register_profile(
  "torchax",
  deadline=None,
  derandomize=True,
  suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("torchax")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
  """Collect tests without a search for garbage: all of them and their modules stay."""
  gc.disable()
  try:
    return (yield)
  finally:
    gc.freeze()
    gc.enable()


def pytest_addoption(parser):
  parser.addoption(
    "--part",
    type=parts.part_of,
    metavar="K/N",
    help="run part K of N of the tests, from 0",
  )


def pytest_collection_modifyitems(config, items):
  part = config.getoption("--part")
  if part:
    chosen = parts.in_part([item.nodeid for item in items], part)
    others = [item for item in items if item.nodeid not in chosen]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item.nodeid in chosen]


@pytest.fixture
def strict_mode(monkeypatch):
  """Run a test and its programs in the strict mode, also under `make test-fused`."""
  import torchax  # after the settings above

  monkeypatch.setenv("TORCHAX_EAGER", "strict")
  with torchax.eager_mode("strict"):
    yield


@pytest.fixture
def env():
  """Run a test inside the default environment."""
  import torchax  # after the settings above

  with torchax.default_env() as environment:
    yield environment
