"""Modes of torch: what sees calls that have no jax tensor among their arguments.

Jax tensors need none: their class handles torch's functions and operations
(`Tensor.__torch_function__`, `__torch_dispatch__`), and torch hands factories to our
kernels (`factories.py`). So an environment that is on costs programs on the CPU
nothing. Modes are entered where "cuda" means "jax", and while a function is traced
(`host_operations.py`).
"""

import torch
from torch.overrides import TorchFunctionMode

from torchax.compat import torch_compat
from torchax.devices import placement
from torchax.tensor import Tensor

_is_compiling = torch.compiler.is_compiling


def as_jax(device) -> torch.device:
  """The jax device that "cuda" stands for, with its index; any other as it is."""
  device = torch.device(device)
  return placement.torch_device(device.index) if device.type == "cuda" else device


def _translated(value):
  """An argument of a torch function, with "cuda" replaced by "jax"."""
  if isinstance(value, str):
    return as_jax(value) if value.partition(":")[0] == "cuda" else value
  return as_jax(value) if isinstance(value, torch.device) else value


class XLAFunctionMode(TorchFunctionMode):
  """Replaces "cuda" by "jax" among the arguments of torch functions.

  Args:
    env: the environment; nothing is replaced where it is suspended.
  """

  def __init__(self, env):
    super().__init__()
    self.env = env

  def __torch_function__(self, func, types, args=(), kwargs=None):
    kwargs = kwargs or {}
    if _is_compiling() or not self.env._should_use_torchax_tensor("cuda"):
      return func(*args, **kwargs)
    if func is torch.Tensor.cuda:
      device = args[1] if len(args) > 1 else kwargs.get("device")
      if not isinstance(device, int):
        device = torch.device(device or "cuda").index
      return args[0].to(placement.torch_device(device))
    args = [_translated(arg) for arg in args]
    return func(*args, **{name: _translated(arg) for name, arg in kwargs.items()})


class XLADispatchMode(torch_compat.DispatchMode):
  """Runs operations on jax tensors by an environment, whichever theirs is.

  Args:
    env: the environment.
  """

  def __init__(self, env):
    super().__init__()
    self.env = env

  def __torch_dispatch__(self, func, types, args=(), kwargs=None):
    if any(issubclass(cls, Tensor) for cls in types) and not torch_compat.is_watched():
      return self.env.dispatch(func, types, args, kwargs)
    return func(*args, **(kwargs or {}))
