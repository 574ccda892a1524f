"""Packages that a user may not have: loaded on first use, or one error that helps."""

import functools
import importlib
import importlib.metadata
import re
from types import ModuleType
from typing import NamedTuple

from torchax.errors import UnsupportedVersionError


class Extra(NamedTuple):
  """What one of torchax's extras brings.

  Attributes:
    name: of the extra, as in `pip install 'torchax[name]'`.
    package: as pip knows it.
    lowest: the oldest version that works.
  """

  name: str
  package: str
  lowest: str


# By the name that is imported. A test compares this with setup.py.
EXTRAS = {
  "accelerate": Extra("ecosystem", "accelerate", "1.6"),
  "etils": Extra("checkpoint", "orbax-checkpoint", "0.12"),  # which brings it
  "flax": Extra("flax", "flax", "0.12"),
  "lightning": Extra("ecosystem", "lightning", "2.5"),
  "matplotlib": Extra("plot", "matplotlib", "3.9"),
  "orbax": Extra("checkpoint", "orbax-checkpoint", "0.12"),
  "transformers": Extra("ecosystem", "transformers", "5.0"),
}


def load(module: str, user: str) -> ModuleType:
  """Imports a module of a package that torchax does not require.

  Args:
    module: its full name, such as "flax.linen".
    user: what needs it, for the error: "FlaxNNModule".

  Raises:
    ImportError: the package is missing, or cannot be imported itself.
    UnsupportedVersionError: it is too old.
  """
  package = module.partition(".")[0]
  extra = EXTRAS[package]
  command = f"pip install --upgrade 'torchax[{extra.name}]'"
  try:
    importlib.import_module(package)
    loaded = importlib.import_module(module)
  except ImportError as error:
    is_missing = isinstance(error, ModuleNotFoundError) and _is_within(
      error.name, module
    )
    found = "which is not installed" if is_missing else f"which cannot load: {error}"
    raise ImportError(
      f"{user} needs {extra.package}, {found}. Run: {command}"
    ) from error
  version = _version(extra.package)
  if version is not None and _numbers(version) < _numbers(extra.lowest):
    raise UnsupportedVersionError(
      f"{user} needs {extra.package} {extra.lowest} or newer, but {version} is "
      f"installed. Run: {command}"
    )
  return loaded


def _is_within(missing: str | None, module: str) -> bool:
  return missing is not None and f"{module}.".startswith(f"{missing}.")


@functools.cache
def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:  # a source tree on the path
    return None


def _numbers(version: str) -> tuple[int, ...]:
  """The leading numbers of a version, which pre-releases and builds follow."""
  found = re.match(r"\d+(\.\d+)*", version)
  return tuple(map(int, found[0].split("."))) if found else ()
