"""Properties of each test in the report, for the table in the docs."""

import importlib.metadata

import pytest


@pytest.fixture(autouse=True)
def said_in_the_report(request, record_property):
  """Record the library of the test's file, its version, and the lines that change."""
  module = request.module
  if hasattr(module, "LIBRARY"):
    record_property("library", module.LIBRARY)
    record_property("version", importlib.metadata.version(module.DISTRIBUTION))
    record_property("lines", module.LINES)


@pytest.fixture(autouse=True)
def without_network(monkeypatch):
  """Forbid downloads: models are made from configurations."""
  for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "DIFFUSERS_OFFLINE"):
    monkeypatch.setenv(name, "1")
