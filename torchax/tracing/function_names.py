"""Names of traced functions, for messages and compiled programs."""

import functools
import inspect
from collections.abc import Callable

import torch


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


def location_of(function) -> tuple[str, int] | None:
  """Return the file and first line of the user's function; None if unknown."""
  while isinstance(function, functools.partial):
    function = function.func
  method = getattr(function, "forward", function)
  code = getattr(getattr(method, "__func__", method), "__code__", None)
  return None if code is None else (code.co_filename, code.co_firstlineno)


def signature_of(function: Callable) -> inspect.Signature | None:
  """Return the signature of a function or a module's `forward`; None if unknown."""
  if isinstance(function, torch.nn.Module):
    function = function.forward
  try:
    return inspect.signature(function)
  except (TypeError, ValueError):  # a function written in C
    return None
