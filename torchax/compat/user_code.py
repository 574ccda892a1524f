"""The line of the user's code that led here, for messages and ledgers.

Nothing is decided by it. A line is read off the record that JAX keeps of where an
operation comes from, which ends at the compiled function that is being traced.
"""

import contextlib
import functools
import os
import sys
import threading
import warnings
from collections.abc import Iterator

import jax
import torch

from torchax.compat import jax_compat

# Nobody looks in the files of these packages for the reason of a message.
_FILES = (os.path.dirname(__file__), torch.__file__, jax.__file__)
LIBRARIES = (
  *(f"{os.path.dirname(module)}{os.sep}" for module in _FILES),
  *(contextlib.__file__, functools.__file__, "<frozen "),
)


class _Graph(threading.local):
  # File and line that the node of a graph comes from while it is run.
  line: tuple[str, int] | None = None


_graph = _Graph()


@contextlib.contextmanager
def coming_from(place: tuple[str, int] | None) -> Iterator[None]:
  """Inside, `line` is that of a captured graph's node, where it is known."""
  before, _graph.line = _graph.line, place
  try:
    yield
  finally:
    _graph.line = before


# What was shown of each file, as `warnings` keeps it for a module.
_shown: dict[str, dict] = {}


def line() -> tuple[str, int] | None:
  """File and line of the innermost running code outside of torchax, torch and JAX.

  Returns:
    None where JAX does not know it.
  """
  return _graph.line or jax_compat.line_outside(LIBRARIES)


def warn(message: str, category: type[Warning]) -> None:
  """A warning at the line of the user's code that led here.

  Before Python 3.12 it is at the line of torchax where JAX does not know the user's.
  """
  if sys.version_info >= (3, 12):
    warnings.warn(message, category, skip_file_prefixes=LIBRARIES)
    return
  place = line()
  if place is None:
    warnings.warn(message, category, stacklevel=3)
    return
  registry = _shown.setdefault(place[0], {})
  warnings.warn_explicit(message, category, *place, registry=registry)
