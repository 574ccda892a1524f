"""Run dieharder on the streams of `tools/rng_stream.py` and write docs/dieharder.md.

usage: python -m tools.dieharder_report docs/dieharder.md [--seed SEED]

The text between the two markers of the page is replaced. The rules for failures were
fixed before the first run:

- Each test of `TESTS` runs once for each mode, each time with another seed.
- A run with a WEAK result is repeated with another seed and `GROWTH` times the samples,
  at most `ATTEMPTS` runs in all. A result that is weak in all runs is a failure. A
  result that is weak only in a repeat causes no further repeat. All results of all runs
  are reported.
- A FAILED result of any run is a failure at once. The run is not repeated.
- P-values of different runs must be uniform together: a Kolmogorov-Smirnov test with a
  p-value below `LEAST_UNIFORM` is a failure. Results of one run depend on each other,
  because they use the same words: only the last result of each run counts. Repeats
  depend on first runs, so only first runs count.

Failures are listed, and the exit status is 1.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator

import jax
from scipy import stats

import torchax
from tools import dieharder, rng_stream, tables
from tools.dieharder import FAILED, PASSED, WEAK, Row, Test
from torchax.rng import state as rng_state

ATTEMPTS = 3
GROWTH = 4
LEAST_UNIFORM = 1e-3

# A lag of n adds every (n + 1)-th word. Lags 3, 7, 15 and 31 add words at one index of
# the draws. Lag 255 adds words at one index of the draws of one fork or thread.
_LAGS = (0, 1, 2, 3, 4, 7, 8, 15)

# A result has 100 p-values, dieharder's default. The number of samples is dieharder's
# default, or less where that takes minutes. docs/dieharder.md names the tests left out.
TESTS = (
  Test(0, "diehard_birthdays", 100, 100),
  Test(1, "diehard_operm5", 1_000_000, 100),
  Test(2, "diehard_rank_32x32", 20_000, 100),
  Test(3, "diehard_rank_6x8", 100_000, 100),
  Test(4, "diehard_bitstream", 2_097_152, 100),
  Test(8, "diehard_count_1s_stream", 256_000, 100),
  Test(9, "diehard_count_1s_byte", 256_000, 100),
  Test(10, "diehard_parking_lot", 12_000, 100),
  Test(11, "diehard_2dsphere", 8_000, 100),
  Test(12, "diehard_3dsphere", 4_000, 100),
  Test(13, "diehard_squeeze", 100_000, 100),
  Test(15, "diehard_runs", 100_000, 100, results=2),
  Test(16, "diehard_craps", 200_000, 100, results=2),
  Test(17, "marsaglia_tsang_gcd", 1_000_000, 100, results=2),
  Test(100, "sts_monobit", 100_000, 100),
  Test(101, "sts_runs", 100_000, 100),
  Test(102, "sts_serial", 50_000, 100, results=30),
  *(Test(200, "rgb_bitdist", 50_000, 100, ntuple=n) for n in (1, 2, 3, 4, 6, 8)),
  *(Test(201, "rgb_minimum_distance", 10_000, 200, ntuple=n) for n in (2, 3, 4, 5)),
  *(Test(202, "rgb_permutations", 100_000, 100, ntuple=n) for n in (2, 3, 4, 5)),
  *(Test(203, "rgb_lagged_sum", 100_000, 100, ntuple=n) for n in _LAGS),
  Test(203, "rgb_lagged_sum", 50_000, 100, ntuple=31),
  Test(203, "rgb_lagged_sum", 10_000, 100, ntuple=255),
  Test(205, "dab_bytedistrib", 51_200_000, 1),
  Test(206, "dab_dct", 50_000, 1),
  Test(207, "dab_filltree", 15_000_000, 1, results=2),
  Test(208, "dab_filltree2", 5_000_000, 1, ntuple=0, results=2),
  Test(209, "dab_monobit2", 65_000_000, 1),
)

# Distance of the seeds of two runs: in the mode "seeds", first runs share no words, and
# a repeat shares none with the run that it repeats.
STRIDE = 1 << 26
_SLOTS = ATTEMPTS * 16


@dataclasses.dataclass(frozen=True)
class Run:
  """Run of a test.

  Attributes:
    test: the test with its size.
    seed: seed of the stream.
    rows: results.
    size: number of bytes written to dieharder.
  """

  test: Test
  seed: int
  rows: list[Row]
  size: int


# Runs of a test: the first one and its repeats.
Runs = list[Run]


def seed_of(index: int, attempt: int, seed: int = 0) -> int:
  """Return the seed of a run.

  Args:
    index: index of the test in `TESTS`.
    attempt: 0 for a first run, then 1, 2, ….
    seed: seed of the report.
  """
  return seed + (index + 16 * attempt) % _SLOTS * STRIDE


def _words(mode: str, seed: int, attempt: int) -> Iterator:
  """Yield the words for a run, too few to overlap with those of another run."""
  draws = STRIDE * (GROWTH if attempt else 1)
  blocks = rng_stream.dump(mode, seed)
  return itertools.islice(blocks, draws // rng_stream.BLOCK)


def _run(mode: str, index: int, seed: int, attempt: int) -> Run:
  test = TESTS[index].grown(GROWTH) if attempt else TESTS[index]
  own = seed_of(index, attempt, seed)
  rows, size = dieharder.run(test, _words(mode, own, attempt))
  for row in rows:
    print(f"{mode} {row.name} {row.ntuple}: {_cell(row)}", flush=True)
  return Run(test, own, rows, size)


# Failures ----------------------------------------------------------------------------


def _always_weak(runs: Runs) -> list[int]:
  """Return the indices of the results that are weak in all runs of a test."""
  by_index = zip(*(run.rows for run in runs))
  return [
    i for i, rows in enumerate(by_index) if all(r.assessment == WEAK for r in rows)
  ]


def _failed(runs: Runs) -> list[Row]:
  return [row for run in runs for row in run.rows if row.assessment == FAILED]


def repeat(run: Callable[[int], Run]) -> Runs:
  """Run a test, and repeat it while a result is weak in all runs and none has failed.

  Args:
    run: runs the test; its argument counts attempts from 0.
  """
  runs = [run(0)]
  while len(runs) < ATTEMPTS and _always_weak(runs) and not _failed(runs):
    runs.append(run(len(runs)))
  return runs


def uniformity(modes: Iterable[list[Runs]], value: Callable[[Row], float]) -> float:
  """Return the p-value of a test that p-values of independent runs are uniform.

  Args:
    modes: runs of some modes.
    value: chooses the p-value of a result.
  """
  values = [value(runs[0].rows[-1]) for tests in modes for runs in tests]
  return float(stats.kstest(values, "uniform").pvalue)


def failures(found: dict[str, list[Runs]]) -> list[str]:
  """Describe the failures, one a line.

  Args:
    found: mode -> tests -> runs.
  """
  lines = []
  for mode, tests in found.items():
    for runs in tests:
      lines += [f"{mode}: {row.name} {row.ntuple} failed" for row in _failed(runs)]
      if len(runs) == ATTEMPTS:
        weak = [runs[0].rows[index] for index in _always_weak(runs)]
        lines += [f"{mode}: {r.name} {r.ntuple} was weak in all runs" for r in weak]
  together = uniformity(found.values(), lambda row: row.exact)
  if together < LEAST_UNIFORM:
    lines.append(f"the p-values are not uniform: p = {_p(together)}")
  return lines


# The page ----------------------------------------------------------------------------


def _p(p: float, digits: int = 4) -> str:
  return f"{p:.{digits}f}" if p >= 1e-3 else f"{p:.1e}"


def _cell(row: Row) -> str:
  if row.assessment == PASSED:
    return f"{_p(row.p)} · {_p(row.exact)}"
  return f"{_p(row.p, 8)} · {_p(row.exact, 8)} **{row.assessment}**"


def _command(run: Run) -> str:
  return f"`{' '.join(run.test.arguments)}`"


def _results(found: dict[str, list[Runs]]) -> str:
  """Return a table of all results of first runs, with a column for each mode."""
  header = ["test", "ntuple", "arguments", "seed", *found]
  lines = []
  for tests in zip(*found.values()):
    firsts = [runs[0] for runs in tests]
    for rows in zip(*(run.rows for run in firsts)):
      cells = [rows[0].name, str(rows[0].ntuple), _command(firsts[0])]
      lines.append([*cells, str(firsts[0].seed), *map(_cell, rows)])
  return tables.markdown(header, lines)


def _repeats(found: dict[str, list[Runs]]) -> str:
  """Return a table of all results of repeats."""
  lines = []
  for mode, tests in found.items():
    for runs, attempt in itertools.product(tests, range(1, ATTEMPTS)):
      for run in runs[attempt : attempt + 1]:
        for first, row in zip(runs[0].rows, run.rows):
          cells = [mode, row.name, str(row.ntuple), _command(run), str(run.seed)]
          lines.append([*cells, str(attempt), _cell(first), _cell(row)])
  if not lines:
    return "No result was weak, so nothing was run again."
  header = ["mode", "test", "ntuple", "arguments", "seed", "repeat"]
  header += ["first run", "this run"]
  return tables.markdown(header, lines)


def _counts(runs: Iterable[Run]) -> list[str]:
  counts = collections.Counter(row.assessment for run in runs for row in run.rows)
  return [
    str(n) for n in (counts.total(), *(counts[a] for a in (PASSED, WEAK, FAILED)))
  ]


def _summary(found: dict[str, list[Runs]]) -> str:
  """Return a table of the number of results of each kind, and their uniformity."""
  header = ["mode", "runs", "results", PASSED, WEAK, FAILED]
  header += ["uniform, exact", "uniform, dieharder's"]
  lines = []
  groups = {mode: [tests] for mode, tests in found.items()}
  groups["all"] = list(found.values())
  for mode, several in groups.items():
    firsts = [runs[0] for tests in several for runs in tests]
    together = [
      uniformity(several, lambda r: r.exact),
      uniformity(several, lambda r: r.p),
    ]
    lines.append([mode, str(len(firsts)), *_counts(firsts), *map(_p, together)])
  again = [run for tests in found.values() for runs in tests for run in runs[1:]]
  lines.append(["repeats", str(len(again)), *_counts(again), "–", "–"])
  return tables.markdown(header, lines)


def _verdict(found: dict[str, list[Runs]]) -> str:
  wrong = failures(found)
  if not wrong:
    return "Nothing has failed."
  return "\n".join(["Failures:", "", *(f"- {line}" for line in wrong)])


def _facts(
  found: dict[str, list[Runs]], seed: int, version: str, seconds: float
) -> str:
  sizes = {
    mode: sum(run.size for runs in tests for run in runs)
    for mode, tests in found.items()
  }
  read = ", ".join(f"{mode} {size / 2**30:.1f} GiB" for mode, size in sizes.items())
  return tables.markdown(
    ["what", "which"],
    [
      ["dieharder", version],
      ["torchax, JAX", f"{torchax.__version__}, {jax.__version__}"],
      ["keys", rng_state.DEFAULT_IMPL],
      ["words of a draw", str(rng_stream.WORDS)],
      ["seed of the report", str(seed)],
      ["read", read],
      ["processor time", f"{seconds / 60:.0f} minutes"],
    ],
  )


def render(
  found: dict[str, list[Runs]], seed: int, version: str, seconds: float
) -> str:
  """Return the text between the markers of the page.

  Args:
    found: mode -> tests -> runs.
    seed: seed of the report.
    version: version of dieharder.
    seconds: processor time of all runs.
  """
  parts = [_facts(found, seed, version, seconds)]
  parts += ["### Every result", _results(found)]
  parts += ["### Repeated tests", _repeats(found)]
  parts += ["### Summary", _summary(found), _verdict(found)]
  return "\n\n".join(parts)


def _arguments(argv) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("page", type=pathlib.Path, help="docs/dieharder.md")
  parser.add_argument("--seed", type=int, default=0, help="at least 0, below 2**26")
  options = parser.parse_args(argv)
  if not 0 <= options.seed < STRIDE:
    parser.error(f"Expected a seed in [0, {STRIDE}), but got {options.seed}.")
  return options


def main(argv=None) -> int:
  """Run all tests and write the page; see the module's docstring.

  Returns:
    The exit status: 1 if there are failures.

  Raises:
    SystemExit: dieharder is not installed, or arguments are wrong.
    ValueError: the page has no markers.
  """
  options = _arguments(argv)
  try:
    version = dieharder.version()
  except FileNotFoundError as error:
    raise SystemExit(str(error)) from None
  # Fail before the runs, not after them, if the page has no markers.
  tables.read_table(options.page.read_text(encoding="utf-8"), "dieharder_report")
  found = {}
  for mode in rng_stream.MODES:
    found[mode] = [
      repeat(functools.partial(_run, mode, index, options.seed))
      for index in range(len(TESTS))
    ]
  text = render(found, options.seed, version, sum(os.times()[:4]))
  # The page may have been edited while the tests ran.
  page = options.page.read_text(encoding="utf-8")
  page = tables.insert(page, "dieharder_report", text)
  options.page.write_text(page, encoding="utf-8")
  print(_summary(found), _verdict(found), f"written to {options.page}", sep="\n\n")
  return 1 if failures(found) else 0


if __name__ == "__main__":
  sys.exit(main())
