"""`tools/torch_tests.py`, on a folder of tests that is made here."""

import json
import signal
import subprocess
import sys
import time

import pytest
from source_tree import ROOT

from tools import tables, torch_tests, torch_tests_worker
from tools.expectations import Expectation, Outcome, read_expectations

FAKE = """
import os
import sys
import time
import unittest

from torch.testing._internal.common_utils import helper_of_an_old_release

import torch
from torch.testing._internal.common_device_type import (
  dtypes, instantiate_device_type_tests
)
from torch.testing._internal.common_utils import TestCase

IS_X64 = os.environ["JAX_ENABLE_X64"] == "1"


class TestFake(TestCase):
  @helper_of_an_old_release(1)
  @dtypes(torch.float32, torch.int32)
  def test_add(self, device, dtype):
    x = torch.ones(2, device=device, dtype=dtype)
    self.assertEqual(x + x, 2 * x)
    self.assertEqual(x.device.type == "jax", "torchax" in sys.modules)

  def test_crash(self, device):
    if IS_X64 and device != "cpu":
      os._exit(3)

  def test_large_integer(self, device):
    self.assertEqual(torch.tensor(2**40, device=device).item(), 2**40)

  def test_layout(self, device):
    if device != "cpu":
      raise RuntimeError("no such memory format")

  def test_other_release(self, device):
    torch.no_such_function()

  @unittest.skip("not today")
  def test_skipped(self, device):
    pass

  def test_slow(self, device):
    if IS_X64 and device != "cpu":
      time.sleep(600)

  def test_wrong(self, device):
    with self.subTest("first"):
      self.assertEqual(device, "cpu")


class TestOnlyFor(TestCase):
  def test_it(self, device):
    self.assertEqual(device, "jax:0")


class TestFixture(TestCase):
  @classmethod
  def setUpClass(cls):
    if "torchax" in sys.modules:
      raise RuntimeError("no fixture here")

  def test_it(self, device):
    pass


class TestWithoutDevice(TestCase):
  def test_it(self):
    raise AssertionError("it ran")


instantiate_device_type_tests(TestFake, globals())
instantiate_device_type_tests(TestOnlyFor, globals(), only_for=("cpu", "cuda"))
instantiate_device_type_tests(TestFixture, globals())
"""
DOES_NOT_LOAD = "import sys\nassert 'torchax' not in sys.modules, 'not with torchax'\n"
LAYOUTS = Expectation("*", "jax arrays have no strides", "*memory format*")
PASSED = Outcome("a.py::A::test", "passed", seconds=0.1)
FAILED = Outcome("a.py::A::test", "failed", "RuntimeError: no such memory format")
OTHER = Outcome("a.py::A::test", "failed", "AssertionError: int32 != int64")
LATE = Outcome("a.py::A::test", "took too long")


def expectations(folder, *rows: Expectation):
  path = folder / "rows.toml"
  path.write_text(
    "\n".join(
      f"[[expected]]\nrow = {row.row!r}\nmessage = {row.message!r}\n"
      f"reason = {row.reason!r}\n"
      for row in rows
    )
  )
  return path


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "test_fake.py").write_text(FAKE)
  (tmp_path / "test_loads.py").write_text(DOES_NOT_LOAD)
  return tmp_path


@pytest.mark.programs
def test_each_test_is_compared_with_cpu_torch(folder, capsys):
  report, page = folder / "report.json", folder / "page.md"
  other = ["test_nn.py", "40 of the file", "x64", "34", "21", "13 reason", "0", "0"]
  removed = ["test_removed.py", "all", "x64", "1", "1", "", "0", "0"]
  table = tables.markdown(["file"] * 8, [other, removed])
  page.write_text(f"{tables.begin('torch_tests')}\n{table}\n{tables.END}\n")
  arguments = [
    str(folder),
    "--files=test_fake.py",
    "--time-limit=5",
    f"--output={report}",
    f"--page={page}",
  ]
  rows = f"--expectations={expectations(folder, LAYOUTS)}"
  assert torch_tests.main([*arguments, rows]) == 1
  found = {
    (row["here"]["row"].partition("::")[2], row["mode"]): torch_tests._record(row)
    for row in json.loads(report.read_text())["records"]
  }
  for mode in torch_tests.MODES:
    kinds = {
      name: torch_tests.judge(record, [LAYOUTS]).kind
      for (name, m), record in found.items()
      if m == mode
    }
    is_x64 = mode == "x64"
    assert kinds == {
      "TestFake::test_add_DEVICE_float32": "passed",
      "TestFake::test_add_DEVICE_int32": "passed",
      "TestFake::test_crash_DEVICE": "fault" if is_x64 else "passed",
      "TestFake::test_large_integer_DEVICE": "passed" if is_x64 else "expected",
      "TestFake::test_layout_DEVICE": "expected",
      "TestFake::test_other_release_DEVICE": "other release",
      "TestFake::test_skipped_DEVICE": "skipped",
      "TestFake::test_slow_DEVICE": "slow" if is_x64 else "passed",
      "TestFake::test_wrong_DEVICE": "fault",
      "TestFixture::test_it_DEVICE": "fault",
      "TestOnlyFor::test_it_DEVICE": "passed",
    }
  crash = found["TestFake::test_crash_DEVICE", "x64"]
  assert crash.here.verdict == "crashed"
  fixture = found["TestFixture::test_it_DEVICE", "x64"]
  assert "no fixture here" in fixture.here.message
  said = capsys.readouterr().out
  assert "FAULT (x64) test_fake.py::TestFake::test_wrong_DEVICE: AssertionError" in said
  row = "| test_fake.py | all | x64 | 9 | 4 | 1 jax arrays have no strides | 3 | 1 |"
  assert row in said
  assert "| all |  | 32 bits | 9 | 5 |" in page.read_text()
  assert "1 64 bits" in page.read_text()
  # Rows of other files stay, and count in the totals.
  written = tables.read_rows(page.read_text(), "torch_tests")
  assert other in written and removed not in written
  total = "13 reason<br>1 jax arrays have no strides"
  assert written[-2] == ["all", "", "x64", "43", "25", total, "3", "1"]
  # A report is judged again without running the tests.
  rows = f"--expectations={expectations(folder)}"
  assert torch_tests.main([*arguments, rows, "--resume"]) == 1
  assert "FAULT (x64) test_fake.py::TestFake::test_layout" in capsys.readouterr().out


@pytest.mark.programs
def test_a_run_that_is_ended_keeps_its_results(folder):
  report = folder / "report.json"
  command = [sys.executable, "-m", "tools.torch_tests", str(folder), "--x64"]
  process = subprocess.Popen(
    [*command, "--files=test_fake.py", f"--output={report}"],
    cwd=ROOT,
    stderr=subprocess.DEVNULL,
  )
  try:
    while '"started": "test_fake.py::TestFake::test_slow' not in "".join(
      path.read_text() for path in folder.glob("report.unfinished/*/*/results-*")
    ):
      assert process.poll() is None
      time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60)
  finally:
    process.kill()
  assert not report.read_text()
  work = folder / "report.unfinished" / "test_fake.py" / "x64, all"
  assert "test_fake.py::TestFake::test_add_DEVICE_int32" in (
    torch_tests._earlier_outcomes(work)
  )


@pytest.mark.programs
def test_an_interrupted_run_goes_on(folder, capsys):
  results = folder / "report.unfinished" / "test_loads.py" / "x64, all" / "results-0"
  results.parent.mkdir(parents=True)
  row = "test_loads.py::TestFake::test_it_DEVICE"
  line = {"ended": row, "seconds": 1.0, "verdict": "passed"}
  results.write_text(json.dumps(line) + '\n{"started": ')
  arguments = [str(folder), "--files=test_loads.py", "--x64", "--resume"]
  assert torch_tests.main([*arguments, f"--output={folder / 'report.json'}"]) == 1
  assert "1 passed, 1 fault" in capsys.readouterr().out
  assert not results.exists()


@pytest.mark.programs
def test_a_file_that_does_not_load_here_is_a_fault(folder, capsys):
  arguments = [str(folder), "--files=test_loads.py", "--x64"]
  assert torch_tests.main([*arguments, f"--output={folder / 'report.json'}"]) == 1
  assert "FAULT (x64) test_loads.py: AssertionError" in capsys.readouterr().out


@pytest.mark.parametrize(
  "here, there, with_x64, rows, kind",
  [
    (PASSED, None, PASSED, [LAYOUTS], "passed"),
    (FAILED, PASSED, None, [], "fault"),
    (FAILED, PASSED, FAILED, [], "fault"),
    (FAILED, PASSED, FAILED, [LAYOUTS], "expected"),
    (FAILED, PASSED, PASSED, [], "expected"),
    (OTHER, PASSED, None, [LAYOUTS], "fault"),
    (OTHER, PASSED, FAILED, [LAYOUTS], "expected"),
    (FAILED, FAILED, FAILED, [LAYOUTS], "other release"),
    (FAILED, None, FAILED, [LAYOUTS], "other release"),
    (LATE, PASSED, LATE, [LAYOUTS], "slow"),
    (LATE, Outcome(LATE.row, "passed", seconds=2), LATE, [], "other release"),
  ],
)
def test_failures_are_classified(here, there, with_x64, rows, kind):
  record = torch_tests.Record("32 bits", here, there, with_x64)
  assert torch_tests.judge(record, rows).kind == kind


def test_an_expectation_without_a_failure_is_stale():
  other = Expectation("b.py*", "not there")
  record = torch_tests.Record("x64", FAILED, PASSED)
  judgement = torch_tests.judge(record, [LAYOUTS, other])
  assert torch_tests.stale_expectations([judgement], [LAYOUTS, other]) == [other]


@pytest.mark.parametrize(
  "names, row",
  [
    (("TestNNCPU", "test_pad_cpu_float32", "cpu"), "TestNN::test_pad_DEVICE_float32"),
    (("TestNNJAX", "test_to_cpu_jax", "jax"), "TestNN::test_to_cpu_DEVICE"),
    (("TestNNPRIVATEUSE1", "test_pad_jax", "jax"), "TestNN::test_pad_DEVICE"),
  ],
)
def test_rows_have_one_name_on_all_devices(names, row):
  assert torch_tests_worker.row_name("test_nn.py", *names) == f"test_nn.py::{row}"


def test_classes_of_other_devices_have_no_rows():
  for cls, device in (("TestNN", "cpu"), ("TestNNCPU", "jax"), ("TestNNMETA", "cpu")):
    assert torch_tests_worker.row_name("a.py", cls, "test_it", device) is None


def test_a_sample_is_the_same_in_any_order():
  rows = [f"a.py::A::test_{i}" for i in range(100)]
  chosen = torch_tests_worker.sample(rows, 10)
  assert len(chosen) == 10
  assert torch_tests_worker.sample(rows[::-1], 10) == chosen


@pytest.mark.parametrize("arguments", [[], ["nowhere"]])
def test_a_folder_without_the_tests_is_refused(arguments, capsys):
  assert torch_tests.main(arguments) == 2
  assert "TORCH_TESTS=path" in capsys.readouterr().err


def test_each_expectation_has_a_reason_for_users():
  rows = read_expectations(torch_tests.EXPECTATIONS)
  assert all(len(row.reason) > 20 for row in rows)


def test_make_passes_the_folder_on():
  command = ["make", "--dry-run", "--assume-old=.venv/.installed", "test-torch"]
  done = subprocess.run(
    [*command, "TORCH_TESTS=somewhere", f"PYTHON={sys.executable}"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  assert 'tools.torch_tests "somewhere"' in done.stdout
  assert "--page docs/torch-tests.md" in done.stdout
