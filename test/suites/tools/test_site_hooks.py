"""Version of the site in its footer, and the list of versions of mike."""

from tools import site_hooks
from torchax.version import VERSION


def _configured(monkeypatch, **variables) -> dict:
  monkeypatch.delenv("MIKE_DOCS_VERSION", raising=False)
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  return site_hooks.on_config({"extra": {}})


def test_the_footer_has_the_version_of_the_package(monkeypatch):
  assert _configured(monkeypatch)["copyright"] == f"torchax {VERSION}"


def test_only_a_site_of_mike_has_a_list_of_versions(monkeypatch):
  assert _configured(monkeypatch)["extra"] == {}
  configured = _configured(monkeypatch, MIKE_DOCS_VERSION='{"version": "latest"}')
  assert configured["extra"] == {"version": {"provider": "mike"}}


def test_a_page_asks_github_for_nothing():
  page = '<a class="md-source" data-md-component="source">'
  assert site_hooks.on_post_page(page, page=None) == '<a class="md-source">'
  assert site_hooks.on_post_template(page, config=None) == '<a class="md-source">'
