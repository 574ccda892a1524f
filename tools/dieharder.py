"""One test of dieharder on a stream of words, and what it says of them.

dieharder is a program of its own. It reads words from a pipe, computes `psamples`
p-values of `tsamples` samples each, and says with a Kolmogorov-Smirnov test how uniform
they are. `read` keeps all of these p-values, since that last step of dieharder is only
approximately right (see `Row.exact`).
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
# Fields of a line: name, ntuple, tsamples, psamples, p-value, assessment; no blanks;
# after each line the p-values that it is computed of.
_FIELDS = 8 + 16 + 32 + 64 + 128 + 256 + 32768 + 65536
# "nan" is no number here: dieharder would let it pass.
_NUMBER = r"[01]\.\d+"
_ROW = re.compile(rf"(\w+),(\d+),(\d+),(\d+),({_NUMBER}),({PASSED}|{WEAK}|{FAILED})")
_VALUE = re.compile(rf",({_NUMBER}),")


@dataclasses.dataclass(frozen=True)
class Test:
  """A test and its size.

  Attributes:
    number: its number in `dieharder -l`.
    name: its name in the results.
    tsamples: the samples of a p-value.
    psamples: the p-values of a result.
    ntuple: what `-n` says, where the test takes it.
    results: how many results it has.
  """

  # pytest is not to look for tests in it.
  __test__ = False

  number: int
  name: str
  tsamples: int
  psamples: int
  ntuple: int | None = None
  results: int = 1

  @property
  def arguments(self) -> tuple[str, ...]:
    """The arguments of dieharder, except those for its input and output."""
    ntuple = () if self.ntuple is None else ("-n", str(self.ntuple))
    sizes = ("-t", str(self.tsamples), "-p", str(self.psamples))
    return ("-d", str(self.number), *ntuple, *sizes)

  def grown(self, factor: int) -> "Test":
    """The test with more p-values, or a larger sample where it has only one of them."""
    what = "psamples" if self.psamples > 1 else "tsamples"
    return dataclasses.replace(self, **{what: factor * getattr(self, what)})


@dataclasses.dataclass(frozen=True)
class Row:
  """One result.

  Attributes:
    name: the test.
    ntuple: which of its variants.
    p: dieharder's p-value.
    assessment: dieharder's, "PASSED", "WEAK" or "FAILED".
    values: the p-values of the samples, which `p` is computed of.
  """

  name: str
  ntuple: int
  p: float
  assessment: str
  values: tuple[float, ...]

  @functools.cached_property
  def exact(self) -> float:
    """The p-value of the exact Kolmogorov-Smirnov test of `values`.

    dieharder measures the distance from the i-th of n values to i / (n + 1), not to
    both ends of the step from (i - 1) / n to i / n, and looks it up in the law of the
    latter. The distance is too small, so that its p-values lean towards 1.
    """
    if len(self.values) == 1:
      return self.values[0]
    return float(stats.kstest(self.values, "uniform").pvalue)


def program() -> str:
  """The path of dieharder.

  Raises:
    FileNotFoundError: it is not installed.
  """
  path = shutil.which("dieharder")
  if path is None:
    raise FileNotFoundError(MISSING)
  return path


def version() -> str:
  """The version of the installed dieharder.

  Raises:
    FileNotFoundError: it is not installed.
    ValueError: it does not say its version.
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
  """The results in what dieharder writes.

  Args:
    text: its output.
    test: what was run.

  Raises:
    ValueError: a line that is unknown, or results that are missing, of another test,
      of another size or cut off.
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
  """Writes blocks until the reader ends or they do; returns the bytes written."""
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
  """Runs a test.

  Args:
    test: which.
    blocks: arrays of uint32, more of them than the test reads.

  Returns:
    The results, and the bytes that were written into the pipe; up to 64 KiB of them
    were not read.

  Raises:
    FileNotFoundError: dieharder is not installed.
    RuntimeError: it has failed or complained.
    ValueError: its output is not understood or cut off.
  """
  command = [program(), "-g", _STDIN, *test.arguments, "-c", ",", "-D", str(_FIELDS)]
  # Files, because a full pipe for the output would stop the reading of the input.
  with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaints:
    with subprocess.Popen(
      command, bufsize=0, stdin=subprocess.PIPE, stdout=output, stderr=complaints
    ) as process:
      written = _feed(process.stdin, blocks)
    text, complaint = _text(output), _text(complaints)
  # At the end of its input it complains, has no results, and says that all is well.
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
