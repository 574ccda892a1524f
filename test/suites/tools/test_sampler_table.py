"""The page on samplers has the table of the report, and a row for each sampler."""

import jax.numpy as jnp
import pytest
from rng.sampler_rows import ROWS
from source_tree import ROOT

from tools import sampler_table, tables


def _report(tmp_path, *cases: tuple[str, dict[str, str]]):
  """Return a report of tests, by name and recorded properties."""
  inner = ""
  for name, found in cases:
    values = "".join(f'<property name="{k}" value="{v}"/>' for k, v in found.items())
    inner += f'<testcase name="{name}"><properties>{values}</properties></testcase>'
  path = tmp_path / "report.xml"
  path.write_text(f"<testsuites><testsuite>{inner}</testsuite></testsuites>")
  return path


def test_records_of_several_tests_are_merged_into_one_row(tmp_path):
  report = _report(
    tmp_path,
    ("test_a[below 3 \\xb7 2-int32]", {"distance": "0.1", "numbers": "7"}),
    ("test_b[below 3 \\xb7 2-int32]", {"cost": "0.5"}),
  )
  rows = sampler_table.render(sampler_table.read(report)).splitlines()[2:]
  assert rows == ["| below 3 · 2 | int32 | 0.1 | – | – | 0.5 |"]


def test_a_report_without_records_is_refused(tmp_path):
  with pytest.raises(ValueError, match="make test-samplers"):
    sampler_table.read(_report(tmp_path, ("test_a[normal-float32]", {})))


def test_the_page_has_a_row_for_each_sampler_and_dtype():
  page = (ROOT / "docs" / "samplers.md").read_text(encoding="utf-8")
  table = tables.read_table(page, "sampler_table")
  _, _, *rows = table.splitlines()
  found = {tuple(row.strip("| ").split(" | ")[:2]) for row in rows}
  expected = {(n, jnp.dtype(d).name) for n, r in ROWS.items() for d in r.dtypes}
  assert found == expected
