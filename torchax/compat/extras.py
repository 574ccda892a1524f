"""Optional packages: imported on first use, with one error that names the package.

Integrations such as `torchax.flax` call `load`.
"""

import functools
import importlib
import importlib.metadata
from types import ModuleType
from typing import NamedTuple

from torchax.compat.versions import is_older
from torchax.errors import UnsupportedVersionError


class Extra(NamedTuple):
  """Package that an extra of torchax installs.

  Attributes:
    name: name of the extra, as in `pip install '.[name]'`.
    package: name of the package for pip.
    lowest: oldest version that works.
  """

  name: str
  package: str
  lowest: str


# Keys are the imported names. A test compares the rows with pyproject.toml.
EXTRAS = {
  "accelerate": Extra("ecosystem", "accelerate", "1.6"),
  "etils": Extra("checkpoint", "orbax-checkpoint", "0.12"),  # a dependency of orbax
  "flax": Extra("flax", "flax", "0.12"),
  "lightning": Extra("ecosystem", "lightning", "2.5"),
  "matplotlib": Extra("plot", "matplotlib", "3.9"),
  "orbax": Extra("checkpoint", "orbax-checkpoint", "0.12"),
  "transformers": Extra("ecosystem", "transformers", "5.0"),
}


def load(module: str, user: str) -> ModuleType:
  """Import a module of an optional package.

  Args:
    module: full name of the module, such as "flax.linen".
    user: name of the feature that needs it, for the error: "FlaxNNModule".

  Raises:
    ImportError: the package is missing, or its import fails.
    UnsupportedVersionError: the package is too old.
  """
  package = module.partition(".")[0]
  extra = EXTRAS[package]
  # The package itself: on an index, the name torchax is google/torchax.
  command = f'pip install "{extra.package}>={extra.lowest}"'
  try:
    importlib.import_module(package)
    loaded = importlib.import_module(module)
  except ImportError as error:
    is_missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(
      f"{error.name}."
    )
    problem = "which is not installed" if is_missing else f"which cannot load: {error}"
    raise ImportError(
      f"{user} needs {extra.package}, {problem}. Run: {command}"
    ) from error
  version = _version(extra.package)
  if version is not None and is_older(version, extra.lowest):
    raise UnsupportedVersionError(
      f"{user} needs {extra.package} {extra.lowest} or newer, but {version} is "
      f"installed. Run: {command}"
    )
  return loaded


@functools.cache
def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:  # a source tree on the path
    return None
