"""Short programs as users of PyTorch and its libraries write them, a field a file.

A program is a function of a device. It returns the values to compare with CPU torch:
numbers, tensors, and for draws the truth of a law. `run.py` runs one in a process of
its own.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

# `import torchax`, `torchax.enable_globally()` and `device = "jax"`.
THREE_LINES = 3


@dataclasses.dataclass(frozen=True)
class Program:
  """One program and its comparison.

  Attributes:
    run: device -> values by name.
    title: title in the table of the docs.
    library: the package that it imports, or None.
    lines: number of lines that change for jax.
    rtol, atol: tolerances of its values.
    fails: reason of an expected failure, or None.
  """

  run: Callable[[str], Mapping[str, Any]]
  title: str
  library: str | None = None
  lines: int = THREE_LINES
  rtol: float = 1e-3
  atol: float = 1e-4
  fails: str | None = None


PROGRAMS: dict[str, Program] = {}


def program(title: str, **options):
  """Register the decorated function under its name."""

  def register(run):
    PROGRAMS[run.__name__] = Program(run, title, **options)
    return run

  return register


def load() -> dict[str, Program]:
  """Return all programs by name."""
  for module in pkgutil.iter_modules(__path__):
    if module.name != "run":
      importlib.import_module(f"{__name__}.{module.name}")
  return PROGRAMS
