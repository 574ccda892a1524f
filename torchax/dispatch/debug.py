"""Logging and checking of single operations, enabled in `Configuration`.

`Environment.dispatch` calls `dispatch` here instead of the dispatcher.
"""

import logging

import jax
import torch
from torch.utils import _pytree as torch_pytree

from torchax.core import mappings
from torchax.tensor import Tensor

_logger = logging.getLogger("torchax")


def _name_of_func(func) -> str:
  if hasattr(func, "name") and callable(func.name):
    return func.name()
  return getattr(func, "__qualname__", None) or str(func)


class _Text(str):
  """String that prints without quotes inside lists."""

  __repr__ = str.__str__


def _describe(value):
  if isinstance(value, torch.Tensor):
    return _Text(f"{type(value).__name__}[{value.dtype}, {list(value.shape)}]")
  return value


def _make_debug_msg(is_dispatch: bool, log_args: bool, func, args, kwargs) -> str:
  """Describe a call in one line, with shapes and dtypes if `log_args`."""
  kind = "DISPATCH" if is_dispatch else "FUNCTION"
  message = f"{kind}: {_name_of_func(func)}"
  if log_args:
    parts = [torch_pytree.tree_map(_describe, arg) for arg in args]
    parts += [
      _Text(f"{k}={torch_pytree.tree_map(_describe, v)!r}")
      for k, v in (kwargs or {}).items()
    ]
    message += f"({', '.join(map(repr, parts))})"
  return message


def log_nested(env, message: str) -> None:
  _logger.info(message)


def log_mixed(name: str, tensor: torch.Tensor) -> None:
  """Log a tensor of another device among an operation's arguments."""
  _logger.info("%s met %s on %s", name, _describe(tensor), tensor.device)


def _on_cpu(tree):
  def move(value):
    if isinstance(value, torch.device):
      return torch.device("cpu")
    return mappings.j2t(value.jax()) if isinstance(value, Tensor) else value

  return torch_pytree.tree_map(move, tree)


def debug_accuracy(func, args, kwargs, current_output) -> bool:
  """Compare an operation's output on jax with CPU torch; log the differences.

  Returns:
    True if all outputs agree within the tolerances of `torch.testing`.
  """
  if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
    return True

  cpu_args, cpu_kwargs = _on_cpu((args, kwargs or {}))
  expected = torch_pytree.tree_leaves(func(*cpu_args, **cpu_kwargs))
  actual = torch_pytree.tree_leaves(_on_cpu(current_output))
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
  """Run an operation with the logging and checking set in the configuration."""
  config = env.config
  if config.debug_print_each_op:
    operands = config.debug_print_each_op_operands
    log_nested(env, _make_debug_msg(True, operands, func, args, kwargs))
  leaves = torch_pytree.tree_leaves((args, kwargs))
  if not config.debug_accuracy_for_each_op or any(map(_is_traced, leaves)):
    return dispatcher(func, args, kwargs)
  before = _on_cpu((args, kwargs))  # the operation may change its arguments
  output = dispatcher(func, args, kwargs)
  debug_accuracy(func, *before, output)
  return output


def _is_traced(value) -> bool:
  return isinstance(value, Tensor) and isinstance(value.jax(), jax.core.Tracer)
