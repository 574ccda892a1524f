"""Write the table of programs for the docs from the report of `make test-ecosystem`.

usage: python -m tools.program_table REPORT.xml docs/training-scripts.md

The rows are the tests of test/suites/ecosystem/test_programs.py. Their properties are
the program, the lines that change and the seconds that it took.
"""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree

from tools import tables

HEADER = (
  *("program", "lines changed", "agrees"),
  *("CPU torch, first run", "later", "jax, first run", "later"),
)
TIMES = ("cpu first", "cpu later", "jax first", "jax later")


def read(report: pathlib.Path) -> list[list[str]]:
  """Return the rows of a JUnit report, sorted.

  Raises:
    ValueError: there are none.
  """
  rows = []
  for case in ElementTree.parse(report).iter("testcase"):
    said = {p.get("name"): p.get("value") for p in case.iter("property")}
    if "program" in said:
      times = [f"{said[name]} s" if name in said else "" for name in TIMES]
      rows.append([said["program"], said["lines"], _verdict(case), *times])
  if not rows:
    raise ValueError(
      f"No verdicts on programs in {report}; write them with `make test-ecosystem`."
    )
  return sorted(rows, key=lambda row: row[0].lower())


def _verdict(case: ElementTree.Element) -> str:
  """Return ✓, or ✗ with the reason of an expected failure."""
  skipped = case.find("skipped")
  if skipped is not None:
    return f"✗ {skipped.get('message')}"
  is_failed = {child.tag for child in case} & {"failure", "error"}
  return "✗" if is_failed else "✓"


def main(arguments: list[str]) -> None:
  """Entry point."""

  def table(report: pathlib.Path) -> str:
    return tables.markdown(HEADER, read(report))

  tables.main("program_table", __doc__, table, arguments)


if __name__ == "__main__":
  main(sys.argv[1:])
