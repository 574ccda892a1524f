"""`torch.cond` on jax tensors, by `loops.cond`.

torch calls the operation with graphs for functions: inside of what `torch.compile`
captures, and eagerly by capturing the functions first. (`torch.while_loop` and its like
are not captured on wrappers of tensors; `interop.while_loop` and `scan` do their work.)
"""

import torch
from torch.utils import _pytree as torch_pytree

from torchax.environment import default_env
from torchax.interop import loops
from torchax.ops.names import higher_order, present
from torchax.tensor import Tensor
from torchax.view import View


def _cond(predicate, on_true, on_false, operands=()):
  operands = tuple(operands)
  if not isinstance(predicate, torch.Tensor):
    return (on_true if predicate else on_false)(*operands)
  return loops.cond(predicate.reshape(()), on_true, on_false, *operands)


_FUNCTIONS = present({higher_order.cond: _cond})


def register_functions(env) -> None:
  """Adds the operations to an environment's function table."""
  for operation, function in _FUNCTIONS.items():
    env.functions.add(operation, _Handler(operation, function))


class _Handler:
  """Runs an operation in place of torch where a tensor is on jax."""

  def __init__(self, operation, function):
    self.operation, self.function = operation, function

  def __call__(self, args, kwargs):
    leaves = torch_pytree.tree_leaves((args, kwargs))
    if any(isinstance(leaf, Tensor) for leaf in leaves):
      return self.function(*args, **kwargs)
    return self.operation(*args, **kwargs)


def register_kernels() -> None:
  """Has torch run the operations here for jax tensors outside of environments."""
  for operation, function in _FUNCTIONS.items():
    for cls in (Tensor, View):
      operation.py_impl(cls)(_enabled(function))


def _enabled(function):
  def run(*args, **kwargs):
    with default_env():
      return function(*args, **kwargs)

  return run
