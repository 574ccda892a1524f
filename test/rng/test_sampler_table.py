"""Properties for the table of samplers in `docs/samplers.md`: distance, ends and cost.

With TORCHAX_SAMPLERS=full (`make test-samplers`) more numbers are drawn, and the cost
is measured against `jax.random`. `tools/sampler_table.py` writes the table from the
report.
"""

import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rng.sampler_rows import ROWS, all_words, bf16, f16, f64

from torchax.rng import RngState

pytestmark = pytest.mark.distributions

IS_FULL = os.environ.get("TORCHAX_SAMPLERS") == "full"
N = 1 << (18 if IS_FULL else 14)
REPEATS = 9
# With a new seed, one in ten thousand rows would fail by chance.
RARE = 1e-4
NAMES = [
  pytest.param(name, dtype, id=f"{name}-{jnp.dtype(dtype).name}")
  for name, row in ROWS.items()
  for dtype in row.dtypes
]
# Relative half unit in the last place, the largest change by rounding. A number of
# `torch.rand` represents the interval above it.
GRIDS = {bf16: 2.0**-8, f16: 2.0**-11}
MOST = 1.3  # times the cost of `jax.random`


@pytest.fixture(autouse=True)
def x64(request):
  dtype = jnp.dtype(request.getfixturevalue("dtype"))
  with jax.enable_x64(dtype in (jnp.dtype(f64), jnp.dtype("int64"))):
    yield


def _compiled(sample, n, dtype):
  return jax.jit(lambda key: sample(key, (n,), dtype))


def _distance(drawn: np.ndarray, law) -> float:
  """Return the largest difference of the distribution functions (Kolmogorov)."""
  values, counts = np.unique(drawn, return_counts=True)
  return float(abs(counts.cumsum() / len(drawn) - law.cdf(values)).max())


@pytest.mark.parametrize("name, dtype", NAMES)
def test_the_distance_to_the_law_is_that_of_chance(name, dtype, record_property):
  row = ROWS[name]
  key = RngState.from_seed(7).draw_key()
  drawn = np.asarray(_compiled(row.ours, N, dtype)(key))
  distance = _distance(drawn.astype(np.float64), row.law)
  chance = np.sqrt(np.log(2 / RARE) / 2 / N)
  record_property("distance", f"{distance:.5f}")
  record_property("numbers", str(N))
  assert distance < chance + GRIDS.get(dtype, 0)


@pytest.mark.parametrize(
  "name, dtype", [p for p in NAMES if ROWS[p.values[0]].has_ends]
)
def test_the_ends_are_finite_and_inside_the_support(name, dtype, record_property):
  row = ROWS[name]
  ends = []
  for words in (0, 0xFFFFFFFF):
    with all_words(words):
      (drawn,) = np.asarray(row.ours(jax.random.key(0), (1,), dtype))
      ends.append(drawn)
  low, high = row.law.support()
  record_property("least", str(min(ends)))
  record_property("greatest", str(max(ends)))
  assert all(low <= end <= high for end in ends)
  if name.startswith("uniform"):
    assert ends[1] < high
  if dtype is not f16 or name not in (
    "cauchy",
    "log_normal(0, 1)",
  ):  # 65504 is the largest finite float16
    assert np.isfinite(np.asarray(ends, float)).all()


def _seconds(call) -> float:
  start = time.process_time()
  jax.block_until_ready(call())
  return time.process_time() - start


@pytest.mark.skipif(not IS_FULL, reason="times are measured by `make test-samplers`")
@pytest.mark.parametrize("name, dtype", NAMES)
def test_the_cost_is_that_of_jax(name, dtype, record_property):
  row, key = ROWS[name], jax.random.key(0)
  calls = [_compiled(sample, N, dtype) for sample in (row.ours, row.theirs) if sample]
  for call in calls:
    jax.block_until_ready(call(key))
  times = [[_seconds(lambda c=call: c(key)) for call in calls] for _ in range(REPEATS)]
  ours, theirs = (statistics.median(column) for column in zip(*times))
  record_property("cost", f"{ours / theirs:.2f}")
  assert ours < MOST * theirs
