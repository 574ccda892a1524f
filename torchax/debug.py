"""Logging and checking single operations; switched on in `Configuration`."""

import logging

import torch
from torch.utils import _pytree as torch_pytree

from torchax.ops import mappings
from torchax.tensor import Tensor

_logger = logging.getLogger("torchax")


def _name_of_func(func) -> str:
  """A readable name of an overload or torch function."""
  if hasattr(func, "name") and callable(func.name):
    return func.name()
  return getattr(func, "__qualname__", None) or str(func)


def _describe(value) -> str:
  if isinstance(value, torch.Tensor):
    return f"{type(value).__name__}[{value.dtype}, {list(value.shape)}]"
  return repr(value)


def _make_debug_msg(is_dispatch: bool, log_args: bool, func, args, kwargs) -> str:
  """One line about a call, with shapes and dtypes if `log_args`."""
  kind = "DISPATCH" if is_dispatch else "FUNCTION"
  message = f"{kind}: {_name_of_func(func)}"
  if log_args:
    parts = [torch_pytree.tree_map(_describe, arg) for arg in args]
    parts += [
      f"{k}={torch_pytree.tree_map(_describe, v)}" for k, v in (kwargs or {}).items()
    ]
    message += f"({', '.join(map(str, parts))})"
  return message


def log_nested(env, message: str) -> None:
  """Logs a message about an operation."""
  _logger.info(message)


def log_mixed(name: str, tensor: torch.Tensor) -> None:
  """Logs which tensor of another device an operation met."""
  _logger.info("%s met %s on %s", name, _describe(tensor), tensor.device)


def debug_accuracy(func, args, kwargs, current_output) -> bool:
  """Compares an operation's output on jax with CPU torch; logs what differs.

  Returns:
    True when all outputs agree within the tolerances of `torch.testing`.
  """
  if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
    return True

  def to_cpu(value):
    return mappings.j2t(value.jax()) if isinstance(value, Tensor) else value

  cpu_args, cpu_kwargs = torch_pytree.tree_map(to_cpu, (args, kwargs or {}))
  expected = torch_pytree.tree_leaves(func(*cpu_args, **cpu_kwargs))
  actual = torch_pytree.tree_leaves(torch_pytree.tree_map(to_cpu, current_output))
  agree = True
  for have, want in zip(actual, expected):
    if not isinstance(want, torch.Tensor):
      continue
    try:
      torch.testing.assert_close(have, want, check_dtype=False, equal_nan=True)
    except AssertionError as error:
      agree = False
      _logger.warning("%s differs from CPU torch: %s", _name_of_func(func), error)
  return agree


def dispatch(env, dispatcher, func, args, kwargs):
  """Runs an operation with the logging and checking that the configuration asks for."""
  config = env.config
  if config.debug_print_each_op:
    operands = config.debug_print_each_op_operands
    log_nested(env, _make_debug_msg(True, operands, func, args, kwargs))
  if not config.debug_accuracy_for_each_op:
    return dispatcher(func, args, kwargs)
  before = torch_pytree.tree_map(
    lambda value: value.detach().clone() if isinstance(value, Tensor) else value,
    (args, kwargs),
  )
  output = dispatcher(func, args, kwargs)
  debug_accuracy(func, *before, output)
  return output
