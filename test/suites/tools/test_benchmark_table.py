"""The page on performance has the table of a report of benchmarks."""

import json

import pytest
from source_tree import ROOT

from tools import benchmark_table, tables

ENVIRONMENT = {
  "date": "2026-01-02",
  "machine": "x86, 2 cores",
  "torch": "2.13",
  "jax": "0.10",
  "python": "3.11",
}


def _row(name: str, ratio: float, goal: float | None, group="eager", unit="µs") -> dict:
  names = ("name", "baseline", "ours_us", "ratio", "goal", "group", "unit")
  return dict(zip(names, (name, "jax.jit", 1000 * ratio, ratio, goal, group, unit)))


def _table(tmp_path, *rows: dict) -> str:
  report = tmp_path / "report.json"
  report.write_text(json.dumps({"environment": ENVIRONMENT, "rows": rows}))
  return benchmark_table.table(report)


def test_rows_name_missed_goals(tmp_path):
  said, _, *rows = _table(
    tmp_path,
    _row("add", 0.5, 1),
    _row("sub", 1500.0, 2),
    _row("mul", 3.0, None),
    _row("sent", 2.5, 2.501, unit="bytes"),
  ).splitlines()
  assert said.startswith("Measured on 2026-01-02, x86, 2 cores, torch 2.13")
  assert said.endswith("2 of 3 goals are reached.")
  assert rows[2:] == [
    "| add | jax.jit | 500 µs | 0.50 | ≤ 1 |",
    "| sub | jax.jit | 1.5 s | 1500.00 | ≤ 2, **missed** |",
    "| mul | jax.jit | 3 ms | 3.00 |  |",
    "| sent | jax.jit | 2,500 bytes | 2.50 | ≤ 2.5 |",
  ]


def test_operators_have_one_row(tmp_path):
  rows = _row("sin", 1.5, 2, "operators"), _row("cos", 2.5, 2, "operators")
  expected = (
    "| 2 operators on larger tensors | jax.jit |  | at most 2.50 (cos) | reached by 1 |"
  )
  assert _table(tmp_path, *rows).splitlines()[-1] == expected


def test_an_empty_report_is_refused(tmp_path):
  with pytest.raises(ValueError, match="No rows in .*make bench"):
    _table(tmp_path)


def test_the_page_has_the_table():
  page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
  assert "operators on larger tensors" in tables.read_table(page, "benchmark_table")
