"""A library that is missing or too old raises one error that says what to install."""

import importlib
import sys

import pytest

from torchax.compat import extras
from torchax.errors import UnsupportedVersionError

pytest.importorskip("accelerate", reason="the extra `ecosystem` is not installed")

LIBRARIES = [name for name, extra in extras.EXTRAS.items() if extra.name == "ecosystem"]
each_library = pytest.mark.parametrize("library", LIBRARIES)


def _command(library: str) -> str:
  return f'pip install "{library}>={extras.EXTRAS[library].lowest}"'


def _import_anew(library: str, monkeypatch):
  name = f"torchax.integrations.{library}"
  monkeypatch.delitem(sys.modules, name, raising=False)
  return importlib.import_module(name)


@each_library
def test_a_missing_library_names_its_version(library, monkeypatch):
  # The integration of transformers needs that of accelerate.
  importlib.import_module("torchax.integrations.accelerate")
  for name in [n for n in sys.modules if n.partition(".")[0] == library]:
    monkeypatch.setitem(sys.modules, name, None)
  monkeypatch.setitem(sys.modules, library, None)
  expected = f"integrations.{library} needs {library}, which is not installed.*"
  with pytest.raises(ImportError, match=expected + _command(library)):
    _import_anew(library, monkeypatch)


@each_library
def test_an_old_library_names_the_version_that_is_needed(library, monkeypatch):
  monkeypatch.setattr(extras, "_version", lambda package: "0.9.1")
  expected = "or newer, but 0.9.1 is installed.*"
  with pytest.raises(UnsupportedVersionError, match=expected + _command(library)):
    _import_anew(library, monkeypatch)
