"""Tables of the docs that are written from reports of test runs.

A tool for one of them says how a report becomes rows; the page has a line before and
one after the table, and what is between them is replaced.
"""

import pathlib
from collections.abc import Callable, Sequence

END = "<!-- end of the table -->"


def begin(tool: str) -> str:
  """The line of a page before the table that `tools/TOOL.py` writes."""
  return f"<!-- the table is written by tools/{tool}.py -->"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A table, a line a row."""
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def written(page: str, tool: str) -> str:
  """The table of a tool in a page.

  Raises:
    ValueError: the page has no markers.
  """
  _, is_begun, rest = page.partition(begin(tool))
  table, is_ended, _ = rest.partition(END)
  if not (is_begun and is_ended):
    raise ValueError(f"The page needs the lines {begin(tool)!r} and {END!r}.")
  return table.strip()


def insert(page: str, tool: str, table: str) -> str:
  """The page with another table of a tool between its markers.

  Raises:
    ValueError: the page has no markers.
  """
  written(page, tool)
  before, marker, rest = page.partition(begin(tool))
  after = rest.partition(END)[2]
  return f"{before}{marker}\n\n{table}\n\n{END}{after}"


def main(
  tool: str, usage: str, table: Callable[[pathlib.Path], str], arguments: list[str]
) -> None:
  """Entry point of a tool: REPORT.xml PAGE.md.

  Args:
    tool: its name.
    usage: what is said where the arguments are others.
    table: report -> table.
    arguments: the two paths.
  """
  if len(arguments) != 2:
    raise SystemExit(usage)
  report, page = map(pathlib.Path, arguments)
  text = insert(page.read_text(encoding="utf-8"), tool, table(report))
  page.write_text(text, encoding="utf-8")
  print(f"written to {page}")
