"""Run the tests of a checkout of upstream against this project.

usage: python -m tools.upstream_tests PATH [--expectations FILE] [--time-limit SECONDS]
       [--jobs N]

Each file runs in a process of its own, on a temporary copy of its folder, in which
`torchax` is this project's. `test/upstream_expectations.toml` lists the rows that fail,
with reasons. Exit status: 0 if exactly these fail, 1 if another row fails or one of
these does not, 2 for a checkout or a file that cannot be used.
"""

import argparse
import collections
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree

from tools.expectations import (
  FAILED,
  InputError,
  Outcome,
  judge,
  read_expectations,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXPECTATIONS = ROOT / "test" / "upstream_expectations.toml"
# Folder of the package: the root of the repository, or a folder of a larger one.
LAYOUTS = (".", "torchax")


def tests_of(checkout: pathlib.Path) -> pathlib.Path:
  """Return the folder of a checkout's tests.

  Raises:
    InputError: it is no checkout of upstream.
  """
  for layout in LAYOUTS:
    base = checkout / layout
    tests = base / "test"
    is_package = (base / "torchax" / "ops" / "jaten.py").is_file()
    if is_package and any(tests.glob("test_*.py")):
      return tests
  raise InputError(
    f"{checkout} is no checkout of upstream: it should have torchax/ops/jaten.py and "
    "test/test_*.py, at its root or in its folder torchax/. Clone upstream's "
    "repository and name it: make test-upstream UPSTREAM=path"
  )


def run_file(copy: pathlib.Path, name: str, limit: float) -> list[Outcome]:
  """Run one file in a process.

  Args:
    copy: folder with a copy of the tests, `test/`.
    name: path of the file below `test/`.
    limit: time limit in seconds.
  """
  report = copy / f"{name.replace('/', '_')}.xml"
  command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
  command += ["-c", os.devnull, "--rootdir", str(copy), f"--junitxml={report}"]
  try:
    done = subprocess.run(
      [*command, f"test/{name}"],
      cwd=copy,
      env=_environment(copy),
      capture_output=True,
      text=True,
      timeout=limit,
      check=False,
    )
  except subprocess.TimeoutExpired:
    return [Outcome(name, "took too long", f"more than {limit:g} s")]
  if done.returncode == 5:
    return []  # no tests in it
  if not report.is_file():
    lines = (done.stdout + done.stderr).strip().splitlines()
    said = lines[-1] if lines else f"exit status {done.returncode}"
    return [Outcome(name, "did not load", said)]
  return read_report(report, name)


def _environment(copy: pathlib.Path) -> dict[str, str]:
  """Return variables that make `torchax` this project's and tests importable."""
  paths = [str(ROOT), str(copy), str(copy / "test")]
  return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def read_report(report: pathlib.Path, name: str) -> list[Outcome]:
  """Return the outcomes in a JUnit report of one file."""
  outcomes = []
  for case in ElementTree.parse(report).iter("testcase"):
    wrong = case.find("failure")
    wrong = case.find("error") if wrong is None else wrong
    message = (wrong.get("message") or "").splitlines() if wrong is not None else []
    if not case.get("classname") or (message and message[0] == "collection failure"):
      text = (wrong.text or "").strip().splitlines() if wrong is not None else []
      outcomes.append(Outcome(name, "did not load", text[-1] if text else ""))
      continue
    module = "test." + name.removesuffix(".py").replace("/", ".")
    inner = case.get("classname", "").removeprefix(module).strip(".").split(".")
    row = "::".join(filter(None, [name, *inner, case.get("name", "")]))
    if wrong is not None:
      outcomes.append(Outcome(row, "failed", message[0] if message else ""))
    else:
      is_skipped = case.find("skipped") is not None
      outcomes.append(Outcome(row, "skipped" if is_skipped else "passed"))
  return outcomes


def _require_ours(copy: pathlib.Path) -> None:
  """Raise `InputError` unless the tests import this project's `torchax`."""
  code = "import importlib.util as u; print(u.find_spec('torchax').origin)"
  done = subprocess.run(
    [sys.executable, "-c", code],
    cwd=copy,
    env=_environment(copy),
    capture_output=True,
    text=True,
    check=False,
  )
  if not done.stdout.startswith(str(ROOT)):
    raise InputError(
      f"The tests would not run against this project, {ROOT}: torchax is "
      f"{done.stdout.strip() or done.stderr.strip().splitlines()[-1:]} there."
    )


def run_all(
  checkout: pathlib.Path, limit: float, jobs: int
) -> dict[str, tuple[list[Outcome], float]]:
  """Run all test files; return file -> outcomes and seconds.

  Raises:
    InputError: it is no checkout of upstream.
  """
  tests = tests_of(checkout)
  with tempfile.TemporaryDirectory() as folder:
    copy = pathlib.Path(folder)
    shutil.copytree(tests, copy / "test", ignore=shutil.ignore_patterns("__pycache__"))
    # Makes `from test import …` find this folder and not Python's own tests.
    (copy / "test" / "__init__.py").touch()
    _require_ours(copy)
    names = [p.relative_to(tests).as_posix() for p in sorted(tests.rglob("test_*.py"))]

    def timed(name: str) -> tuple[list[Outcome], float]:
      start = time.monotonic()
      return run_file(copy, name, limit), time.monotonic() - start

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
      return dict(zip(names, pool.map(timed, names), strict=True))


def main(arguments: list[str]) -> int:
  """Run the tests, print the verdicts and return the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m tools.upstream_tests",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("checkout", nargs="?")
  parser.add_argument("--expectations", type=pathlib.Path, default=EXPECTATIONS)
  parser.add_argument("--time-limit", type=float, default=1200.0)
  parser.add_argument("--jobs", type=int, default=1)
  chosen = parser.parse_args(arguments)
  try:
    if not chosen.checkout:
      raise InputError(
        "Name a checkout of upstream's repository: make test-upstream UPSTREAM=path"
      )
    expectations = read_expectations(chosen.expectations)
    checkout = pathlib.Path(chosen.checkout).resolve()
    found = run_all(checkout, chosen.time_limit, chosen.jobs)
  except InputError as error:
    print(error, file=sys.stderr)
    return 2
  for name, (outcomes, seconds) in found.items():
    counts = collections.Counter(outcome.verdict for outcome in outcomes)
    said = ", ".join(
      f"{number} {verdict}" for verdict, number in sorted(counts.items())
    )
    print(f"{name}: {said or 'no tests'} ({seconds:.0f} s)")
  outcomes = [outcome for file, _ in found.values() for outcome in file]
  unexpected, stale = judge(outcomes, expectations)
  for outcome in unexpected:
    print(f"UNEXPECTED {outcome.row} {outcome.verdict}: {outcome.message}")
  for expected in stale:
    print(f"STALE {expected.row} does not fail any more: remove it ({expected.reason})")
  passed = sum(outcome.verdict == "passed" for outcome in outcomes)
  failed = sum(outcome.verdict in FAILED for outcome in outcomes)
  print(
    f"{passed} passed, {failed} failed, of which {failed - len(unexpected)} as "
    f"expected; {len(stale)} expectations are stale."
  )
  return 1 if unexpected or stale or not passed else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
