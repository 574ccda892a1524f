"""Documentation: its programs run and its site builds."""

import html.parser
import importlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import urllib.parse

import pytest
from house.pages import PAGES, PROGRAMS, TUTORIALS
from source_tree import ROOT

from torchax.version import VERSION

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


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
  """Build the site, which fails on a warning."""
  if importlib.util.find_spec("mkdocs") is None:
    pytest.skip("the docs extra is not installed")
  folder = tmp_path_factory.mktemp("site")
  command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder)
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stdout + done.stderr
  return folder


def test_the_site_lists_its_pages_as_text(site):
  listed = (site / "llms.txt").read_text(encoding="utf-8")
  docs = ROOT / "docs"
  pages = {p.relative_to(docs).with_suffix("") for p in docs.rglob("*.md")}
  missing = [page for page in pages if f"]({page}/): " not in listed]
  assert missing == [pathlib.Path("index")]  # the home page is "./"


class _Links(html.parser.HTMLParser):
  """Addresses and ids of a page of the site."""

  def __init__(self, page: pathlib.Path):
    super().__init__()
    self.addresses, self.ids = set(), set()
    self.feed(page.read_text(encoding="utf-8"))

  def handle_starttag(self, tag, attrs):
    given = dict(attrs)
    self.ids.add(given.get("id"))
    self.addresses |= {given.get("href"), given.get("src")} - {None}


def test_links_of_the_site_lead_to_files_and_anchors_of_it(site):
  pages = {page: _Links(page) for page in site.rglob("*.html")}
  broken = []
  for page, links in pages.items():
    for address in links.addresses:
      parts = urllib.parse.urlsplit(address)
      if parts.scheme or parts.netloc:
        continue
      base = site if parts.path.startswith("/") else page.parent
      target = (base / urllib.parse.unquote(parts.path.lstrip("/"))).resolve()
      target = target / "index.html" if target.is_dir() else target
      target = target if parts.path else page
      ids = pages[target].ids if target in pages else set()
      anchor = urllib.parse.unquote(parts.fragment)
      if not target.exists() or (anchor and anchor not in ids):
        broken.append((page.relative_to(site).as_posix(), address))
  assert len(pages) > 50 and not broken


def test_the_site_names_its_version_and_asks_no_other_host(site):
  for page in site.rglob("*.html"):
    text = page.read_text(encoding="utf-8")
    assert f"torchax {VERSION}" in text
    loads = re.findall(
      r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"?(\w+:)", text
    )
    assert not [scheme for scheme in loads if scheme.startswith("http")]
    assert 'data-md-component="source"' not in text


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
