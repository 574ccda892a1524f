"""The table of programs has the rows of the report, one for each program."""

import re

import pytest
from source_tree import ROOT

from tools import program_table, tables

PAGE = ROOT / "docs" / "training-scripts.md"
TIMES = {"cpu first": "1.00", "cpu later": "0.10", "jax first": "5.00"}


def _report(tmp_path, title: str, outcome: str = "", times=TIMES):
  said = {"program": title, "lines": "3", **times}
  properties = "".join(f'<property name="{n}" value="{v}"/>' for n, v in said.items())
  case = f"<testcase><properties>{properties}</properties>{outcome}</testcase>"
  path = tmp_path / "report.xml"
  path.write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
  return path


@pytest.mark.parametrize(
  "outcome, verdict",
  [
    ("", "✓"),
    ("<failure/>", "✗"),
    ('<skipped type="pytest.xfail" message="no such thing"/>', "✗ no such thing"),
  ],
)
def test_row_has_verdict_and_times(outcome, verdict, tmp_path):
  (row,) = program_table.read(_report(tmp_path, "digits", outcome))
  assert row == ["digits", "3", verdict, "1.00 s", "0.10 s", "5.00 s", ""]


def test_report_without_programs_is_refused(tmp_path):
  path = tmp_path / "report.xml"
  path.write_text("<testsuites/>")
  with pytest.raises(ValueError, match="make test-ecosystem"):
    program_table.read(path)


def test_page_has_a_row_for_each_program():
  titles = set()
  for path in ROOT.glob("test/suites/ecosystem/programs/*.py"):
    titles |= set(re.findall(r'^@program\(\s*"(.+?)"', path.read_text(), re.MULTILINE))
  table = tables.read_table(PAGE.read_text(encoding="utf-8"), "program_table")
  assert {row.strip("| ").split(" | ")[0] for row in table.splitlines()[2:]} == titles
