"""What a traced function is called in messages and in compiled programs."""

import functools

import torch


def name_of(function) -> str:
  """The name of the user's function, or of the module's class.

  Args:
    function: a function, a module or a method of one; also a `functools.partial`.
  """
  while isinstance(function, functools.partial):
    function = function.func
  owner = getattr(function, "__self__", None)
  name = getattr(function, "__name__", type(function).__name__)
  if isinstance(owner, torch.nn.Module):
    kind = type(owner).__name__
    return kind if name == "forward" else f"{kind}.{name}"
  return name
