"""Times of two functions, measured in one process.

The machine's speed drifts, so the two are measured in turns. The result is the pair of
times with the median ratio.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax

REPEATS = 15
SECONDS_PER_REPEAT = 0.03


@dataclasses.dataclass
class Row:
  """One line of the report.

  Attributes:
    name: name of the measured program.
    baseline: name of the program that it is compared with.
    ours_us, baseline_us: microseconds a call, or values in `unit`.
    goal: largest ratio that is good enough; None if there is no goal.
    note: remark for the reader.
    unit: unit of the two values.
  """

  name: str
  baseline: str
  ours_us: float
  baseline_us: float
  goal: float | None
  note: str = ""
  unit: str = "µs"

  @property
  def ratio(self) -> float:
    """Our time over that of the baseline."""
    return self.ours_us / self.baseline_us

  @property
  def reached(self) -> bool:
    """True if the ratio is within the goal or there is none."""
    return self.goal is None or self.ratio <= self.goal


def _calls_for(function: Callable) -> int:
  start = time.perf_counter()
  jax.block_until_ready(arrays(function()))  # JAX dispatches asynchronously
  elapsed = time.perf_counter() - start
  return max(1, min(2000, int(SECONDS_PER_REPEAT / max(elapsed, 1e-6))))


def _time(function: Callable, calls: int) -> float:
  start = time.perf_counter()
  for _ in range(calls):
    result = function()
  jax.block_until_ready(arrays(result))
  return (time.perf_counter() - start) / calls * 1e6


def arrays(value):
  """Return the JAX arrays in a result, to wait for them."""
  if hasattr(value, "jax") and callable(value.jax):
    return value.detach().jax()
  if isinstance(value, list | tuple):
    return [arrays(part) for part in value]
  return value


def compare(
  name: str,
  ours: Callable,
  baseline: Callable,
  goal: float | None,
  baseline_name: str = "plain JAX",
  note: str = "",
) -> Row:
  """Measure two functions in turns, after two calls that compile them."""
  for function in (ours, baseline, ours, baseline):
    jax.block_until_ready(arrays(function()))
  calls = _calls_for(ours), _calls_for(baseline)
  pairs = [(_time(ours, calls[0]), _time(baseline, calls[1])) for _ in range(REPEATS)]
  ours_us, baseline_us = sorted(pairs, key=lambda pair: pair[0] / pair[1])[REPEATS // 2]
  return Row(name, baseline_name, ours_us, baseline_us, goal, note)


def measure(function: Callable) -> float:
  """Return the median microseconds of a call, after two calls that compile it."""
  for _ in range(2):
    jax.block_until_ready(arrays(function()))
  calls = _calls_for(function)
  return statistics.median(_time(function, calls) for _ in range(REPEATS))
