"""Tables of the docs that tools write from reports of test runs.

Each tool converts a report to rows. The page has a marker line before the table and one
after it; the text between them is replaced.
"""

import pathlib
from collections.abc import Callable, Sequence

END = "<!-- end of the table -->"


def begin(tool: str) -> str:
  """Return the marker line before the table that `tools/TOOL.py` writes."""
  return f"<!-- the table is written by tools/{tool}.py -->"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Return a table in Markdown."""
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def read_table(page: str, tool: str) -> str:
  """Return the table of a tool in a page.

  Raises:
    ValueError: the page has no markers.
  """
  _, is_begun, rest = page.partition(begin(tool))
  table, is_ended, _ = rest.partition(END)
  if not (is_begun and is_ended):
    raise ValueError(f"The page needs the lines {begin(tool)!r} and {END!r}.")
  return table.strip()


def read_rows(page: str, tool: str) -> list[list[str]]:
  """Return the cells of a tool's table in a page, without the header.

  Raises:
    ValueError: the page has no markers.
  """
  lines = read_table(page, tool).splitlines()[2:]
  return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def insert(page: str, tool: str, table: str) -> str:
  """Return the page with the table of a tool between its markers replaced.

  Raises:
    ValueError: the page has no markers.
  """
  read_table(page, tool)
  before, marker, rest = page.partition(begin(tool))
  after = rest.partition(END)[2]
  return f"{before}{marker}\n\n{table}\n\n{END}{after}"


def main(
  tool: str, usage: str, table: Callable[[pathlib.Path], str], arguments: list[str]
) -> None:
  """Write the table of a report to a page; entry point of a tool.

  Args:
    tool: name of the tool.
    usage: message for wrong arguments.
    table: report -> table.
    arguments: paths of the report and the page.
  """
  if len(arguments) != 2:
    raise SystemExit(usage)
  report, page = map(pathlib.Path, arguments)
  text = insert(page.read_text(encoding="utf-8"), tool, table(report))
  page.write_text(text, encoding="utf-8")
  print(f"written to {page}")
