"""A library that is missing or too old gives one error that says what to install."""

import importlib
import importlib.metadata
import sys

import pytest

MODULES = ("accelerate", "transformers", "lightning")
each_module = pytest.mark.parametrize("library", MODULES)


def _import_anew(library: str, monkeypatch):
  name = f"torchax.integrations.{library}"
  monkeypatch.delitem(sys.modules, name, raising=False)
  return importlib.import_module(name)


@each_module
def test_a_missing_library_names_the_extra(library, monkeypatch):
  def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(importlib.metadata, "version", missing)
  with pytest.raises(ImportError, match=r"torchax\[ecosystem\].*>="):
    _import_anew(library, monkeypatch)


@each_module
def test_an_old_library_names_the_version_that_is_needed(library, monkeypatch):
  monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.1")
  with pytest.raises(ImportError, match=r"or newer, but 0\.9\.1 is installed"):
    _import_anew(library, monkeypatch)
