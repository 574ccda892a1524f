"""Type checkers infer the types of programs that call torchax, and report mistakes."""

import pathlib
import re
import subprocess
import sys

import pytest
from house.pages import PROGRAMS
from source_tree import ROOT

pytestmark = pytest.mark.programs

USERS = ROOT / "test" / "suites" / "house" / "typing"
MISTAKES = USERS / "user_mistakes.py"
# Their programs are checked: a user copies them. transformers' own annotations refuse
# `model.to("jax")`.
PAGES = {page.stem: text for page, text in PROGRAMS.items() if page.stem != "models"}
# The page of errors has operations that raise. A checker reports two of them.
REPORTED = {"errors": {"arg-type", "operator"}}
# Libraries without annotations, and those that are not installed, have no types.
FLAGS = ("--no-error-summary", "--ignore-missing-imports")
_REPORT = re.compile(r"^(?P<file>.+?):(?P<line>\d+): error: .*\[(?P<code>[\w-]+)\]$")


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, set[tuple[int, str]]]:
  """Return (line, code) of the checker's errors, by file. One run reads torch once."""
  folder = tmp_path_factory.mktemp("pages")
  for name, text in PAGES.items():
    (folder / f"page_{name}.py").write_text(text)
  programs = [*USERS.glob("*.py"), *folder.glob("*.py")]
  done = subprocess.run(
    [sys.executable, "-m", "mypy", *FLAGS, *programs],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode in (0, 1), done.stdout + done.stderr
  found: dict[str, set[tuple[int, str]]] = {}
  for line in done.stdout.splitlines():
    report = _REPORT.match(line)
    assert report or ": note: " in line, done.stdout
    if report:
      name = pathlib.Path(report["file"]).name
      found.setdefault(name, set()).add((int(report["line"]), report["code"]))
  return found


def test_a_correct_program_has_the_types_that_it_says(reports):
  assert not reports.get("user_program.py")


@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page_pass_a_type_checker(page, reports):
  found = reports.get(f"page_{page}.py", set())
  assert {code for _, code in found} == REPORTED.get(page, set()), found


def test_every_mistake_is_reported_where_it_is(reports):
  lines = MISTAKES.read_text(encoding="utf-8").splitlines()
  marked = {
    (number, line.rpartition("# error: ")[2])
    for number, line in enumerate(lines, 1)
    if "# error: " in line
  }
  assert marked and reports["user_mistakes.py"] == marked


def test_the_correct_program_runs():
  command = [sys.executable, USERS / "user_program.py"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
