"""Write the table of samplers for the docs from the report of `make test-samplers`.

usage: python -m tools.sampler_table REPORT.xml docs/samplers.md

The text between the two markers of the page is replaced.
"""

import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree

from tools import tables

# Property that test/rng/test_sampler_table.py records -> title of its column.
COLUMNS = {
  "distance": "distance to the law",
  "least": "least",
  "greatest": "greatest",
  "cost": "cost beside `jax.random`",
}
# sampler -> dtype -> property -> value.
Records = dict[str, dict[str, dict[str, str]]]


def read(report: pathlib.Path) -> Records:
  """Return the records in a JUnit report.

  Raises:
    ValueError: there are none.
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
  """Decode the escapes that pytest writes for characters outside of ASCII."""
  return re.sub(r"\\[xu]([0-9a-f]+)", lambda m: chr(int(m[1], 16)), name)


def render(records: Records) -> str:
  """Return the table in Markdown."""
  header, rows = ["sampler", "dtype", *COLUMNS.values()], []
  for name, by_dtype in records.items():
    for dtype, found in by_dtype.items():
      rows.append([name, dtype, *(found.get(column, "–") for column in COLUMNS)])
  return tables.markdown(header, rows)


def main(arguments: list[str]) -> None:
  """Entry point."""
  tables.main("sampler_table", __doc__, lambda report: render(read(report)), arguments)


if __name__ == "__main__":
  main(sys.argv[1:])
