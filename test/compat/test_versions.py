"""Supported versions of the libraries, and the message for other versions."""

import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import sys

import jax
import pytest
import torch
from packaging.requirements import Requirement
from source_tree import PROJECT, ROOT

import torchax
from torchax.compat import versions
from torchax.errors import UnsupportedVersionError

NEWEST = {"torch": "99.0", "jax": "99.0", "jaxlib": "99.0", "numpy": "99.0"}


def test_installed_versions_are_accepted():
  versions.check()


@pytest.mark.parametrize("name", versions.LOWEST)
def test_lowest_version_passes_and_an_older_one_raises(name):
  bound = versions.LOWEST[name]
  versions.check({**NEWEST, name: f"{bound}+cpu"}.__getitem__)
  with pytest.raises(UnsupportedVersionError) as caught:
    versions.check({**NEWEST, name: "0.1.9"}.__getitem__)
  message = str(caught.value)
  assert f"needs {name} {bound} or newer, but found {name} 0.1.9" in message
  assert f'pip install "{name}>={bound}"' in message
  assert "99.0" not in message


def test_one_error_names_all_old_packages():
  old = {**NEWEST, "torch": "2.10.1", "jax": "0.9.9"}
  with pytest.raises(UnsupportedVersionError, match="torch 2.10.1, jax 0.9.9"):
    versions.check(old.__getitem__)


@pytest.mark.parametrize("version", ["3.10.13", "3.9.18"])
def test_an_old_python_is_named_before_any_library(version):
  versions.check_python("3.11.0")
  sentence = f"needs Python 3.11 or newer, but found Python {version}. Install"
  with pytest.raises(UnsupportedVersionError, match=sentence):
    versions.check_python(version)


@pytest.mark.parametrize("version", ["2.11", "2.11.0", "2.11.0a0+git1", "2.16.0.dev1"])
def test_releases_are_compared_by_their_numbers(version):
  versions.check({**NEWEST, "torch": version}.__getitem__)


def test_a_package_without_metadata_is_left_to_its_import():
  def installed(name):
    raise importlib.metadata.PackageNotFoundError(name)

  versions.check(installed)


@pytest.mark.parametrize("version", ["0.0.14", "0.0.13", "1.0"])
def test_google_torchax_is_named_by_a_warning(version):
  with pytest.warns(UserWarning, match=f"torchax {version} is installed"):
    versions.check_origin({"torchax": version}.__getitem__)


def test_this_package_and_a_source_tree_give_no_warning(recwarn):
  def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)

  versions.check_origin({"torchax": torchax.VERSION}.__getitem__)
  versions.check_origin(missing)
  assert not recwarn.list


def test_the_version_meets_requirements_on_upstream():
  for requirement in ("torchax==0.0.14", "torchax>=0.0.13"):
    assert Requirement(requirement).specifier.contains(torchax.VERSION)


def test_lowest_versions_match_the_requirements():
  required = map(Requirement, PROJECT["dependencies"])
  bounds = {r.name: str(r.specifier).removeprefix(">=") for r in required}
  assert versions.LOWEST.items() <= bounds.items()


def test_installed_versions_are_tested_ones():
  assert versions.is_tested("torch", torch.__version__)
  assert versions.is_tested("jax", jax.__version__)
  assert versions.is_tested("python", platform.python_version())


def test_a_series_is_tested_with_all_its_releases():
  low, high = versions.TESTED["torch"]
  assert versions.is_tested("torch", f"{low}.0")
  assert versions.is_tested("torch", f"{high}.7+cu132")
  assert not versions.is_tested("torch", "2.10.9")
  assert not versions.is_tested("torch", f"2.{int(high.split('.')[1]) + 1}.0.dev1")


OLD = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: "2.9.1" if name == "torch" else real(name)
import torchax
"""


def test_import_beside_google_torchax_warns_in_one_sentence(tmp_path):
  metadata = tmp_path / "torchax-0.0.13.dist-info" / "METADATA"
  metadata.parent.mkdir()
  metadata.write_text("Metadata-Version: 2.1\nName: torchax\nVersion: 0.0.13\n")
  done = subprocess.run(
    [sys.executable, "-c", "import torchax"],
    capture_output=True,
    text=True,
    check=True,
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    timeout=120,
  )
  assert done.stderr.count("UserWarning") == 1
  assert "torchax 0.0.13 is installed, which is google/torchax. Run" in done.stderr


def test_import_with_an_old_torch_names_the_remedy():
  done = subprocess.run(
    [sys.executable, "-c", OLD],
    capture_output=True,
    text=True,
    check=False,
    env=dict(os.environ),
    timeout=120,
  )
  assert done.returncode == 1
  *_, message, link = done.stderr.strip().splitlines()
  assert "UnsupportedVersionError: torchax" in message
  assert "needs torch 2.11 or newer, but found torch 2.9.1" in message
  assert link.endswith("#unsupportedversionerror")


def _words(name: str) -> str:
  return " ".join(pathlib.Path(ROOT, name).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", ["README.md", "docs/faq.md"])
def test_pages_name_the_tested_versions(page):
  for name, shown in (("torch", "torch"), ("jax", "JAX"), ("python", "Python")):
    assert f"{shown} {versions.tested_range(name)}" in _words(page)


def test_python_versions_are_the_same_everywhere():
  low, high = (int(v.removeprefix("3.")) for v in versions.TESTED["python"])
  names = [f"3.{minor}" for minor in range(low, high + 1)]
  assert PROJECT["requires-python"] == f">=3.{low}"
  prefix = "Programming Language :: Python :: "
  listed = [c.removeprefix(prefix) for c in PROJECT["classifiers"] if prefix in c]
  assert listed == ["3", *names]
  matrix = ", ".join(f'"{name}"' for name in names)
  assert f"python-version: [{matrix}]" in _words(".github/workflows/ci.yml")
  texts = _words("README.md") + _words("Makefile")
  lowest = re.findall(r"Python (?:>= )?(3\.\d+)(?= or newer| and make)", texts)
  assert lowest == [f"3.{low}"] * 3


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_the_pinned_version_is_a_tested_one(name):
  (pinned,) = re.findall(rf"(?m)^{name}==(.+)$", (ROOT / "constraints.txt").read_text())
  assert versions.is_tested(name, pinned)


def test_the_workflow_has_a_job_for_each_end_of_the_versions():
  workflow = pathlib.Path(ROOT, ".github", "workflows", "ci.yml").read_text()
  for job in ("test:", "lowest:", "newest:", "prerelease:"):
    assert f"\n  {job}\n" in workflow
