"""The page on operators has the tables of the report."""

import pytest
from opinfo import expectations
from source_tree import ROOT

from tools import operator_coverage, operator_families

REPORT = """<testsuites><testsuite>
<testcase name="test_agrees_with_cpu_torch[add-float32]"><properties>
<property name="forward" value="right"/><property name="jit" value="right"/>
</properties></testcase>
<testcase name="test_agrees_with_cpu_torch[linalg.svd-float32]"><properties>
<property name="forward" value="right"/>
<property name="jit" value="differs: no number"/>
</properties></testcase>
<testcase name="test_agrees_with_cpu_torch[jiterator-float32]"><properties>
<property name="forward" value="CPU torch refuses: no GPU"/>
</properties></testcase>
<testcase name="test_agrees_with_cpu_torch[add-int64]"><properties>
<property name="forward" value="wrong"/>
</properties></testcase>
<testcase name="test_the_sweep_is_not_empty"/>
</testsuite></testsuites>"""


@pytest.fixture
def page(tmp_path):
  report = tmp_path / "report.xml"
  report.write_text(REPORT)
  return operator_coverage.render(operator_coverage.read(report))


def test_inputs_that_cpu_torch_rejects_are_not_counted(page):
  assert "| results | 2 of 2 | – | – | – | 0 of 1 | – |" in page


def test_a_difference_is_named_with_its_reason(page):
  assert "| `linalg.svd` | under `jax_jit` | no number |" in page


def test_an_operator_is_as_good_as_its_worst_dtype(page):
  assert "| `add` | float32, int64 | ✗ | – | – | ✓ | – | – | – |" in page


def test_each_family_has_a_heading_and_a_link_to_it(page):
  assert "- [Linear algebra](#linear-algebra): 1\n" in page
  heading, table = page.split("\n## Linear algebra\n")[1].split("| `linalg.svd` |")
  assert "\n## " not in heading and "| `add` |" in table.split("\n## ")[1]


def test_each_operator_of_the_page_has_a_family():
  page = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
  assert f"## {operator_families.OTHER}" not in page
  assert operator_families.family_of("new") == operator_families.OTHER


def test_the_last_report_of_an_operator_counts(tmp_path):
  first, later = tmp_path / "first.xml", tmp_path / "later.xml"
  first.write_text(REPORT)
  later.write_text(REPORT.replace('value="wrong"', 'value="right"'))
  verdicts = operator_coverage.read(first, later)
  assert verdicts["add"]["int64"] == {"forward": "right"}


def test_a_row_that_no_verdict_needs_is_named(tmp_path):
  report = tmp_path / "report.xml"
  report.write_text(REPORT)
  row = expectations.DIFFERENCES[0]
  assert row.reason in operator_coverage.unneeded(operator_coverage.read(report))
  report.write_text(REPORT.replace("differs: no number", f"differs: {row.reason}"))
  assert row.reason not in operator_coverage.unneeded(operator_coverage.read(report))


def test_a_report_without_verdicts_is_refused(tmp_path):
  report = tmp_path / "report.xml"
  report.write_text("<testsuites><testsuite/></testsuites>")
  with pytest.raises(ValueError, match="make test-opinfo"):
    operator_coverage.read(report)
