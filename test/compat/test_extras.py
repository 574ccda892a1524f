"""A package that is missing, broken or too old raises one error with the remedy."""

import ast
import importlib.metadata
import sys
import tempfile

import pytest
from packaging.requirements import Requirement
from source_tree import PROJECT, modules

import torchax
from torchax.compat import extras
from torchax.errors import UnsupportedVersionError


def _save():
  torchax.save_checkpoint({}, tempfile.mkdtemp(), 0)


def _load():
  torchax.load_checkpoint(tempfile.mkdtemp())


def _flax():
  module = importlib.import_module("torchax.flax")
  module.FlaxNNModule(torchax.default_env(), None, ())


def _plot():
  with torchax.default_env().rng.record() as ledger:
    pass
  ledger.plot()


# Imported package -> (its users, how they ask for it).
USERS = {
  "orbax": (("A checkpoint", _save), ("A checkpoint", _load)),
  "etils": (("A checkpoint", _save), ("A checkpoint", _load)),
  "flax": (("FlaxNNModule", _flax),),
  "matplotlib": (("The picture of a ledger", _plot),),
}
ROWS = [(package, *user) for package, users in USERS.items() for user in users]


def test_every_optional_package_has_a_user_here():
  # test/suites/ecosystem tests the users of the libraries of their extra.
  here = {name for name, e in extras.EXTRAS.items() if e.name != "ecosystem"}
  assert USERS.keys() == here


def test_the_library_loads_optional_packages_in_one_way():
  """Otherwise another import could fail without a hint on what to install."""
  loaded = set()
  for module in modules():
    for node in ast.walk(ast.parse(module.path.read_text(encoding="utf-8"))):
      if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names]
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
        optional = [n for n in names if n.partition(".")[0] in extras.EXTRAS]
        assert not optional, f"{module.path}: use extras.load for {optional}"
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        loaded.add(node.value.partition(".")[0])
  assert extras.EXTRAS.keys() <= loaded


@pytest.fixture
def without(monkeypatch):
  def hide(package: str):
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
      monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)

  return hide


@pytest.mark.parametrize("package, name, call", ROWS)
def test_a_missing_package_is_named_with_its_version(package, name, call, without):
  extra = extras.EXTRAS[package]
  without(package)
  with pytest.raises(ImportError) as raised:
    call()
  message = str(raised.value)
  assert name in message and extra.package in message
  assert "is not installed" in message
  assert f'pip install "{extra.package}>={extra.lowest}"' in message


@pytest.mark.parametrize("package, name, call", ROWS)
def test_a_package_that_is_too_old_is_named(package, name, call, monkeypatch):
  extra = extras.EXTRAS[package]
  monkeypatch.setattr(extras, "_version", lambda package: "0.1.0rc1")
  with pytest.raises(UnsupportedVersionError) as raised:
    call()
  message = str(raised.value)
  assert (
    f"{extra.package} {extra.lowest} or newer, but 0.1.0rc1 is installed" in message
  )
  assert f'pip install "{extra.package}>={extra.lowest}"' in message


def test_package_that_fails_to_import_raises_its_reason(monkeypatch):
  def fails(name):
    raise ImportError("cannot import name 'x' from 'jax'")

  monkeypatch.setattr(extras.importlib, "import_module", fails)
  with pytest.raises(ImportError, match="cannot load: cannot import name 'x'"):
    extras.load("flax.linen", "FlaxNNModule")


def test_lowest_versions_match_the_extras():
  declared = PROJECT["optional-dependencies"]
  for extra in extras.EXTRAS.values():
    requirements = {r.name: r for r in map(Requirement, declared[extra.name])}
    requirement = requirements[extra.package]
    assert str(requirement.specifier) == f">={extra.lowest}"
