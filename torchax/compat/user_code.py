"""Current line of user code, and names of its functions: for messages and ledgers.

The line comes from JAX's record of the source of an operation. That record ends at the
compiled function that is being traced.
"""

import contextlib
import functools
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable

import jax
import torch
from jax.extend import source_info_util

from torchax.compat import jax_compat
from torchax.compat.patches import setting

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


def using_node_source(
  source: tuple[str, int] | None,
) -> contextlib.AbstractContextManager[None]:
  """Make `line` return the source of a graph node, if known, inside the block."""
  return setting(_node, "line", source)


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


def name_of(function) -> str:
  """Return the name of a function, method or partial; for a module, of its class."""
  while isinstance(function, functools.partial):
    function = function.func
  owner = getattr(function, "__self__", None)
  name = getattr(function, "__name__", type(function).__name__)
  if isinstance(owner, torch.nn.Module):
    kind = type(owner).__name__
    return kind if name == "forward" else f"{kind}.{name}"
  return name


def function_of(function):
  """Return the function that a partial, a method or a module calls."""
  while isinstance(function, functools.partial):
    function = function.func
  method = getattr(function, "forward", function)
  return getattr(method, "__func__", method)


def location_of(function) -> tuple[str, int] | None:
  """Return the file and first line of the user's function; None if unknown."""
  code = getattr(function_of(function), "__code__", None)
  return None if code is None else (code.co_filename, code.co_firstlineno)


def signature_of(function: Callable) -> inspect.Signature | None:
  """Return the signature of a function or a module's `forward`; None if unknown."""
  if isinstance(function, torch.nn.Module):
    function = function.forward
  try:
    return inspect.signature(function)
  except (TypeError, ValueError):  # a function written in C
    return None


def positional(signature: inspect.Signature) -> list[inspect.Parameter]:
  """Return the positional parameters of a signature, up to `*args`."""
  parameters = signature.parameters.values()
  kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
  return [parameter for parameter in parameters if parameter.kind in kinds]
