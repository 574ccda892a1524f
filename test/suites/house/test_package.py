"""Installed package: the wheel, its metadata, and the effects of importing it."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from source_tree import PACKAGE, PROJECT, ROOT

pytestmark = pytest.mark.programs

BUILD_INPUTS = {"setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"}


def _run(*command, cwd, **environment) -> str:
  """Return the output of a command; show its errors if it fails."""
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


def _copied(source: pathlib.Path) -> pathlib.Path:
  """Copy the tree without environments and leftovers of other builds."""
  left_out = (".*", "__pycache__", "*.egg-info", "build", "dist", "output", "site")
  ignored = shutil.ignore_patterns(*left_out)
  return shutil.copytree(ROOT, source, ignore=ignored, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> pathlib.Path:
  """Build a source distribution as `python -m build --sdist` does."""
  source = _copied(tmp_path_factory.mktemp("source"))
  code = "from setuptools import build_meta; build_meta.build_sdist('dist')"
  _run(sys.executable, "-c", code, cwd=source)
  (built,) = (source / "dist").glob("*.tar.gz")
  return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
  """Build a wheel from a copy."""
  source = _copied(tmp_path_factory.mktemp("source"))
  pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
  _run(*pip, "--no-index", "--quiet", "--wheel-dir", "dist", ".", cwd=source)
  (built,) = (source / "dist").glob("*.whl")
  return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> pathlib.Path:
  """Return the interpreter of a clean environment with torchax from the wheel only.

  The packages that torchax requires are added from this environment by path. A `.pth`
  line does not follow this environment's own `.pth` files, so its editable torchax
  stays invisible.
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


def _names_in(sdist) -> set[str]:
  """Return the files of a source distribution, by their paths in the tree."""
  with tarfile.open(sdist) as archive:
    members = [member.name for member in archive if member.isfile()]
  return {name.partition("/")[2] for name in members}


def _metadata(built) -> str:
  """Return the metadata of a wheel or a source distribution."""
  if built.suffix == ".whl":
    with zipfile.ZipFile(built) as archive:
      (name,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
      return archive.read(name).decode()
  with tarfile.open(built) as archive:
    folder = archive.getnames()[0].partition("/")[0]
    return archive.extractfile(f"{folder}/PKG-INFO").read().decode()


def test_this_environment_meets_the_requirements():
  unmet = [
    str(requirement)
    for requirement in map(Requirement, PROJECT["dependencies"])
    if not requirement.specifier.contains(importlib.metadata.version(requirement.name))
  ]
  assert not unmet


def test_pinned_packages_accept_the_oldest_python():
  """pip searches for minutes, without a word, for what one pin excludes."""
  oldest = PROJECT["requires-python"].removeprefix(">=") + ".0"
  pins = set((ROOT / "constraints.txt").read_text(encoding="utf-8").split())
  refusing = [
    f"{package.name}=={package.version} needs Python {needed}"
    for package in importlib.metadata.distributions()
    if f"{package.name}=={package.version}" in pins
    and (needed := package.metadata["Requires-Python"])
    and not SpecifierSet(needed).contains(oldest)
  ]
  assert not refusing


@pytest.mark.parametrize("page", ["README.md", "docs/get-started.md"])
def test_torch_is_installed_from_its_cpu_builds_before_torchax(page):
  text = (ROOT / page).read_text(encoding="utf-8")
  torch_at = text.index(
    "pip install torch --index-url https://download.pytorch.org/whl/cpu"
  )
  assert torch_at < text.index("pip install .") < text.index("pip install '.[gpu]'")


def test_nothing_installs_torchax_by_name():
  """A package index has google/torchax by that name."""
  command = re.compile(r"pip install\b[^\n`]*\btorchax\b")
  files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
  found = [
    f"{path.relative_to(ROOT)}: {match.group()}"
    for path in (*files, *PACKAGE.rglob("*.py"), *ROOT.glob(".github/**/*.yml"))
    for match in command.finditer(path.read_text(encoding="utf-8"))
  ]
  assert not found


def test_importing_torchax_starts_no_jax_backend(installed, tmp_path):
  """A backend takes most of a GPU's memory as soon as it starts."""
  code = (
    "import torchax; from jax._src import xla_bridge;"
    "print(xla_bridge.backends_are_initialized())"
  )
  assert _run(installed, "-c", code, cwd=tmp_path) == "False"


def test_the_package_is_marked_as_typed(wheel, sdist):
  assert "torchax/py.typed" in zipfile.ZipFile(wheel).namelist()
  assert "torchax/py.typed" in _names_in(sdist)


def test_sdist_contains_what_a_build_and_the_tests_need(sdist):
  names = _names_in(sdist)
  assert names >= BUILD_INPUTS | {"Makefile", "constraints.txt", "CONTRIBUTING.md"}
  tests = {str(path.relative_to(ROOT)) for path in ROOT.glob("test/**/*.py")}
  assert tests <= names
  packed = {name for name in names if name.startswith("torchax/")}
  source = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
  assert packed == source | {"torchax/py.typed"}


@pytest.mark.parametrize("built", ["wheel", "sdist"])
def test_the_metadata_is_valid_and_complete(built, request):
  """A package index refuses metadata that `validate` refuses."""
  found = Metadata.from_email(_metadata(request.getfixturevalue(built)), validate=True)
  assert found.license_expression == "Apache-2.0"
  assert found.license_files == ["LICENSE"]
  assert found.author and found.summary and found.keywords
  assert found.description_content_type == "text/markdown"
  assert {"Source", "Documentation", "Issues", "Changelog"} <= set(found.project_urls)
  assert all(url.startswith("https://") for url in found.project_urls.values())
  assert "Typing :: Typed" in found.classifiers


@pytest.mark.parametrize("name", PROJECT["optional-dependencies"])
def test_only_the_extra_of_an_accelerator_changes_jax(name):
  requirements = map(Requirement, PROJECT["optional-dependencies"][name])
  assert any(r.name == "jax" for r in requirements) == (name in ("gpu", "tpu"))
  assert not any({"gpu", "tpu"} & r.extras for r in requirements)


def test_make_names_the_python_that_it_needs(tmp_path):
  old = tmp_path / "python3"
  old.write_text("#!/bin/sh\nexit 1\n")  # its answer to "are you recent enough?"
  old.chmod(0o755)
  command = ["make", "install", f"PYTHON={old}", f"VENV={tmp_path / 'environment'}"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode != 0
  expected = f"torchax needs Python 3.11 or newer, and '{old}' is not; name one with: "
  assert expected in done.stderr and not (tmp_path / "environment").exists()
