"""Write the table of libraries for the docs from the report of `make test-ecosystem`.

usage: python -m tools.library_table REPORT.xml docs/training-scripts.md

The text between the two markers of the page is replaced. The name of a test is the law
that holds. Its properties name its library (test/suites/ecosystem/conftest.py).
"""

import dataclasses
import pathlib
import sys
import xml.etree.ElementTree as ElementTree

from tools import tables

# Words of test names, which are in lower case, and their spelling in the table.
SPELLINGS = {"bf16": "bf16", "cpu": "CPU", "float16": "float16", "jax": "jax"}


@dataclasses.dataclass
class Library:
  """Results of the tests of a library.

  Attributes:
    version: version that was tested.
    lines: lines of a program that change.
    laws: law -> True if all rows of its test pass.
    reasons: reasons of expected failures.
  """

  version: str
  lines: str
  laws: dict[str, bool] = dataclasses.field(default_factory=dict)
  reasons: list[str] = dataclasses.field(default_factory=list)

  def add(self, law: str, case: ElementTree.Element) -> None:
    """Add the verdict on one row of a test."""
    skipped = case.find("skipped")
    if skipped is not None and skipped.get("type") == "pytest.xfail":
      reason = f"{law}: {skipped.get('message')}"
      self.reasons += [reason] if reason not in self.reasons else []
    elif skipped is None:
      outcomes = {child.tag for child in case} - {"properties", "system-out"}
      self.laws[law] = self.laws.get(law, True) and not outcomes


def _law(name: str) -> str:
  """Return a test's name as words: `test_it_finds_the_device[jax]` -> it finds …."""
  words = name.partition("[")[0].removeprefix("test_").split("_")
  return " ".join(SPELLINGS.get(word, word) for word in words)


def read(report: pathlib.Path) -> dict[str, Library]:
  """Return the libraries in a JUnit report.

  Raises:
    ValueError: there are none.
  """
  libraries: dict[str, Library] = {}
  for case in ElementTree.parse(report).iter("testcase"):
    said = {p.get("name"): p.get("value") for p in case.iter("property")}
    if "library" in said:
      library = libraries.setdefault(
        said["library"], Library(said["version"], said["lines"])
      )
      library.add(_law(case.get("name", "")), case)
  if not libraries:
    raise ValueError(
      f"No verdicts on libraries in {report}; write them with `make test-ecosystem`."
    )
  return libraries


def render(libraries: dict[str, Library]) -> str:
  """Return the table in Markdown."""
  header, rows = ["library", "what changes", "what is tested"], []
  for name in sorted(libraries, key=str.lower):
    library = libraries[name]
    # The order in which tests end is arbitrary.
    laws = [f"{'✓' if ok else '✗'} {law}" for law, ok in sorted(library.laws.items())]
    laws += [f"✗ {reason}" for reason in library.reasons]
    rows.append([f"{name} {library.version}", library.lines, "<br>".join(laws)])
  return tables.markdown(header, rows)


def main(arguments: list[str]) -> None:
  """Entry point."""
  tables.main("library_table", __doc__, lambda report: render(read(report)), arguments)


if __name__ == "__main__":
  main(sys.argv[1:])
