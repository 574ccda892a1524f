"""Supported versions of Python, torch, JAX and numpy, checked on import.

A warning says if pip has installed google/torchax, which has the same name.
"""

import importlib.metadata
import pathlib
import platform
import re
import warnings
from collections.abc import Callable, Mapping

from torchax.errors import UnsupportedVersionError
from torchax.version import VERSION

LOWEST = {"torch": "2.11", "jax": "0.10.0", "jaxlib": "0.10.0", "numpy": "2.0"}
"""Lowest supported version of each package, as in pyproject.toml."""

TESTED = {
  "torch": ("2.11", "2.15"),
  "jax": ("0.10", "0.12"),
  "python": ("3.11", "3.13"),
}
"""Lowest and highest release series that the tests cover, by name."""


def release(version: str) -> tuple[int, ...]:
  """Return the leading numbers of a version.

  >>> release("2.15.0+cu132"), release("0.12.0.dev20261101")
  ((2, 15, 0), (0, 12, 0))
  """
  match = re.match(r"\d+(\.\d+)*", version)
  return tuple(map(int, match.group().split("."))) if match else ()


def is_tested(name: str, version: str) -> bool:
  """Return True if the tests cover the series of this release."""
  lowest, highest = (release(bound) for bound in TESTED[name])
  return lowest <= release(version)[: len(lowest)] <= highest


def tested_range(name: str) -> str:
  """Return the tested range of a package as text: "2.11 to 2.15"."""
  return " to ".join(TESTED[name])


def is_older(version: str, bound: str) -> bool:
  """Return True if `version` is lower than `bound`.

  >>> is_older("2.9", "2.11"), is_older("2.11.0+cpu", "2.11")
  (True, False)
  """
  width = max(len(release(version)), len(release(bound)))
  padded = [release(v) + (0,) * (width - len(release(v))) for v in (version, bound)]
  return padded[0] < padded[1]


def check_python(version: str = platform.python_version()) -> None:
  """Check the version of Python, which pip checks only for an installed package.

  Raises:
    UnsupportedVersionError: Python is older than torchax supports.
  """
  lowest, _ = TESTED["python"]
  if is_older(version, lowest):
    raise UnsupportedVersionError(
      f"torchax {VERSION} needs Python {lowest} or newer, but found Python {version}. "
      "Install torchax into an environment of a newer Python."
    )


def check(
  installed: Callable[[str], str] = importlib.metadata.version,
  lowest: Mapping[str, str] = LOWEST,
) -> None:
  """Check the installed versions; raise one error that names every old library.

  Args:
    installed: function from the name of a package to its version.
    lowest: lowest version by name of package.

  Raises:
    UnsupportedVersionError: a library is older than torchax supports.
  """
  old = []
  for name, bound in lowest.items():
    try:
      version = installed(name)
    except importlib.metadata.PackageNotFoundError:
      continue  # not installed, or without metadata; its import raises if it is missing
    if is_older(version, bound):
      old.append((name, bound, version))
  if not old:
    return
  needed = " and ".join(f"{name} {bound} or newer" for name, bound, _ in old)
  versions_found = ", ".join(f"{name} {version}" for name, _, version in old)
  command = " ".join(f'"{name}>={bound}"' for name, bound, _ in old)
  raise UnsupportedVersionError(
    f"torchax {VERSION} needs {needed}, but found {versions_found}. Upgrade with: "
    f"pip install {command}"
  )


def check_origin(
  installed: Callable[[str], str] = importlib.metadata.version,
) -> None:
  """Warn if the installed package "torchax" is google/torchax.

  Python has found this package first, or its files are in the other one's folder.

  Args:
    installed: function from the name of a package to its version.
  """
  try:
    version = installed("torchax")
  except importlib.metadata.PackageNotFoundError:
    return  # a source tree on the path
  if "+rng" in version:
    return
  folder = pathlib.Path(__file__).parents[1]
  warnings.warn(
    f"torchax {VERSION} is imported from {folder}, but torchax {version} is installed, "
    "which is google/torchax. Run `pip uninstall torchax`, then `pip install .` in a "
    "checkout of this project.",
    stacklevel=2,
  )


check_python()
check()
check_origin()
