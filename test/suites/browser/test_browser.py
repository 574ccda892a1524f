"""Pages of the built site in a browser: on a phone, in the dark, without a network."""

import io

import numpy as np
import pytest
from PIL import Image
from source_tree import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(
  path.relative_to(DOCS).with_suffix("").as_posix().removesuffix("index")
  for path in DOCS.rglob("*.md")
)
WIDTHS = 400, 1280
SCHEMES = "light", "dark"

# Elements that reach out of the window, outside of boxes that scroll.
CUT_OFF = """
() => [...document.querySelectorAll("article *")].filter(element => {
  const scrolls = e => /auto|scroll/.test(getComputedStyle(e).overflowX);
  if (element.getBoundingClientRect().right <= innerWidth + 1) return false;
  for (let e = element; e; e = e.parentElement) if (scrolls(e)) return false;
  return true;
}).map(element => element.outerHTML.slice(0, 80))
"""
IS_LOADED = "image => image.complete && image.naturalWidth > 0"
TEXT = "article => article.innerText.replace(/\\s/g, '')"


class Visit:
  """Page of the site in a window, and the messages and requests of its scripts."""

  def __init__(self, browser, address, **window):
    self.messages, self.foreign = [], []
    self.address = address
    self.runs_scripts = window.get("java_script_enabled", True)
    self.context = browser.new_context(**window)
    self.context.route("**/*", self._request)
    self.page = self.context.new_page()
    self.page.on("console", self._message)
    self.page.on("pageerror", lambda error: self.messages.append(str(error)))

  def _message(self, message):
    if message.type in ("error", "warning"):
      self.messages.append(message.text)

  def _request(self, route):
    if route.request.url.startswith(self.address):
      route.continue_()
    else:
      self.foreign.append(route.request.url)
      route.abort()

  def open(self, name: str):
    """Open a page of the site and wait until its scripts have run."""
    self.messages.clear()
    self.foreign.clear()
    self.page.goto(f"{self.address}{name}{'/' if name else ''}")
    if self.runs_scripts:
      self.page.evaluate("() => new Promise(requestIdleCallback)")
    return self.page


@pytest.fixture(scope="module", params=SCHEMES)
def scheme(request):
  return request.param


@pytest.fixture(scope="module", params=WIDTHS)
def visit(request, browser, address, scheme):
  window = {"viewport": {"width": request.param, "height": 900}, "color_scheme": scheme}
  visit = Visit(browser, address, **window)
  yield visit
  visit.context.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_the_window_and_needs_no_other_host(visit, name):
  page = visit.open(name)
  assert not visit.foreign
  assert not visit.messages
  width = page.evaluate("document.documentElement.scrollWidth")
  assert width <= page.viewport_size["width"]
  assert not page.evaluate(CUT_OFF)


@pytest.fixture(scope="module")
def both(browser, address):
  """Return windows with and without JavaScript."""
  visits = [Visit(browser, address, java_script_enabled=on) for on in (True, False)]
  yield visits
  for visit in visits:
    visit.context.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_without_scripts_has_the_same_text(both, name):
  """The text is visible, and the links to other pages."""
  expected, page = (visit.open(name) for visit in both)
  expected = expected.locator("article").evaluate(TEXT)
  assert page.locator("article").evaluate(TEXT) == expected and len(expected) > 200
  assert page.locator("nav.md-tabs a").first.is_visible()


def _edges(image) -> np.ndarray:
  """Return where a picture changes between neighboring pixels."""
  grey = Image.open(io.BytesIO(image.screenshot())).convert("L")
  return np.abs(np.diff(np.asarray(grey, np.int16), axis=1)) > 30


@pytest.mark.parametrize(
  "name", [p for p in PAGES if "![" in (DOCS / f"{p or 'index'}.md").read_text()]
)
def test_pictures_have_a_text_and_show_as_much_in_the_dark(browser, address, name):
  found = {}
  for scheme in SCHEMES:
    visit = Visit(browser, address, color_scheme=scheme)
    images = visit.open(name).locator("article img").all()
    assert images and all(image.evaluate(IS_LOADED) for image in images)
    assert all(image.get_attribute("alt") for image in images)
    found[scheme] = [_edges(image) for image in images]
    visit.context.close()
  for light, dark in zip(found["light"], found["dark"], strict=True):
    assert light.any() and (light & dark).sum() > 0.75 * light.sum()
