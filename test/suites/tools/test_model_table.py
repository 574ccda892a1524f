"""The page on models has the table of the report, and is up to date."""

import pytest
from models.ways import WAYS
from models.zoo import MODELS, VARIANTS
from source_tree import ROOT

from tools import model_table, tables

RESULTS, GRADIENTS, DRAWS = model_table.CHECKS


def _report(tmp_path, *cases: tuple[str, str]):
  """Return a report of tests, by name and content of their element."""
  inner = "".join(f'<testcase name="{n}">{outcome}</testcase>' for n, outcome in cases)
  path = tmp_path / "report.xml"
  path.write_text(f"<testsuites><testsuite>{inner}</testsuite></testsuites>")
  return path


def _rows(path) -> list[str]:
  return model_table.render(model_table.read(path)).splitlines()[2:]


def test_a_model_that_passes_everything_has_one_mark(tmp_path):
  report = _report(
    tmp_path, *((f"{test}[GPT-2-jit]", "") for test in model_table.CHECKS)
  )
  assert _rows(report) == ["| GPT-2 | ✓ |"]


def test_partial_comparison_names_the_compared_quantities(tmp_path):
  report = _report(
    tmp_path,
    (f"{RESULTS}[U-Net-jit]", "<skipped/>"),
    (f"{GRADIENTS}[U-Net-jit]", ""),
    (f"{DRAWS}[U-Net-jit]", "<failure/>"),
    (f"{GRADIENTS}[U-Net-eager]", "<error/>"),
    (f"{GRADIENTS}[BERT-eager]", ""),
    ("test_another[BERT-jit]", ""),
  )
  assert _rows(report) == [
    "| BERT | gradients | – |",
    "| U-Net | ✗ gradients | gradients, ✗ draws |",
  ]


def test_a_report_without_verdicts_is_refused(tmp_path):
  with pytest.raises(ValueError, match="make test-models"):
    model_table.read(_report(tmp_path, ("test_another[BERT-jit]", "")))


def test_models_page_has_a_row_per_model_and_a_column_per_use():
  page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
  table = tables.read_table(page, "model_table")
  header, _, *rows = table.splitlines()
  titles = [model_table.TITLES.get(way, way) for way in WAYS]
  assert header.strip("| ").split(" | ") == ["model", *titles]
  assert {row.split(" | ")[0].strip("| ") for row in rows} == {*MODELS, *VARIANTS}
