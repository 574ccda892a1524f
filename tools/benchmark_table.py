"""Write the table of benchmarks for the docs from the report of `make bench`.

usage: python -m tools.benchmark_table REPORT.json docs/performance.md

The text between the two markers of the page is replaced.
"""

import collections
import json
import pathlib
import sys

from tools import tables

# Group -> title of its only row; the rows of other groups are listed.
SUMMARIES = {"operators": "operators on larger tensors"}
HEADER = ("case", "compared with", "torchax", "ratio", "goal")


def table(report: pathlib.Path) -> str:
  """Return the rows of a report in Markdown, below a line about the machine.

  Raises:
    ValueError: the report has no rows.
  """
  found = json.loads(report.read_text(encoding="utf-8"))
  if not found["rows"]:
    raise ValueError(f"No rows in {report}; write them with `make bench`.")
  groups = collections.defaultdict(list)
  for row in found["rows"]:
    groups[row["group"]].append(row)
  lines = []
  for group, rows in groups.items():
    lines += [_summary(group, rows)] if group in SUMMARIES else map(_line, rows)
  goals = [row for row in found["rows"] if row["goal"] is not None]
  reached = len(goals) - sum(map(_is_missed, goals))
  machine = "{date}, {machine}, torch {torch}, JAX {jax}, Python {python}".format(
    **found["environment"]
  )
  said = f"Measured on {machine}: {reached} of {len(goals)} goals are reached."
  return f"{said}\n\n{tables.markdown(HEADER, lines)}"


def _line(row: dict) -> list[str]:
  goal = "" if row["goal"] is None else f"≤ {row['goal']:.3g}"
  goal += ", **missed**" if _is_missed(row) else ""
  value = _value(row["ours_us"], row["unit"])
  return [row["name"], row["baseline"], value, f"{row['ratio']:.2f}", goal]


def _summary(group: str, rows: list[dict]) -> list[str]:
  worst = max(rows, key=lambda row: row["ratio"])
  reached = len(rows) - sum(map(_is_missed, rows))
  ratio = f"at most {worst['ratio']:.2f} ({worst['name']})"
  title = f"{len(rows)} {SUMMARIES[group]}"
  return [title, rows[0]["baseline"], "", ratio, f"reached by {reached}"]


def _is_missed(row: dict) -> bool:
  return row["goal"] is not None and row["ratio"] > row["goal"]


def _value(value: float, unit: str) -> str:
  """Return a value with its unit; long times are in seconds or milliseconds."""
  for longer, size in (("s", 1e6), ("ms", 1e3)):
    if unit == "µs" and value >= size:
      return f"{value / size:.3g} {longer}"
  return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


if __name__ == "__main__":
  tables.main("benchmark_table", __doc__, table, sys.argv[1:])
