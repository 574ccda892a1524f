"""Built site, served on this machine, and a browser (`make test-site`)."""

import functools
import http.server
import importlib
import importlib.util
import os
import shutil
import threading

import pytest
from source_tree import ROOT

SITE = ROOT / "site"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
NEEDS = {
  "a site": "The test of the site needs site/. Run: make docs",
  "playwright": "The test of the site needs playwright. Run: make test-site",
  "a browser": "The test of the site needs Chromium or Chrome, which is not installed. "
  "Install it, or name its program: make test-site CHROMIUM=/path/to/chromium",
}


@pytest.fixture(scope="session")
def browser():
  """Start the browser; end the run with one sentence if something is missing."""
  program = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, NAMES)), ""
  )
  found = {
    "a site": (SITE / "index.html").exists(),
    "playwright": importlib.util.find_spec("playwright"),
    "a browser": shutil.which(program),
  }
  for name, is_found in found.items():
    if not is_found:
      pytest.exit(NEEDS[name], returncode=1)
  playwright = importlib.import_module("playwright.sync_api").sync_playwright
  with playwright() as started:
    flags = ["--no-sandbox"]  # our own pages; root, as in a container, has no sandbox
    yield started.chromium.launch(executable_path=program, args=flags)


class _Quiet(http.server.SimpleHTTPRequestHandler):
  def log_message(self, *_):
    pass


@pytest.fixture(scope="session")
def address():
  """Serve the site; return its address."""
  handler = functools.partial(_Quiet, directory=SITE)
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
