"""Run the device tests of one of PyTorch's test files, in a process of its own.

usage: python -m tools.torch_tests_worker FOLDER FILE DEVICE RESULTS < REQUEST

The request is JSON: "rows" (the tests to run, or null for all), "done" (tests to leave
out) and "sample" (how many to run, or null). Each line of RESULTS is JSON too: first
the rows to run, then a line when a test starts and one when it has ended, so that a
crash loses no verdict. Torchax is imported for the device "jax" only.
"""

import hashlib
import importlib
import json
import pathlib
import re
import sys
import time
import traceback
import types
import unittest
from typing import Any, TextIO

# Suffixes of class names: the device, and for our first class the key PrivateUse1.
SUFFIXES = {"cpu": ("CPU",), "jax": ("PRIVATEUSE1", "JAX")}
LONGEST_MESSAGE = 300


def row_name(file: str, cls: str, test: str, device: str) -> str | None:
  """Return the name of a test, equal for all devices; None if its class has no device.

  >>> row_name("test_nn.py", "TestNNCPU", "test_pad_cpu_float32", "cpu")
  'test_nn.py::TestNN::test_pad_DEVICE_float32'
  """
  for suffix in SUFFIXES[device]:
    if cls.endswith(suffix):
      before, found, after = test.rpartition(f"_{device}")
      generic = f"{before}_DEVICE{after}" if found else test
      return f"{file}::{cls.removesuffix(suffix)}::{generic}"
  return None


def tests_of(module: types.ModuleType, file: str, device: str) -> dict[str, Any]:
  """Return row -> test case, for the classes of a device."""
  loader = unittest.TestLoader()
  found = {}
  for name, cls in vars(module).items():
    if isinstance(cls, type) and issubclass(cls, unittest.TestCase):
      for test in loader.getTestCaseNames(cls):
        row = row_name(file, name, test, device)
        if row:
          _drop_copied_fixtures(cls)
          found[row] = cls(test)
  return found


def _drop_copied_fixtures(cls: type) -> None:
  """Drop copied fixtures: an old `super(self.__class__, self).setUp()` never ends.

  torch copies fixtures to the class of a device, which is now a subclass of the
  original class.
  """
  for name in {"setUp", "tearDown"} & vars(cls).keys():
    for base in cls.__mro__[1:]:
      if vars(base).get(name) is vars(cls)[name]:
        delattr(base, name)


def sample(rows: list[str], count: int) -> set[str]:
  """Return `count` rows, chosen by a hash of their names."""
  return set(sorted(rows, key=lambda r: hashlib.sha256(r.encode()).digest())[:count])


def describe(error: BaseException) -> tuple[str, list[str]]:
  """Return the first line of an error and its last frames outside of test helpers."""
  while error.__cause__ is not None and str(error).startswith("Caused by"):
    error = error.__cause__
  lines = str(error).strip().splitlines()
  message = f"{type(error).__name__}: {lines[0] if lines else ''}"[:LONGEST_MESSAGE]
  frames = [
    f"{frame.filename}:{frame.lineno}"
    for frame in traceback.extract_tb(error.__traceback__)
    if "_internal" not in frame.filename and "unittest" not in frame.filename
  ]
  return message, frames[-4:]


class Missing:
  """Stub for a removed helper of torch: false, empty, a decorator without effect."""

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    is_decorator = len(args) == 1 and callable(args[0]) and not kwargs
    return args[0] if is_decorator else self

  def __bool__(self) -> bool:
    return False

  def __iter__(self) -> Any:
    return iter(())

  def __radd__(self, other: list) -> list:
    return other

  __add__ = __radd__


def load(name: str) -> types.ModuleType:
  """Import a test file, with `Missing` for removed helpers of torch."""
  replaced: set[tuple[str, str]] = set()
  while True:
    try:
      return importlib.import_module(name)
    except ImportError as error:
      helper = sys.modules.get(error.name or "")
      found = re.match(r"cannot import name '(\w+)'", str(error))
      if helper is None or found is None or "torch.testing" not in helper.__name__:
        raise
      key = (helper.__name__, found[1])
      if key in replaced:
        raise
      replaced.add(key)
      # torch has split the list `…_and_refs`: use the list without the references.
      rest = getattr(helper, found[1].removesuffix("_and_refs"), None)
      setattr(helper, found[1], Missing() if rest is None else rest)


class Results(unittest.TestResult):
  """Test result that writes a line when a test starts and one when it has ended."""

  def __init__(self, names: dict[str, str], file: TextIO):
    super().__init__()
    self._names = names
    self._file = file
    self._verdict: dict[str, Any] = {}
    self._start = 0.0

  def write(self, **line: Any) -> None:
    """Write one line and flush it, so that it survives a crash."""
    self._file.write(json.dumps(line) + "\n")
    self._file.flush()

  def startTest(self, test: Any) -> None:
    super().startTest(test)
    self._verdict, self._start = {}, time.monotonic()
    self.write(started=self._names[test.id()])

  def stopTest(self, test: Any) -> None:
    super().stopTest(test)
    seconds = round(time.monotonic() - self._start, 3)
    verdict = self._verdict or {"verdict": "passed"}
    self.write(ended=self._names[test.id()], seconds=seconds, **verdict)

  def _failed(self, test: Any, error: Any) -> None:
    message, frames = describe(error[1])
    if test.id() in self._names or hasattr(test, "test_case"):
      self._verdict = {"verdict": "failed", "message": message, "frames": frames}
    else:  # a fixture of the class failed: none of its tests run
      self.write(fixture=message)

  def addError(self, test: Any, err: Any) -> None:
    self._failed(test, err)

  def addFailure(self, test: Any, err: Any) -> None:
    self._failed(test, err)

  def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
    if err is not None:
      self._failed(subtest, err)

  def addSkip(self, test: Any, reason: str) -> None:
    self._verdict = {"verdict": "skipped", "message": reason[:LONGEST_MESSAGE]}

  def addUnexpectedSuccess(self, test: Any) -> None:
    self._verdict = {"verdict": "failed", "message": "unexpected success"}


def main(arguments: list[str]) -> None:
  """Entry point."""
  folder, file, device, results = arguments
  request = json.load(sys.stdin)
  path = pathlib.Path(folder, file)
  sys.path[:0] = [str(path.parent), folder]
  sys.argv[:] = [str(path)]  # torch's test helpers parse it
  if device == "jax":
    importlib.import_module("torchax").enable_globally()
  tests = tests_of(load(path.stem), file, device)
  rows = set(tests if request["rows"] is None else request["rows"])
  if request["sample"] is not None:
    rows &= sample(list(tests), request["sample"])
  chosen = {r: t for r, t in tests.items() if r in rows and r not in request["done"]}
  with open(results, "a", encoding="utf-8") as stream:
    result = Results({test.id(): row for row, test in chosen.items()}, stream)
    result.write(rows=list(chosen))
    unittest.TestSuite(chosen.values()).run(result)
    result.write(complete=True)


if __name__ == "__main__":
  main(sys.argv[1:])
