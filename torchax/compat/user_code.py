"""Current line of user code, for messages and ledgers only.

The line comes from JAX's record of the source of an operation. That record ends at the
compiled function that is being traced.
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
from jax.extend import source_info_util

from torchax.compat import jax_compat

# Frames in files of these packages are never the user's line.
_FILES = (os.path.dirname(__file__), torch.__file__, jax.__file__)
LIBRARIES = (
  *(f"{os.path.dirname(module)}{os.sep}" for module in _FILES),
  *(contextlib.__file__, functools.__file__, "<frozen "),
)


class _Node(threading.local):
  # Source file and line of the graph node that is running.
  line: tuple[str, int] | None = None


_node = _Node()


@contextlib.contextmanager
def using_node_source(source: tuple[str, int] | None) -> Iterator[None]:
  """Make `line` return the source of a graph node, if known, inside the block."""
  before, _node.line = _node.line, source
  try:
    yield
  finally:
    _node.line = before


# Warnings already shown, by file: the registries that `warnings` keeps per module.
_registries: dict[str, dict] = {}


def line() -> tuple[str, int] | None:
  """Return file and line of the innermost user frame; None if JAX has no record."""
  return _node.line or jax_compat.line_of(source_info_util.current(), LIBRARIES)


def warn(message: str, category: type[Warning]) -> None:
  """Issue a warning at the current line of user code.

  Before Python 3.12, and if JAX does not know that line, use the line in torchax.
  """
  if sys.version_info >= (3, 12):
    warnings.warn(message, category, skip_file_prefixes=LIBRARIES)
    return
  source = line()
  if source is None:
    warnings.warn(message, category, stacklevel=3)
    return
  registry = _registries.setdefault(source[0], {})
  warnings.warn_explicit(message, category, *source, registry=registry)
