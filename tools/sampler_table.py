"""Writes the table of samplers for the docs from the report of `make test-samplers`.

usage: python tools/sampler_table.py REPORT.xml docs/samplers.md

The part of the page between the two markers is replaced.
"""

import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree

BEGIN = "<!-- the table is written by tools/sampler_table.py -->"
END = "<!-- end of the table -->"
# What the tests of test/rng/test_sampler_table.py record, and the title for readers.
COLUMNS = {
  "distance": "distance to the law",
  "least": "least",
  "greatest": "greatest",
  "cost": "cost beside `jax.random`",
}
# sampler -> dtype -> property -> value.
Records = dict[str, dict[str, dict[str, str]]]


def read(report: pathlib.Path) -> Records:
  """What was recorded in a JUnit report.

  Raises:
    ValueError: nothing was.
  """
  records: Records = {}
  for case in ElementTree.parse(report).iter("testcase"):
    named = re.fullmatch(r"\w+\[(.+)-(\w+)\]", case.get("name") or "")
    found = {p.get("name"): p.get("value") for p in case.iter("property")}
    if named and found:
      name, dtype = named.groups()
      records.setdefault(_text(name), {}).setdefault(dtype, {}).update(found)
  if not records:
    raise ValueError(f"No samplers in {report}; record them with `make test-samplers`.")
  return records


def _text(name: str) -> str:
  """pytest writes what is not ASCII with escapes."""
  return re.sub(r"\\[xu]([0-9a-f]+)", lambda m: chr(int(m[1], 16)), name)


def render(records: Records) -> str:
  """The table."""
  rows = [["sampler", "dtype", *COLUMNS.values()], ["---"] * (len(COLUMNS) + 2)]
  for name, by_dtype in records.items():
    for dtype, found in by_dtype.items():
      rows.append([name, dtype, *(found.get(column, "–") for column in COLUMNS)])
  return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def insert(page: str, table: str) -> str:
  """The page with the table between its markers.

  Raises:
    ValueError: the page has no markers.
  """
  before, begin, rest = page.partition(BEGIN)
  _, end, after = rest.partition(END)
  if not (begin and end):
    raise ValueError(f"The page needs the lines {BEGIN!r} and {END!r}.")
  return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main(arguments: list[str]) -> None:
  """Entry point."""
  if len(arguments) != 2:
    raise SystemExit(__doc__)
  report, page = map(pathlib.Path, arguments)
  text = insert(page.read_text(encoding="utf-8"), render(read(report)))
  page.write_text(text, encoding="utf-8")
  print(f"written to {page}")


if __name__ == "__main__":
  main(sys.argv[1:])
