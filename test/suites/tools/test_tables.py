"""Tables in pages of the docs that a tool writes."""

import pytest
from source_tree import ROOT

from tools import tables

PAGES = {
  "configuration_table": "reference/configuration.md",
  "dieharder_report": "dieharder.md",
  "layout_table": "rng-evidence.md",
  "library_table": "training-scripts.md",
  "model_table": "models.md",
  "program_table": "training-scripts.md",
  "sampler_table": "samplers.md",
  "torch_tests": "torch-tests.md",
}


def _page(tool: str) -> str:
  return (ROOT / "docs" / PAGES[tool]).read_text(encoding="utf-8")


def test_a_table_has_a_line_a_row():
  table = tables.markdown(["a", "b"], [["1", "2"], ["3", "4"]])
  assert table == "| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |"


@pytest.mark.parametrize("tool", PAGES)
def test_a_table_is_put_where_the_old_one_was(tool):
  page = _page(tool)
  table = tables.read_table(page, tool)
  assert table.startswith("| ")
  assert tables.insert(page, tool, table) == page
  assert tables.read_table(tables.insert(page, tool, "| new |"), tool) == "| new |"


def test_a_page_without_markers_is_refused():
  begin = tables.begin("model_table")
  for page in ("# Models\n", f"# Models\n{begin}\n", f"# Models\n{tables.END}\n"):
    with pytest.raises(ValueError, match="needs the lines"):
      tables.insert(page, "model_table", "| table |")


def test_a_tool_writes_its_table(tmp_path, capsys):
  page = tmp_path / "page.md"
  page.write_text(f"{tables.begin('a')}\n{tables.END}\n")
  tables.main("a", "usage", lambda report: f"| {report.name} |", ["r.xml", str(page)])
  assert "| r.xml |" in page.read_text() and "page.md" in capsys.readouterr().out
  with pytest.raises(SystemExit, match="usage"):
    tables.main("a", "usage", str, ["r.xml"])
