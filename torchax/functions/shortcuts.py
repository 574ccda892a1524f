"""Shortcuts from frequent torch functions to their plan, without torch's C++.

If a function has the same arguments as its ATen operation, the handler calls that
operation's plan, which halves the cost of an eager call. Calls with a gradient to
record or keyword arguments go through torch, and so do all under another mode or
torch's profiler. In-place functions always do: torch counts writes to protect saved
tensors.
"""

from collections.abc import Callable

import jax.numpy as jnp
import torch
import torch.nn.functional as F

from torchax.compat import torch_compat
from torchax.dispatch.torch_functions import WithoutOut, is_for_torch
from torchax.registry.names import aten
from torchax.tensor import Tensor
from torchax.view import View

_BINARY = {"add": aten.add, "sub": aten.sub, "mul": aten.mul, "div": aten.div}
_UNARY = {
  "clone": aten.clone,
  "exp": aten.exp,
  "neg": aten.neg,
  "relu": aten.relu,
  "sigmoid": aten.sigmoid,
  "sqrt": aten.sqrt,
  "tanh": aten.tanh,
}
_NUMBERS = frozenset({int, float})


class Shortcut:
  """Handler that runs a torch function as an ATen operation if the call is plain.

  Args:
    func: the torch function.
    op: the overload with the same positional arguments.
    count: number of arguments.
    env: the environment.
  """

  def __init__(self, func: Callable, op, count: int, env):
    self.func = func
    self.op = op
    self.count = count
    self.env = env

  def is_plain(self, args) -> bool:
    """Return True for jax tensors and numbers, a tensor first, without gradients."""
    records = torch.is_grad_enabled()
    for arg in args:
      cls = type(arg)
      if cls is Tensor or cls is View:
        if records and arg.requires_grad:
          return False
      elif cls not in _NUMBERS or arg is args[0]:
        return False
    return not (
      torch_compat.dispatch_depth()
      or torch_compat.forward_ad_is_on()
      or torch_compat.is_profiling()
    )

  def __call__(self, args, kwargs):
    if not kwargs and len(args) == self.count and self.is_plain(args):
      return self.env.dispatch(self.op, (), args, None)
    return self._run_torch(args, kwargs)

  def _run_torch(self, args, kwargs):
    return self.func(*args, **kwargs)


class MatmulShortcut(Shortcut):
  """Shortcut of matrix products to `mm`; torch decomposes other shapes.

  Stacks with several batch dimensions, such as (batch, heads), are one product here:
  torch would merge the dimensions, and stacks sharded over both would be gathered.
  """

  def _run_torch(self, args, kwargs):
    is_usual = not kwargs and len(args) == 2 and self._has_batch_dims(*args)
    if is_usual and not is_for_torch(args, kwargs):
      return self.env.functions.call(jnp.matmul, *args)
    return WithoutOut(self.func)(args, kwargs)

  @staticmethod
  def _has_batch_dims(left, right) -> bool:
    return (
      isinstance(left, Tensor)
      and isinstance(right, Tensor)
      and left.dim() == right.dim() >= 4
      and left.shape[:-2] == right.shape[:-2]
      and left.shape[-1] == right.shape[-2]
      and left.dtype == right.dtype
    )

  def is_plain(self, args) -> bool:
    return (
      super().is_plain(args)
      and isinstance(args[1], Tensor)
      and args[0].dim() == args[1].dim() == 2
    )


def register_functions(env) -> None:
  for name, packet in _BINARY.items():
    for func in (getattr(torch, name), getattr(torch.Tensor, name)):
      env.functions.add(func, Shortcut(func, packet.Tensor, 2, env))
  for name, packet in _UNARY.items():
    for func in (getattr(torch, name), getattr(torch.Tensor, name)):
      env.functions.add(func, Shortcut(func, packet.default, 1, env))
  for func in (F.gelu, F.relu):
    op = aten.gelu.default if func is F.gelu else aten.relu.default
    env.functions.add(func, Shortcut(func, op, 1, env))
  for func in (torch.linalg.matmul, torch.linalg.matrix_rank):
    env.functions.add(func, WithoutOut(func))
  for func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
    env.functions.add(func, MatmulShortcut(func, aten.mm.default, 2, env))
