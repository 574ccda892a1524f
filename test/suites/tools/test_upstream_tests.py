"""`tools/upstream_tests.py`, on small checkouts that are made here."""

import pathlib
import subprocess
import sys

import pytest
import yaml
from source_tree import ROOT

from tools import expectations, upstream_tests

PASSES = """
import unittest

import torch
import torchax
from {beside} import helper


class TestOps(unittest.TestCase):
  def test_add(self):
    self.assertEqual(helper.two(), 2)
    self.assertIn({root!r}, torchax.__file__)
    self.assertFalse(hasattr(torchax, "IS_UPSTREAM"))

  @unittest.skip("not today")
  def test_skipped(self):
    pass
"""
FAILS = """
import pytest


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_kind(kind):
  assert kind == "dense", "it holds no such tensors"


def test_other():
  pass
"""
BASE = {
  "torchax/ops/jaten.py": "",
  "torchax/__init__.py": "IS_UPSTREAM = True\n",
  "test/helper.py": "def two():\n  return 2\n",
  "test/test_ops.py": PASSES.format(beside="test", root=str(ROOT)),
}
# Faster, for tests that do not depend on whose torchax is imported.
QUICK = {**BASE, "test/test_ops.py": "def test_add():\n  pass\n"}
NO_ROWS = ""
SPARSE = """
[[expected]]
row = "test_kinds.py::test_kind[sparse]"
reason = "jax tensors are dense"
"""


def checkout(place: pathlib.Path, files: dict, folder: str = "") -> pathlib.Path:
  for path, text in files.items():
    file = place / folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
  return place


def run(place, rows: str, *arguments) -> int:
  path = place.parent / "rows.toml"
  path.write_text(rows)
  given = [str(place), "--expectations", str(path), *arguments]
  return upstream_tests.main(given)


LAYOUTS = {
  "the package at the root": ("", {}),
  "in a folder of a larger repository": ("torchax", {}),
  "tests that are a package": ("", {"test/__init__.py": ""}),
  "helpers beside the tests": (
    "",
    {
      "test/test_ops.py": PASSES.replace("from {beside} import", "import").format(
        root=str(ROOT)
      )
    },
  ),
  "relative helpers": (
    "",
    {
      "test/__init__.py": "",
      "test/test_ops.py": PASSES.format(beside=".", root=str(ROOT)),
    },
  ),
}


@pytest.mark.programs
@pytest.mark.parametrize("name", LAYOUTS)
def test_tests_of_upstream_run_against_this_project(tmp_path, capsys, name):
  folder, more = LAYOUTS[name]
  place = checkout(tmp_path / "upstream", {**BASE, **more}, folder)
  before = sorted(place.rglob("*"))
  assert run(place, NO_ROWS) == 0, capsys.readouterr()
  said = capsys.readouterr().out
  assert "test_ops.py: 1 passed, 1 skipped" in said
  assert "1 passed, 0 failed, of which 0 as expected; 0 expectations are stale" in said
  assert sorted(place.rglob("*")) == before


@pytest.mark.programs
@pytest.mark.parametrize(
  "rows, status, said",
  [
    (SPARSE, 0, "3 passed, 1 failed, of which 1 as expected"),
    (SPARSE.replace("test_kind[sparse]", "*sparse*"), 0, "1 as expected"),
    (NO_ROWS, 1, "UNEXPECTED test_kinds.py::test_kind[sparse] failed: AssertionError"),
    (SPARSE.replace("[sparse]", "[dense]"), 1, "STALE test_kinds.py::test_kind[dense]"),
  ],
)
def test_failures_equal_the_expected_ones(tmp_path, capsys, rows, status, said):
  files = {**QUICK, "test/test_kinds.py": FAILS}
  place = checkout(tmp_path / "upstream", files)
  assert run(place, rows) == status
  assert said in capsys.readouterr().out


WRONG = {
  "a file that does not load": (
    "import nothing_of_this_name\n",
    "UNEXPECTED test_wrong.py did not load: E   ModuleNotFoundError",
  ),
  "a file that ends the process": (
    "import os\nos._exit(3)\n",
    "UNEXPECTED test_wrong.py did not load: exit status 3",
  ),
  "a file that hangs": (
    "import time\n\n\ndef test_it():\n  time.sleep(600)\n",
    "UNEXPECTED test_wrong.py took too long: more than 20 s",
  ),
}


@pytest.mark.programs
@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_does_not_run_fails_alone(tmp_path, capsys, name):
  text, said = WRONG[name]
  place = checkout(tmp_path / "upstream", {**QUICK, "test/test_wrong.py": text})
  assert run(place, NO_ROWS, "--time-limit", "20", "--jobs", "2") == 1
  printed = capsys.readouterr().out
  assert said in printed and "test_ops.py: 1 passed" in printed
  row = '[[expected]]\nrow = "test_wrong.py"\nreason = "none"\n'
  outcome = expectations.Outcome("test_wrong.py", "did not load")
  (tmp_path / "rows.toml").write_text(row)
  rows = expectations.read_expectations(tmp_path / "rows.toml")
  assert expectations.judge([outcome], rows) == ([], [])


NO_CHECKOUTS = {
  "nothing": {},
  "no package": {"test/test_ops.py": ""},
  "no tests": {"torchax/ops/jaten.py": ""},
  "this project's layout": {"torchax/ops/jaten/__init__.py": "", "test/test_a.py": ""},
}


@pytest.mark.parametrize("name", NO_CHECKOUTS)
def test_folder_that_is_not_an_upstream_checkout_is_rejected(tmp_path, capsys, name):
  (tmp_path / "upstream").mkdir()
  place = checkout(tmp_path / "upstream", NO_CHECKOUTS[name])
  assert run(place, NO_ROWS) == 2
  said = capsys.readouterr().err
  assert "is no checkout of upstream" in said and "UPSTREAM=path" in said


def test_no_checkout_at_all_is_refused(capsys):
  assert upstream_tests.main([""]) == 2
  assert "UPSTREAM=path" in capsys.readouterr().err


@pytest.mark.parametrize(
  "rows, said",
  [
    ('[[expected]]\nrow = "a"\n', "has a row and a reason"),
    (SPARSE + SPARSE, "is listed twice"),
    ("[[expected\n", "is no file of expectations"),
  ],
)
def test_a_wrong_file_of_expectations_is_refused(tmp_path, capsys, rows, said):
  assert run(checkout(tmp_path / "upstream", BASE), rows) == 2
  assert said in capsys.readouterr().err


def test_there_are_few_expectations_and_each_has_a_reason():
  rows = expectations.read_expectations(upstream_tests.EXPECTATIONS)
  assert len(rows) <= 5 and all(len(row.reason) > 20 for row in rows)


def test_ci_runs_upstream_tests_each_night_against_upstream_head():
  text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
  job = yaml.safe_load(text)["jobs"]["upstream"]
  assert "schedule" in job["if"]
  (clone,) = [s["with"] for s in job["steps"] if "repository" in s.get("with", {})]
  assert clone["repository"] == "google/torchax" and "ref" not in clone
  commands = [step.get("run", "") for step in job["steps"]]
  assert f"make test-upstream UPSTREAM={clone['path']}" in commands


def test_make_hands_the_checkout_over():
  command = ["make", "--dry-run", "--assume-old=.venv/.installed", "test-upstream"]
  done = subprocess.run(
    [*command, "UPSTREAM=somewhere", f"PYTHON={sys.executable}"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  assert 'tools.upstream_tests "somewhere"' in done.stdout
