"""Pages of the documentation, and the program of each: its Python blocks."""

import pathlib
import re

from source_tree import ROOT

TUTORIALS = sorted(ROOT.glob("docs/tutorials/*.md"))  # tools/notebooks.py runs them
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
FENCE = re.compile(r"^( *)```(\w*)")


def _program(page: pathlib.Path) -> str:
  """Return the Python blocks of a page as one program, with the page's line numbers."""
  language, lines = None, []
  for line in page.read_text(encoding="utf-8").splitlines():
    fence = FENCE.match(line)
    if fence and language is None:
      language = fence[2]
      assert not (language == "python" and fence[1]), f"{page}: indented {line!r}"
      lines.append("")
    elif fence:
      language = None
      lines.append("")
    else:
      lines.append(line if language == "python" else "")
  return "\n".join(lines)


# Line of pages whose programs need libraries that not every environment has.
ELSEWHERE = "<!-- the programs of this page are run by make test-ecosystem -->"
PROGRAMS = {
  page: text
  for page in PAGES
  if ELSEWHERE not in page.read_text(encoding="utf-8")
  and (text := _program(page)).strip()
}
