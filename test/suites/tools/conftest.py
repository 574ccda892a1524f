"""Repositories for tests of the porting tool."""

import pathlib

import pytest
from upstream_projects import PROJECT, git, write


@pytest.fixture
def upstream(tmp_path) -> pathlib.Path:
  place = tmp_path / "upstream"
  place.mkdir()
  git(place, "init", "--quiet")
  return place


@pytest.fixture
def project(tmp_path) -> pathlib.Path:
  place = tmp_path / "project"
  write(place, PROJECT)
  return place
