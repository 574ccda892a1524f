"""The modes of an environment: what torch asks before it runs something.

Jax tensors work without them, since their class handles their operations. These catch
what has no jax tensor among its arguments, and torch functions above ATen.
"""

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchax import _jax_compat, _torch_compat
from torchax.core.storage import active
from torchax.diagnostics.tracebacks import hide
from torchax.dispatch import device_plans, host_operations
from torchax.ops.names import aten
from torchax.tensor import Tensor
from torchax.view import View

_is_compiling = torch.compiler.is_compiling
META_FACTORIES = frozenset(
  {
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.eye.default,
    aten.eye.m,
    aten.full.default,
    aten.linspace.default,
    aten.ones.default,
    aten.scalar_tensor.default,
    aten.zeros.default,
    aten._efficientzerotensor.default,
  }
)


def _are_foreign(types) -> bool:
  """Whether one of the classes handles torch's functions itself.

  Those of other libraries do, around tensors of any device, and come first.
  """
  return bool(types) and any(map(_handles_functions, types))


@functools.lru_cache(maxsize=1024)  # it keeps the classes
def _handles_functions(cls: Any) -> bool:
  if cls.__module__.startswith("torch.nested."):
    return False  # torch's own; they are refused by name
  if issubclass(cls, _jax_compat.ArrayImpl | _jax_compat.Tracer):
    return False  # they only explain what torch refuses (`conversion_errors.py`)
  tensor: Any = torch.Tensor
  handler = getattr(cls.__torch_function__, "__func__", None)
  return handler not in (None, tensor.__torch_function__.__func__)


class XLAFunctionMode(TorchFunctionMode):
  """Sends torch functions to the environment's function table.

  Args:
    env: the environment.
    always: also where the environment is off.
  """

  def __init__(self, env, always: bool = False):
    super().__init__()
    self.env = env
    self._always = always

  def __torch_function__(self, func, types, args=(), kwargs=None):
    if _is_compiling():  # Dynamo reads this: its graph holds torch's own functions
      return func(*args, **kwargs) if kwargs else func(*args)
    try:
      handler = self.env.functions.get(func)
      is_on = handler is not None and (self._always or self.env.enabled)
      if is_on and not _are_foreign(types):
        return handler(args, kwargs or {})
      return func(*args, **kwargs) if kwargs else func(*args)
    except Exception as error:
      hide(error)
      raise


class XLADispatchMode(_torch_compat.DispatchMode):
  """Sends ATen operations on jax tensors to the environment.

  Their class does this by itself. The mode also catches the tensors that torch's C++
  makes "on the device of" a jax tensor (zeros in a gradient formula, the scalar of
  `torch.where`): C++ sees the wrapper's device, meta, and asks for a meta tensor.

  Args:
    env: the environment.
    always: catches them also where the environment is off.
  """

  def __init__(self, env, always: bool = False):
    super().__init__()
    self.env = env
    self._always = always

  def __torch_dispatch__(self, func, types, args=(), kwargs=None):
    try:
      for cls in types:
        if cls is Tensor or cls is View:
          if _torch_compat.is_watched():  # the mode below is to see it as well
            return func(*args, **(kwargs or {}))
          return self.env.dispatch(func, types, args, kwargs)
      if kwargs is None:
        if active.boundary is not None:
          return host_operations.run(active.boundary, func, args, {})
        return func(*args)
      device = kwargs.get("device")
      if kwargs.get("pin_memory") and (device is None or device.type == "cpu"):
        # JAX reads any memory of the host. torch would ask C++ for pinned memory.
        kwargs = {**kwargs, "pin_memory": False}
      if device is not None:
        kind = device.type
        if _torch_compat.is_tracing():
          return func(*args, **kwargs)
        is_caught = self._always or self.env.enabled
        if kind == "meta" and is_caught and self.env._is_for_jax(func):
          return device_plans.made_by_torch(self.env, func, types, args, kwargs)
        is_dense = kwargs.get("layout") in (None, torch.strided)
        if kind == "jax" and is_dense and func in self.env.lowered_factories:
          return self.env.dispatch(func, types, args, kwargs)
      if active.boundary is not None:
        return host_operations.run(active.boundary, func, args, kwargs)
      return func(*args, **kwargs)
    except Exception as error:
      hide(error)
      raise
