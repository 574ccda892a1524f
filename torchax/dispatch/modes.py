"""torch modes of an environment, for calls without a jax tensor among the arguments.

Most calls need no mode: the class of jax tensors handles functions and operations
(`Tensor.__torch_function__`, `__torch_dispatch__`), and torch calls our kernels for
factories (`functions/factories.py`). So an enabled environment costs CPU programs
nothing. Modes are entered if "cuda" means "jax", and while a function is traced
(`host_operations.py`).
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchax.compat import torch_compat
from torchax.devices import placement
from torchax.tensor import Tensor

_is_compiling = torch.compiler.is_compiling


def as_jax(device) -> torch.device:
  """Return the jax device for a "cuda" device, with its index; others unchanged."""
  device = torch.device(device)
  return placement.torch_device(device.index) if device.type == "cuda" else device


def _replace_cuda(value):
  if isinstance(value, str):
    return as_jax(value) if value.partition(":")[0] == "cuda" else value
  return as_jax(value) if isinstance(value, torch.device) else value


class XLAFunctionMode(TorchFunctionMode):
  """Mode that replaces "cuda" by "jax" in the arguments of torch functions.

  Args:
    env: the environment; nothing is replaced while it is suspended.
  """

  def __init__(self, env: Any):
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
    args = [_replace_cuda(arg) for arg in args]
    return func(*args, **{name: _replace_cuda(arg) for name, arg in kwargs.items()})


class XLADispatchMode(torch_compat.DispatchMode):
  """Mode that runs operations on jax tensors in one environment, whatever theirs is.

  Args:
    env: the environment.
  """

  def __init__(self, env: Any):
    super().__init__()
    self.env = env

  def __torch_dispatch__(self, func, types, args=(), kwargs=None):
    is_ours = any(issubclass(cls, Tensor) for cls in types)
    has_parts = torch_compat.with_parts(types, Tensor)
    if is_ours and not has_parts and not torch_compat.is_watched():
      return self.env.dispatch(func, types, args, kwargs)
    return func(*args, **(kwargs or {}))
