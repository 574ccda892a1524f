"""Run a tutorial, write its outputs into the page, and write the page as a notebook.

A tutorial is a page `docs/tutorials/NAME.md`. Its Python blocks run in order, as the
cells of a notebook do. A text block right below a Python block is the output of the
cell: printed text, then the repr of a last expression. `NAME.ipynb` beside the page has
the same text, cells and outputs.

usage: python -m tools.notebooks [--check] PAGE

`--check` writes nothing, and prints the differences between the files and a run. Exit
status: 1 if there are differences.
"""

import ast
import contextlib
import difflib
import io
import json
import linecache
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator

# A Python block, and the text block of its output.
CELL = re.compile(
  r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?",
  re.DOTALL | re.MULTILINE,
)


def main() -> int:
  """Update the files of the tutorial, or check them; return the exit status."""
  checks = "--check" in sys.argv[1:]
  (name,) = [name for name in sys.argv[1:] if name != "--check"]
  path = pathlib.Path(name).resolve()
  page = executed(path.read_text(encoding="utf-8"))
  expected = {path: page, path.with_suffix(".ipynb"): notebook(page)}
  if not checks:
    for file, text in expected.items():
      file.write_text(text, encoding="utf-8")
    return 0
  differences = [line for file in expected for line in _compare(file, expected[file])]
  sys.stdout.writelines(differences)
  return 1 if differences else 0


def _compare(file: pathlib.Path, text: str) -> Iterator[str]:
  found = file.read_text(encoding="utf-8") if file.exists() else ""
  lines = found.splitlines(keepends=True), text.splitlines(keepends=True)
  yield from difflib.unified_diff(*lines, file.name, f"{file.name}, by a run")


def executed(page: str) -> str:
  """Run the cells of a page in one namespace; return the page with their outputs."""
  namespace = {"__name__": "__main__"}
  cells = enumerate(CELL.finditer(page), start=1)
  with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
    outputs = [_run(cell["code"], f"cell {n}", namespace) for n, cell in cells]
  rest = iter(outputs)
  return CELL.sub(lambda cell: _block(cell["code"], next(rest)), page)


def _run(code: str, name: str, namespace: dict) -> str:
  """Run a cell, whose lines have a name in tracebacks; return its output."""
  linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
  statements = ast.parse(code).body
  last = statements.pop() if isinstance(statements[-1], ast.Expr) else None
  with contextlib.redirect_stdout(io.StringIO()) as output:
    exec(compile(ast.Module(statements, []), name, "exec"), namespace)
    if last is not None:
      value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
      if value is not None:
        print(repr(value))
  return output.getvalue()


def _block(code: str, output: str) -> str:
  if output and not output.endswith("\n"):
    output += "\n"
  return f"```python\n{code}```\n" + (f"\n```text\n{output}```\n" if output else "")


def notebook(page: str) -> str:
  """Return a page as a notebook, in the JSON of nbformat 4."""
  cells: list[dict] = []
  end = 0
  for count, cell in enumerate(CELL.finditer(page), start=1):
    _add_text(cells, page[end : cell.start()])
    code = {"cell_type": "code", "execution_count": count, "outputs": []}
    if cell["output"]:
      text = _lines(cell["output"])
      code["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}]
    cells.append(code | _content(cells, cell["code"]))
    end = cell.end()
  _add_text(cells, page[end:])
  kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
  metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
  whole = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
  return json.dumps(whole, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def _add_text(cells: list[dict], text: str) -> None:
  if text.strip():
    cells.append({"cell_type": "markdown"} | _content(cells, text))


def _content(cells: list[dict], text: str) -> dict:
  return {"id": f"cell-{len(cells)}", "metadata": {}, "source": _lines(text.strip())}


def _lines(text: str) -> list[str]:
  return text.splitlines(keepends=True)


if __name__ == "__main__":
  sys.exit(main())
