"""Run PyTorch's own device tests on the device "jax" and compare with CPU torch.

usage: python -m tools.torch_tests FOLDER [--files FILE ...] [--sample N] [--x64]
       [--jobs N] [--time-limit SECONDS] [--output FILE] [--resume] [--page PAGE.md]

FOLDER holds the tests of a release of PyTorch; nothing is written there. Each file runs
with 64-bit types and without them (`--x64`: only with them). A test that fails is
repeated on CPU torch, in a process without torchax. A test that fails there too is a
difference between releases. Otherwise it is a fault, unless it passes with 64-bit types
or `test/torch_expectations.toml` has a reason. A test is slow if it exceeds the limit
on jax and takes less than a second on CPU torch.

Exit status: 0 without faults, slow tests and stale expectations, 1 with any of them, 2
for a folder or a file that cannot be used.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

from tools import tables
from tools.expectations import (
  FAILED,
  Expectation,
  InputError,
  Outcome,
  read_expectations,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "output" / "torch_tests.jsonl"
EXPECTATIONS = ROOT / "test" / "torch_expectations.toml"
FILES = (
  "distributions/test_distributions.py",
  "functorch/test_eager_transforms.py",
  "functorch/test_vmap.py",
  "nn/test_convolution.py",
  "nn/test_dropout.py",
  "nn/test_embedding.py",
  "nn/test_multihead_attention.py",
  "nn/test_parametrization.py",
  "nn/test_pooling.py",
  "test_autograd.py",
  "test_binary_ufuncs.py",
  "test_dataloader.py",
  "test_dlpack.py",
  "test_foreach.py",
  "test_indexing.py",
  "test_linalg.py",
  "test_modules.py",
  "test_nn.py",
  "test_optim.py",
  "test_reductions.py",
  "test_scatter_gather_ops.py",
  "test_segment_reductions.py",
  "test_serialization.py",
  "test_shape_ops.py",
  "test_sort_and_select.py",
  "test_tensor_creation_ops.py",
  "test_torch.py",
  "test_type_promotion.py",
  "test_unary_ufuncs.py",
  "test_view_ops.py",
)
MODES = ("x64", "32 bits")
NEEDS_X64 = "64 bits"
SECONDS_TO_LOAD = 300.0

# Set for the threads of a run that the user interrupts.
_interrupted = threading.Event()


@dataclasses.dataclass(frozen=True)
class Record:
  """Outcomes of a test in one mode.

  Attributes:
    mode: one of `MODES`.
    here: outcome on jax.
    there: outcome on CPU torch, if it did not pass on jax.
    with_x64: outcome on jax with 64-bit types, if that mode ran too.
  """

  mode: str
  here: Outcome
  there: Outcome | None = None
  with_x64: Outcome | None = None

  @property
  def file(self) -> str:
    """File of the test."""
    return self.here.row.partition("::")[0]


@dataclasses.dataclass(frozen=True)
class Judgement:
  """Judgement of a record.

  Attributes:
    record: record of the test.
    kind: "passed", "skipped", "expected", "other release", "slow" or "fault".
    reason: reason of an expected failure.
  """

  record: Record
  kind: str
  reason: str = ""


@dataclasses.dataclass(frozen=True)
class Request:
  """Tests of a file to run.

  Attributes:
    file: name in the folder of tests.
    device: "jax" or "cpu".
    x64: True if JAX has 64-bit types.
    rows: names of the tests, or None for all.
    sample: number of the file's tests to run, or None for all.
  """

  file: str
  device: str
  x64: bool = False
  rows: tuple[str, ...] | None = None
  sample: int | None = None


class _Process:
  """Worker process and its output."""

  def __init__(
    self, request: Request, folder: pathlib.Path, work: pathlib.Path, done: set[str]
  ):
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = {
      **os.environ,
      "PYTHONPATH": os.pathsep.join(paths),
      "JAX_ENABLE_X64": str(int(request.x64)),
      "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
      "PYTORCH_TESTING_DEVICE_ONLY_FOR": "privateuse1",
      # Classes only for "cpu" and "cuda" run for our device as well.
      "PYTORCH_TESTING_DEVICE_FOR_CUSTOM": "privateuse1,jax",
    }
    if request.device == "cpu":
      environment["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = "cpu"
      del environment["PYTORCH_TESTING_DEVICE_FOR_CUSTOM"]
    self._log = work / "log"
    self._results = work / f"results-{len(done)}"
    self._results.touch()
    self._read = 0
    command = [sys.executable, "-m", "tools.torch_tests_worker", str(folder)]
    with self._log.open("wb") as log:
      self._popen = subprocess.Popen(
        [*command, request.file, request.device, str(self._results)],
        cwd=work,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # without the interrupts of the terminal
      )
    asked = {"rows": request.rows, "done": sorted(done), "sample": request.sample}
    assert self._popen.stdin is not None
    with self._popen.stdin as stream:
      stream.write(json.dumps(asked).encode())

  def has_ended(self) -> bool:
    """Return True if the process has ended; read its last lines after this call."""
    return self._popen.poll() is not None

  def lines(self) -> list[dict]:
    """Return the whole lines written since the last call."""
    with self._results.open("rb") as stream:
      stream.seek(self._read)
      whole = stream.read().rpartition(b"\n")[0]
    self._read += len(whole) + 1 if whole else 0
    return [json.loads(line) for line in whole.splitlines()]

  def last_words(self) -> str:
    """Return the last line of its output, or its exit status."""
    text = self._log.read_text(encoding="utf-8", errors="replace").strip()
    return text.splitlines()[-1] if text else f"exit status {self._popen.returncode}"

  def close(self) -> None:
    """End the process."""
    self._popen.kill()
    self._popen.wait()


def run_file(
  request: Request, folder: pathlib.Path, limit: float, work: pathlib.Path
) -> list[Outcome]:
  """Run tests of one file; start another worker after one that crashes or hangs.

  Args:
    request: tests to run.
    folder: folder of PyTorch's tests.
    limit: seconds for each test.
    work: folder for the results. Those of an interrupted run are not repeated.
  """
  work.mkdir(parents=True, exist_ok=True)
  found = _earlier_outcomes(work)
  while True:
    process = _Process(request, folder, work, set(found))
    try:
      is_complete = _follow(process, request, limit, found)
    finally:
      process.close()
    if is_complete:
      return list(found.values())


def _earlier_outcomes(work: pathlib.Path) -> dict[str, Outcome]:
  found = {}
  for path in work.glob("results-*"):
    whole = path.read_bytes().rpartition(b"\n")[0]
    for line in map(json.loads, whole.splitlines()):
      if "ended" in line:
        found[line["ended"]] = _outcome(line)
  return found


def _outcome(line: dict) -> Outcome:
  message = " @ ".join([line.get("message", ""), *line.get("frames", [])])
  return Outcome(line["ended"], line["verdict"], message, line["seconds"])


def _follow(
  process: _Process, request: Request, limit: float, found: dict[str, Outcome]
) -> bool:
  """Collect outcomes until the process ends; return True if no test is left to run."""
  rows: list[str] | None = None
  current, since, fixture = request.file, time.monotonic(), "it did not run"
  while True:
    if _interrupted.is_set():
      raise InterruptedError(f"the run of {request.file} was interrupted")
    has_ended = process.has_ended()
    for line in process.lines():
      if "rows" in line:
        rows, current = line["rows"], ""
      elif "started" in line:
        current, since = line["started"], time.monotonic()
      elif "ended" in line:
        found[current] = _outcome(line)
        current = ""
      elif "fixture" in line:
        fixture = line["fixture"]
      else:  # complete: rows without an outcome failed with their class
        for row in rows or ():
          found.setdefault(row, Outcome(row, "failed", fixture))
        return True
    allowed = SECONDS_TO_LOAD if rows is None else limit
    is_late = bool(current) and time.monotonic() - since > allowed
    if has_ended or is_late:
      verdict = "took too long" if is_late else "crashed"
      verdict = "did not load" if rows is None else verdict
      row = current or request.file
      said = f"more than {allowed:g} s" if is_late else process.last_words()
      found[row] = Outcome(row, verdict, said, allowed)
      return rows is None or not current
    time.sleep(0.05)


def compare_file(
  file: str,
  folder: pathlib.Path,
  modes: tuple[str, ...],
  sample: int | None,
  limit: float,
  work: pathlib.Path,
) -> list[Record]:
  """Run one file in each mode, and its failures on CPU torch."""
  here = {}
  for mode in modes:
    request = Request(file, "jax", mode == "x64", sample=sample)
    here[mode] = run_file(request, folder, limit, work / f"{mode}, {sample or 'all'}")
  failed = {o.row for ran in here.values() for o in ran if o.verdict in FAILED}
  there: dict[str, Outcome] = {}
  if failed:
    request = Request(file, "cpu", rows=tuple(sorted(failed)))
    there = {
      outcome.row: outcome for outcome in run_file(request, folder, limit, work / "cpu")
    }
    if file in failed and file not in there:  # it did not load here, and does there
      there[file] = Outcome(file, "passed")
  with_x64 = {outcome.row: outcome for outcome in here.get("x64", ())}
  return [
    Record(mode, outcome, there.get(outcome.row), with_x64.get(outcome.row))
    for mode, ran in here.items()
    for outcome in ran
  ]


def judge(record: Record, expectations: list[Expectation]) -> Judgement:
  """Judge a test by CPU torch and the expectations."""
  here, there = record.here, record.there
  if here.verdict not in FAILED:
    return Judgement(record, here.verdict)
  is_late = here.verdict == "took too long"
  if there is None or there.verdict != "passed" or (is_late and there.seconds >= 1):
    return Judgement(record, "other release")
  for expected in expectations:
    if expected.matches(here):
      return Judgement(record, "expected", expected.reason)
  with_x64 = record.with_x64
  if with_x64 is not None and with_x64.verdict == "passed":
    return Judgement(record, "expected", NEEDS_X64)
  for expected in expectations:
    # Without 64-bit types it fails earlier, in another way.
    if with_x64 is not None and expected.matches(with_x64):
      return Judgement(record, "expected", expected.reason)
  return Judgement(record, "slow" if is_late else "fault")


def stale_expectations(
  judgements: list[Judgement], expectations: list[Expectation]
) -> list[Expectation]:
  """Return the expectations that explain no failure."""
  used = [j.record.here for j in judgements if j.kind == "expected"]
  return [e for e in expectations if not any(e.matches(outcome) for outcome in used)]


def render(
  judgements: list[Judgement], samples: dict[str, int | None], page: str = ""
) -> str:
  """Return the table of the page: a row for each file and mode, and for all files.

  Args:
    judgements: those of the files that ran.
    samples: file -> number of tests in its sample, or None for all tests.
    page: page with the table of an earlier run; rows of other files and modes stay.
  """
  header = ["file", "tests", "dtypes", "run", "passed", "expected", "faults", "slow"]
  earlier = tables.read_rows(page, "torch_tests") if page else []
  rows = {(row[0], row[2]): row for row in earlier if row[0] in FILES}
  groups: dict[tuple[str, str], list[Judgement]] = collections.defaultdict(list)
  for judgement in judgements:
    # These tests have no result to compare, and are not counted.
    if judgement.kind not in ("skipped", "other release"):
      record = judgement.record
      groups[record.file, record.mode].append(judgement)
  for (file, mode), group in groups.items():
    kinds = collections.Counter(judgement.kind for judgement in group)
    reasons = collections.Counter(j.reason for j in group if j.kind == "expected")
    sample = samples.get(file)
    size = f"{sample} of the file" if sample else "all"
    counts = [str(kinds[kind]) for kind in ("passed", "fault", "slow")]
    found = [str(len(group)), counts[0], _describe(reasons), *counts[1:]]
    rows[file, mode] = [file, size, mode, *found]
  order = sorted(rows, key=lambda key: (key[0], MODES.index(key[1])))
  modes = [mode for mode in MODES if any(row[2] == mode for row in rows.values())]
  total = [_total([rows[key] for key in order if key[1] == mode]) for mode in modes]
  return tables.markdown(header, [rows[key] for key in order] + total)


def _describe(reasons: collections.Counter[str]) -> str:
  return "<br>".join(f"{count} {reason}" for reason, count in reasons.most_common())


def _total(rows: list[list[str]]) -> list[str]:
  """Return the sum of the rows of a mode."""
  reasons: collections.Counter[str] = collections.Counter()
  for row in rows:
    for cell in filter(None, row[5].split("<br>")):
      count, _, reason = cell.partition(" ")
      reasons[reason] += int(count)
  run, passed, faults, slow = (str(sum(int(r[i]) for r in rows)) for i in (3, 4, 6, 7))
  return ["all", "", rows[0][2], run, passed, _describe(reasons), faults, slow]


def _append(
  report: pathlib.Path, file: str, sample: int | None, records: list[Record]
) -> None:
  found = [dataclasses.asdict(record) for record in records]
  line = {"file": file, "sample": sample, "records": found}
  with report.open("a", encoding="utf-8") as stream:
    stream.write(json.dumps(line) + "\n")


def _read(report: pathlib.Path) -> dict[str, tuple[int | None, list[Record]]]:
  """Return file -> (size of its sample, records) of a report."""
  lines = map(json.loads, report.read_text(encoding="utf-8").splitlines())
  return {
    line["file"]: (line["sample"], list(map(_record, line["records"])))
    for line in lines
  }


def _record(fields: dict) -> Record:
  outcomes = {
    name: fields[name] and Outcome(**fields[name])
    for name in ("here", "there", "with_x64")
  }
  return Record(fields["mode"], **outcomes)


def _parse(arguments: list[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="python -m tools.torch_tests",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("folder", nargs="?", default="")
  parser.add_argument("--files", nargs="+", default=FILES)
  parser.add_argument("--sample", type=int)
  parser.add_argument("--x64", action="store_true")
  parser.add_argument("--jobs", type=int, default=1)
  parser.add_argument("--time-limit", type=float, default=20.0)
  parser.add_argument("--expectations", type=pathlib.Path, default=EXPECTATIONS)
  parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
  parser.add_argument(
    "--resume", action="store_true", help="go on with an interrupted run"
  )
  parser.add_argument("--page", type=pathlib.Path)
  return parser.parse_args(arguments)


def _folder(name: str, files: tuple[str, ...]) -> pathlib.Path:
  folder = pathlib.Path(name).resolve()
  missing = [file for file in files if not (folder / file).is_file()]
  if not name or missing:
    raise InputError(
      f"{name or 'Nothing'} is no folder with the tests of a release of PyTorch: it "
      f"has no {', '.join(missing[:3])}. Name one: make test-torch TORCH_TESTS=path"
    )
  return folder


def main(arguments: list[str]) -> int:
  """Run the tests, print the table and return the exit status."""
  chosen = _parse(arguments)
  files, modes = tuple(chosen.files), MODES[:1] if chosen.x64 else MODES
  try:
    expectations = read_expectations(chosen.expectations)
    folder = _folder(chosen.folder, files)
  except InputError as error:
    print(error, file=sys.stderr)
    return 2
  report = chosen.output
  report.parent.mkdir(parents=True, exist_ok=True)
  found = _read(report) if chosen.resume and report.is_file() else {}
  if not found:
    report.write_text("", encoding="utf-8")
  work = report.with_suffix(".unfinished").resolve()
  if not chosen.resume:
    shutil.rmtree(work, ignore_errors=True)

  def run(file: str) -> list[Judgement]:
    if file not in found:
      sample, kept = chosen.sample, work / file.replace("/", " ")
      records = compare_file(file, folder, modes, sample, chosen.time_limit, kept)
      found[file] = sample, records
      _append(report, file, sample, records)
    judgements = [judge(record, expectations) for record in found[file][1]]
    for judgement in judgements:
      if judgement.kind in ("fault", "slow"):
        mode, here = judgement.record.mode, judgement.record.here
        kind = judgement.kind.upper()
        print(f"{kind} ({mode}) {here.row}: {here.message}", flush=True)
    return judgements

  with concurrent.futures.ThreadPoolExecutor(chosen.jobs) as pool:
    try:
      judgements = [judgement for ran in pool.map(run, files) for judgement in ran]
    except KeyboardInterrupt:
      _interrupted.set()
      raise
  shutil.rmtree(work, ignore_errors=True)
  samples = {file: sample for file, (sample, _) in found.items()}
  print(render(judgements, samples))
  if chosen.page:
    page = chosen.page.read_text(encoding="utf-8")
    text = tables.insert(page, "torch_tests", render(judgements, samples, page))
    chosen.page.write_text(text, encoding="utf-8")
  is_whole = chosen.sample is None and modes == MODES and files == FILES
  stale = stale_expectations(judgements, expectations) if is_whole else []
  for expected in stale:
    print(f"STALE {expected.row} {expected.message}: remove it ({expected.reason})")
  for record in {j.record.file: j.record for j in judgements}.values():
    if record.here.verdict == "did not load":
      print(f"NOT LOADED {record.here.row}: {record.here.message}")
  kinds = collections.Counter(judgement.kind for judgement in judgements)
  print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
  is_wrong = kinds["fault"] or kinds["slow"] or stale or not kinds["passed"]
  return 1 if is_wrong else 0


if __name__ == "__main__":
  signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the workers too
  sys.exit(main(sys.argv[1:]))
