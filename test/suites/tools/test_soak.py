"""Peaks after the warm-up of the soak, and their bound."""

import pytest

from tools import soak
from tools.soak import Sample


def samples(memory, count=50, hours=1.0):
  """Return samples at even times, whose memory is a function of the hours."""
  times = [hours * n / (count - 1) for n in range(count)]
  return [Sample(t, memory(t), arrays=7, programs=40, objects=1000) for t in times]


def test_growth_is_relative_and_ignores_the_warm_up():
  found = soak.growth(samples(lambda t: 900 + 90 * (t > 0.7) if t > 0.2 else 4000))
  assert found["memory"] == pytest.approx(0.1)
  assert found["arrays"] == 0.0


@pytest.mark.parametrize(
  ("memory", "names"),
  [
    (lambda t: 900.0, []),
    (lambda t: 900 + 20 * t, []),
    (lambda t: 900 + 60 * t, ["memory"]),
    (lambda t: 2000 - 500 * t, []),
    (lambda t: 900 + 1000 * (t * 7 % 1), []),  # fills and is emptied
    (lambda t: 900 + 1000 * (t * 7 % 1) + 100 * t, ["memory"]),
  ],
)
def test_a_peak_that_rises_by_more_than_the_bound_is_named(memory, names):
  assert soak.exceeded_limits(soak.growth(samples(memory, count=500))) == names


def test_too_few_samples_are_an_error():
  with pytest.raises(ValueError, match="three samples"):
    soak.growth(samples(lambda t: 900.0, count=3))


def test_run_counts_memory_kept_by_its_workloads():
  kept = []
  rounds = []
  found = soak.run(
    0.05, {"keep": lambda n: kept.append(bytearray(10)), "count": rounds.append}
  )
  assert rounds == list(range(len(rounds))) and len(kept) == len(rounds)
  assert rounds and len(found) >= 2
  assert [s.hours for s in found] == sorted(s.hours for s in found)
  assert all(s.memory > 10 and s.objects > 1000 for s in found)


@pytest.mark.programs
def test_each_workload_runs():
  for name, workload in soak.Workloads().all().items():
    workload(1)
    assert name in soak.Workloads.__dict__


def test_the_curves_are_drawn(tmp_path):
  pytest.importorskip("matplotlib.pyplot", reason="no extra `plot` installed")
  path = tmp_path / "soak.svg"
  soak.picture(samples(lambda t: 900 + t), path)
  assert "<svg" in path.read_text()
