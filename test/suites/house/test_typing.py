"""Type checkers infer the types of programs that call torchax, and report mistakes."""

import pathlib
import re
import subprocess
import sys

import pytest
from source_tree import ROOT

pytestmark = pytest.mark.programs

PROGRAMS = ROOT / "test" / "suites" / "house" / "typing"
MISTAKES = PROGRAMS / "user_mistakes.py"
_REPORT = re.compile(r"^(?P<file>.+?):(?P<line>\d+): error: .*\[(?P<code>[\w-]+)\]$")


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, set[tuple[int, str]]]:
  """Return (line, code) of the checker's errors, by file. One run reads torch once."""
  readme = tmp_path_factory.mktemp("readme") / "readme.py"
  text = (ROOT / "README.md").read_text(encoding="utf-8")
  readme.write_text("".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
  programs = [*PROGRAMS.glob("*.py"), readme]
  done = subprocess.run(
    [sys.executable, "-m", "mypy", "--no-error-summary", *programs],
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


@pytest.mark.parametrize("program", ["user_program.py", "readme.py"])
def test_a_correct_program_has_the_types_that_it_says(program, reports):
  assert not reports.get(program)


def test_every_mistake_is_reported_where_it_is(reports):
  lines = MISTAKES.read_text(encoding="utf-8").splitlines()
  marked = {
    (number, line.rpartition("# error: ")[2])
    for number, line in enumerate(lines, 1)
    if "# error: " in line
  }
  assert marked and reports["user_mistakes.py"] == marked


def test_the_correct_program_runs():
  command = [sys.executable, PROGRAMS / "user_program.py"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
