"""Runs of one dieharder test on a stream of words, and their results.

dieharder is a separate program. It reads words from a pipe, computes `psamples`
p-values from `tsamples` samples each, and tests their uniformity with a
Kolmogorov-Smirnov test. `read` keeps all p-values, because the last step of dieharder
is only approximate (see `Row.exact`).
"""

import dataclasses
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from typing import BinaryIO

import numpy as np
from scipy import stats

PASSED, WEAK, FAILED = "PASSED", "WEAK", "FAILED"
MISSING = (
  "Expected the program dieharder on the PATH, but it is not there. It is no Python "
  "package; Debian and Ubuntu have it as the package `dieharder`: "
  "install it with `apt-get install dieharder` and start again."
)
# The generator that reads words from stdin.
_STDIN = "200"
# Fields of a line: name, ntuple, tsamples, psamples, p-value, assessment; no blanks.
# The p-values of the samples follow each line.
_FIELDS = 8 + 16 + 32 + 64 + 128 + 256 + 32768 + 65536
# "nan" does not match: dieharder would let it pass.
_NUMBER = r"[01]\.\d+"
_ROW = re.compile(rf"(\w+),(\d+),(\d+),(\d+),({_NUMBER}),({PASSED}|{WEAK}|{FAILED})")
_VALUE = re.compile(rf",({_NUMBER}),")


@dataclasses.dataclass(frozen=True)
class Test:
  """Test of dieharder and its size.

  Attributes:
    number: number of the test in `dieharder -l`.
    name: name of the test in the results.
    tsamples: number of samples for a p-value.
    psamples: number of p-values for a result.
    ntuple: value of the option `-n`, if the test takes it.
    results: number of results.
  """

  # pytest must not collect this class.
  __test__ = False

  number: int
  name: str
  tsamples: int
  psamples: int
  ntuple: int | None = None
  results: int = 1

  @property
  def arguments(self) -> tuple[str, ...]:
    """Arguments of dieharder, except those for its input and output."""
    ntuple = () if self.ntuple is None else ("-n", str(self.ntuple))
    sizes = ("-t", str(self.tsamples), "-p", str(self.psamples))
    return ("-d", str(self.number), *ntuple, *sizes)

  def grown(self, factor: int) -> "Test":
    """Return the test with more p-values, or more samples if it has one p-value."""
    what = "psamples" if self.psamples > 1 else "tsamples"
    return dataclasses.replace(self, **{what: factor * getattr(self, what)})


@dataclasses.dataclass(frozen=True)
class Row:
  """Result of a test.

  Attributes:
    name: name of the test.
    ntuple: variant of the test.
    p: dieharder's p-value.
    assessment: dieharder's assessment, "PASSED", "WEAK" or "FAILED".
    values: p-values of the samples; dieharder computes `p` from them.
  """

  name: str
  ntuple: int
  p: float
  assessment: str
  values: tuple[float, ...]

  @functools.cached_property
  def exact(self) -> float:
    """P-value of the exact Kolmogorov-Smirnov test of `values`.

    The exact statistic compares the i-th of n values with both ends of the step from
    (i - 1) / n to i / n. dieharder compares it with i / (n + 1), but uses the
    distribution of the exact statistic. Its statistic is too small, so its p-values are
    biased towards 1.
    """
    if len(self.values) == 1:
      return self.values[0]
    return float(stats.kstest(self.values, "uniform").pvalue)


def program() -> str:
  """Return the path of dieharder.

  Raises:
    FileNotFoundError: dieharder is not installed.
  """
  path = shutil.which("dieharder")
  if path is None:
    raise FileNotFoundError(MISSING)
  return path


def version() -> str:
  """Return the version of the installed dieharder.

  Raises:
    FileNotFoundError: dieharder is not installed.
    ValueError: dieharder does not print its version.
  """
  done = subprocess.run([program(), "-l"], capture_output=True, text=True, check=False)
  found = re.search(r"dieharder version (\S+)", done.stdout)
  if found is None:
    raise ValueError(
      f"Expected `dieharder -l` to say its version, but got {done.stdout[:200]!r}; "
      "try it by hand."
    )
  return found[1]


def read(text: str, test: Test) -> list[Row]:
  """Return the results in an output of dieharder.

  Args:
    text: the output.
    test: the test that was run.

  Raises:
    ValueError: a line is unknown, or results are missing, incomplete, or belong to
      another test or size.
  """
  rows: list[tuple[re.Match, list[float]]] = []
  for line in text.splitlines():
    if row := _ROW.fullmatch(line):
      rows.append((row, []))
    elif (value := _VALUE.fullmatch(line)) and rows:
      rows[-1][1].append(float(value[1]))
    elif line.strip() and not line.startswith("#"):
      raise ValueError(
        f"Expected a result or a p-value of {test.name}, but dieharder wrote {line!r}; "
        f"is it another version? Try `dieharder {' '.join(test.arguments)}` by hand."
      )
  if len(rows) != test.results:
    raise ValueError(
      f"Expected {test.results} results of {test.name}, but got {len(rows)}: dieharder "
      "ended early, or the list of tests has another number for it."
    )
  return [_checked(row, values, test) for row, values in rows]


def _checked(row: re.Match, values: list[float], test: Test) -> Row:
  name, ntuple, tsamples, psamples, p, assessment = row.groups()
  expected = (test.name, test.tsamples, test.psamples, test.psamples)
  found = (name, int(tsamples), int(psamples), len(values))
  if found != expected:
    raise ValueError(
      "Expected a result with (name, tsamples, psamples, number of p-values) = "
      f"{expected}, but got {found}: dieharder ended early, or does not take this size."
    )
  return Row(name, int(ntuple), float(p), assessment, tuple(values))


def _feed(file: BinaryIO, blocks: Iterable[np.ndarray]) -> int:
  """Write blocks until the reader or the blocks end; return the bytes written."""
  written = 0
  try:
    for block in blocks:
      data = memoryview(block.tobytes())
      while data:
        count = file.write(data)
        written += count
        data = data[count:]
  except BrokenPipeError:  # the test has read enough
    pass
  return written


def run(test: Test, blocks: Iterable[np.ndarray]) -> tuple[list[Row], int]:
  """Run a test.

  Args:
    test: the test.
    blocks: arrays of uint32, more than the test reads.

  Returns:
    The results, and the number of bytes written to the pipe. dieharder may not have
    read the last 64 KiB.

  Raises:
    FileNotFoundError: dieharder is not installed.
    RuntimeError: dieharder has failed or has written to stderr.
    ValueError: the output is unknown or incomplete.
  """
  command = [program(), "-g", _STDIN, *test.arguments, "-c", ",", "-D", str(_FIELDS)]
  # Files, because dieharder would stop reading its input when an output pipe is full.
  with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaints:
    with subprocess.Popen(
      command, bufsize=0, stdin=subprocess.PIPE, stdout=output, stderr=complaints
    ) as process:
      written = _feed(process.stdin, blocks)
    text, complaint = _text(output), _text(complaints)
  # At the end of its input, dieharder complains and exits with status 0, no results.
  if process.returncode or complaint:
    raise RuntimeError(
      f"Expected `{' '.join(command)}` to end well, but it ended with exit status "
      f"{process.returncode} after {written} bytes and wrote {complaint!r}. Where it "
      "says EOF, it needs more words than it was given."
    )
  return read(text, test), written


def _text(file: BinaryIO) -> str:
  file.seek(0)
  return file.read().decode(errors="replace").strip()
