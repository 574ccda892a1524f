"""What a user installs: the wheel, its metadata, and what importing it does."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest
from packaging.requirements import Requirement
from source_tree import PACKAGE, ROOT

BUILD_INPUTS = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")


def _run(*command, cwd, **environment) -> str:
  """Output of a command; its errors are shown when it fails."""
  done = subprocess.run(
    [str(part) for part in command],
    cwd=cwd,
    env={**os.environ, "PYTHONPATH": "", **environment},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
  """A wheel built from a copy, so that leftovers of other builds cannot get in."""
  source = tmp_path_factory.mktemp("source")
  for name in BUILD_INPUTS:
    shutil.copy(ROOT / name, source)
  shutil.copytree(
    PACKAGE, source / "torchax", ignore=shutil.ignore_patterns("__pycache__")
  )
  pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
  _run(*pip, "--no-index", "--quiet", "--wheel-dir", "dist", ".", cwd=source)
  (built,) = (source / "dist").glob("*.whl")
  return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> pathlib.Path:
  """The interpreter of a clean environment that has torchax from the wheel only.

  The packages that torchax requires come from here, by path: a `.pth` line does not
  follow this environment's own `.pth` files, so its editable torchax stays invisible.
  """
  home = tmp_path_factory.mktemp("clean")
  venv.create(home, with_pip=False, symlinks=True)
  python = home / "bin" / "python"
  pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
  _run(*pip, "--no-deps", "--no-index", wheel, cwd=home)
  site = _run(
    python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home
  )
  pathlib.Path(site, "requirements.pth").write_text(sysconfig.get_path("purelib"))
  return python


def test_the_wheel_holds_every_module(wheel):
  packed = {n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".py")}
  source = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
  assert packed == source, "a folder without __init__.py is left out of the wheel"


def test_the_wheel_holds_the_license(wheel):
  assert any(n.endswith("LICENSE") for n in zipfile.ZipFile(wheel).namelist())


def test_the_installed_package_imports_outside_of_the_tree(installed, tmp_path):
  place = _run(installed, "-c", "import torchax; print(torchax.__file__)", cwd=tmp_path)
  assert pathlib.Path(place).is_relative_to(installed.parent.parent)


def test_the_version_is_the_same_everywhere(wheel, installed, tmp_path):
  code = (
    "import importlib.metadata, torchax;"
    "print(torchax.VERSION, torchax.__version__, importlib.metadata.version('torchax'))"
  )
  versions = _run(installed, "-c", code, cwd=tmp_path).split()
  assert versions == [wheel.name.split("-")[1]] * 3


def _requirements(wheel) -> list[Requirement]:
  (name,) = (n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("/METADATA"))
  text = zipfile.ZipFile(wheel).read(name).decode()
  return [
    Requirement(line)
    for line in re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)
  ]


def test_this_environment_meets_the_requirements(wheel):
  unmet = [
    str(requirement)
    for requirement in _requirements(wheel)
    if requirement.marker is None
    and not requirement.specifier.contains(importlib.metadata.version(requirement.name))
  ]
  assert not unmet


def test_the_lowest_job_installs_the_lower_bounds(wheel):
  workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
  bounds = [
    f"{requirement.name}=={specifier.version}"
    for requirement in _requirements(wheel)
    if requirement.marker is None
    for specifier in requirement.specifier
    if specifier.operator == ">="
  ]
  (command,) = re.findall(r"pip install (torch==.*)", workflow)
  assert sorted(command.split()) == sorted(bounds)


def test_importing_torchax_starts_no_jax_backend(installed, tmp_path):
  """A backend takes most of a GPU's memory as soon as it starts."""
  code = (
    "import torchax; from jax._src import xla_bridge;"
    "print(xla_bridge.backends_are_initialized())"
  )
  assert _run(installed, "-c", code, cwd=tmp_path) == "False"
