"""Pyright infers the types of the programs that mypy checks in `test_typing.py`.

`make test-pyright` runs it. It is a program of Node.js, which no Python package brings
without a network.
"""

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest
from house.pages import PROGRAMS
from source_tree import ROOT

USERS = ROOT / "test" / "suites" / "house" / "typing"
PAGES = {page.stem: text for page, text in PROGRAMS.items()}
# Errors of a page that are right, or that come from annotations of another library.
REPORTED = {
  # The page has operations that raise.
  "errors": {"reportOperatorIssue", "reportArgumentType"},
  # Private lowerings of google/torchax, by their names.
  "migrating": {"reportCallIssue"},
  # transformers' annotations refuse `model.to("jax")`.
  "models": {"reportArgumentType"},
  # torch's annotation of `varlen_attn` has the result with `return_aux`, too.
  "serving": {"reportAttributeAccessIssue"},
}
# A loop of a page runs at least once. Libraries that are not installed have no types.
SETTINGS = {
  "extraPaths": [str(ROOT)],
  "reportMissingImports": False,
  "reportMissingModuleSource": False,
  "reportPossiblyUnboundVariable": False,
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, set[tuple[int, str]]]:
  """Return (line, rule) of the errors, by file."""
  command = shlex.split(os.environ.get("PYRIGHT", "pyright"))
  if not shutil.which(command[0]):
    pytest.exit(
      f"The test needs {command[0]!r}, which is not installed. Install Node.js, or "
      "name the program: make test-pyright PYRIGHT=/path/to/pyright",
      returncode=1,
    )
  folder = tmp_path_factory.mktemp("pages")
  for name, text in PAGES.items():
    (folder / f"page_{name}.py").write_text(text)
  for program in USERS.glob("*.py"):
    shutil.copy(program, folder)
  (folder / "pyrightconfig.json").write_text(json.dumps(SETTINGS))
  command += ["--outputjson", "--pythonpath", sys.executable, "--project", str(folder)]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert done.returncode in (0, 1), done.stdout + done.stderr
  found: dict[str, set[tuple[int, str]]] = {}
  for report in json.loads(done.stdout)["generalDiagnostics"]:
    if report["severity"] == "error":
      position = report["range"]["start"]["line"] + 1, report.get("rule", "syntax")
      found.setdefault(pathlib.Path(report["file"]).name, set()).add(position)
  return found


@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page_pass_pyright(page, reports):
  found = reports.get(f"page_{page}.py", set())
  assert {rule for _, rule in found} == REPORTED.get(page, set()), found


def test_a_correct_program_has_the_types_that_it_says(reports):
  assert not reports.get("user_program.py")


def test_every_mistake_is_reported_where_it_is(reports):
  lines = (USERS / "user_mistakes.py").read_text(encoding="utf-8").splitlines()
  marked = {number for number, line in enumerate(lines, 1) if "# error: " in line}
  assert marked and {line for line, _ in reports["user_mistakes.py"]} == marked
