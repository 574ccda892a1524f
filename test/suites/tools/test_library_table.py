"""The page on training scripts has the table of the report, and knows each library."""

import re

import pytest
from source_tree import ROOT

from tools import library_table, tables

PAGE = ROOT / "docs" / "training-scripts.md"


def _case(name: str, outcome: str = "", library: str = "peft") -> str:
  said = {"library": library, "version": "1.0", "lines": "`x`"}
  properties = "".join(f'<property name="{n}" value="{v}"/>' for n, v in said.items())
  return (
    f'<testcase name="{name}"><properties>{properties}</properties>{outcome}</testcase>'
  )


def _report(tmp_path, *cases: str):
  path = tmp_path / "report.xml"
  path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
  return path


def _rows(path) -> list[str]:
  return library_table.render(library_table.read(path)).splitlines()[2:]


def test_a_law_holds_where_all_of_its_rows_do(tmp_path):
  report = _report(
    tmp_path,
    _case("test_losses_equal_the_cpu[a]"),
    _case("test_losses_equal_the_cpu[b]"),
    _case("test_it_is_saved[a]"),
    _case("test_it_is_saved[b]", "<failure/>"),
  )
  assert _rows(report) == [
    "| peft 1.0 | `x` | ✗ it is saved<br>✓ losses equal the CPU |"
  ]


def test_expected_failure_is_shown_with_its_reason(tmp_path):
  xfail = '<skipped type="pytest.xfail" message="no such thing"/>'
  report = _report(tmp_path, _case("test_it_is_saved", xfail), _case("test_it_runs"))
  assert _rows(report) == [
    "| peft 1.0 | `x` | ✓ it runs<br>✗ it is saved: no such thing |"
  ]


def test_libraries_are_sorted_by_name(tmp_path):
  cases = (_case("test_it_runs", library=name) for name in ("peft", "Lightning"))
  rows = _rows(_report(tmp_path, *cases))
  assert [row.split()[1] for row in rows] == ["Lightning", "peft"]


def test_a_report_without_verdicts_is_refused(tmp_path):
  with pytest.raises(ValueError, match="make test-ecosystem"):
    library_table.read(_report(tmp_path, '<testcase name="test_it_runs"/>'))


def test_the_page_has_a_row_for_each_library_that_is_tested():
  tested = set()
  for path in ROOT.glob("test/suites/ecosystem/test_*.py"):
    found = re.search(r'^LIBRARY, DISTRIBUTION = "(.+?)", ', path.read_text(), re.M)
    tested |= {found[1]} if found else set()
  table = tables.read_table(PAGE.read_text(encoding="utf-8"), "library_table")
  rows = table.splitlines()[2:]
  assert {row.strip("| ").split(" | ")[0].rpartition(" ")[0] for row in rows} == tested
