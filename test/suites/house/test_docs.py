"""Documentation: its programs run and its site builds."""

import importlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
from house.pages import PAGES, PROGRAMS, TUTORIALS
from source_tree import ROOT

pytestmark = pytest.mark.programs

OPTIONAL = ("flax", "optax", "sklearn", "transformers")
RUN_PAGE = (
  "import sys; exec(compile(sys.stdin.read(), sys.argv[1], 'exec'), "
  "{'__name__': '__main__'})"
)


def skip_without_libraries(program):
  for library in OPTIONAL:
    used = re.search(rf"(import|from) {library}\b", program)
    if used and not importlib.util.find_spec(library):
      pytest.skip(f"the page needs {library}, which is not installed")


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_the_programs_of_a_page_run_in_order(page, tmp_path):
  skip_without_libraries(PROGRAMS[page])
  done = subprocess.run(
    [sys.executable, "-c", RUN_PAGE, str(page)],
    input=PROGRAMS[page],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_and_its_notebook_have_the_outputs_of_a_run(page):
  skip_without_libraries(page.read_text(encoding="utf-8"))
  command = sys.executable, "-m", "tools.notebooks", "--check", page
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(
  importlib.util.find_spec("mkdocs") is None, reason="the docs extra is not installed"
)
def test_the_site_builds_without_a_warning(tmp_path):
  command = (
    sys.executable,
    "-m",
    "mkdocs",
    "build",
    "--strict",
    "--site-dir",
    tmp_path,
  )
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stdout + done.stderr
  listed = (tmp_path / "llms.txt").read_text(encoding="utf-8")
  docs = ROOT / "docs"
  pages = {p.relative_to(docs).with_suffix("") for p in docs.rglob("*.md")}
  missing = [page for page in pages if f"]({page}/): " not in listed]
  assert missing == [pathlib.Path("index")]  # the home page is "./"


@pytest.mark.parametrize("module", ["interop", "rng", "train", "export", "distributed"])
def test_the_reference_lists_the_public_names(module):
  pages = "".join(page.read_text() for page in ROOT.glob("docs/reference/*.md"))
  listed = set(re.findall(r"^::: torchax[\w.]*\.(\w+)$", pages, re.MULTILINE))
  public = set(importlib.import_module(f"torchax.{module}").__all__)
  left_out = {name for name in public - listed if not name.startswith("_")}
  # A flag, a module, and JAX's own function.
  assert left_out <= {"DEBUG", "optimizers", "shard_map"}


LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


@pytest.mark.parametrize("page", PAGES + TUTORIALS, ids=lambda page: page.name)
def test_links_between_files_lead_somewhere(page):
  broken = [
    target
    for target in LINK.findall(page.read_text(encoding="utf-8"))
    if not (page.parent / target).exists()
  ]
  assert not broken
