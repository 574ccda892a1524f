"""Conversions between tensors and arrays, as methods of `Environment`."""

from typing import Any

import jax
import torch
from torch.utils import _pytree as torch_pytree

from torchax.config import Configuration
from torchax.core import mappings
from torchax.devices import placement
from torchax.dispatch import debug, host_operations
from torchax.errors import MixedDeviceError
from torchax.tensor import Tensor, new_tensor
from torchax.types import Device
from torchax.view import View


class Conversions:
  """Base class of `Environment` with the conversions of values and trees.

  Attributes:
    config: configuration of the environment.
  """

  config: Configuration

  def admit(self, tensor: torch.Tensor, name: str, cpu_ok: bool = False) -> jax.Array:
    """Convert an operand that is not on jax to an array.

    Args:
      tensor: the operand, of any shape.
      name: name of the operation, for errors.
      cpu_ok: True to accept CPU tensors of any shape.

    Raises:
      MixedDeviceError: `tensor` is not a 0-d CPU tensor, the kind that torch allows.
      UnsupportedDtypeError: `tensor` is a nested tensor, whose parts may be on jax.
    """
    if tensor.is_nested:
      mappings.check_layout(tensor)
    scalar_ok = self.config.allow_mixed_math_with_scalar_tensor and not tensor.dim()
    if tensor.device.type == "cpu" and (cpu_ok or scalar_ok):
      host_operations.guard_on_read(tensor)
      return mappings.t2j(tensor)
    if self.config.debug_mixed_tensor:
      debug.log_mixed(name, tensor)
    way = 'Move it with `.to("jax")`, or the others with `.cpu()`.'
    if tensor.device.type == "meta":
      way = "There are no numbers to move: make it on jax."
    raise MixedDeviceError(
      f"{name} expects all tensors on jax, but one of shape {list(tensor.shape)} and "
      f"{tensor.dtype} is on {tensor.device}. {way}"
    )

  def t2j_iso(self, torchtensors: Any) -> Any:
    """Convert jax tensors in a tree to arrays, without copying.

    Args:
      torchtensors: tree of values; torch dtypes become JAX's, others are unchanged.

    Raises:
      MixedDeviceError: a tensor is on another device, except a 0-d CPU tensor.

    >>> torchax.default_env().t2j_iso({"x": torch.ones(1, device="jax")})
    {'x': Array([1.], dtype=float32)}
    """

    def convert(value):
      if isinstance(value, Tensor):
        return value.jax()
      if isinstance(value, torch.Tensor):
        return self.admit(value, "t2j_iso")
      if isinstance(value, torch.dtype):
        return mappings.t2j_dtype(value)
      return value

    return torch_pytree.tree_map(convert, torchtensors)

  def j2t_iso(self, jaxarray: Any) -> Any:
    """Convert arrays in a tree to jax tensors, without copying.

    Args:
      jaxarray: tree of values; those that are no arrays are unchanged.

    >>> torchax.default_env().j2t_iso([jnp.ones(1), "a"])
    [tensor([1.], device='jax:0'), 'a']
    """
    return torch_pytree.tree_map(
      lambda value: new_tensor(value, self) if isinstance(value, jax.Array) else value,
      jaxarray,
    )

  def v2t_iso(self, views: Any) -> Any:
    """Copy views in a tree to tensors with their own memory.

    Args:
      views: tree of values; those that are no `View` are unchanged.

    >>> torchax.default_env().v2t_iso([2, torch.ones(1, device="jax")])
    [2, tensor([1.], device='jax:0')]
    """
    return torch_pytree.tree_map(
      lambda value: value.torch() if isinstance(value, View) else value, views
    )

  def t2j_copy(self, args: Any) -> Any:
    """Copy CPU tensors in a tree to arrays.

    Args:
      args: tree of values; arrays of jax tensors are not copied.

    >>> torchax.default_env().t2j_copy({"x": torch.ones(1)})
    {'x': Array([1.], dtype=float32)}
    """

    def convert(value):
      if isinstance(value, Tensor):
        return value.jax()
      return mappings.t2j(value) if isinstance(value, torch.Tensor) else value

    return torch_pytree.tree_map(convert, args)

  def j2t_copy(self, args: Any) -> Any:
    """Copy arrays and tensors in a tree to CPU tensors.

    Args:
      args: tree of values; those that are neither are unchanged.

    >>> torchax.default_env().j2t_copy({"x": jnp.ones(1)})
    {'x': tensor([1.])}
    """
    return torch_pytree.tree_map(
      lambda value: (
        mappings.j2t(value) if isinstance(value, jax.Array | torch.Tensor) else value
      ),
      args,
    )

  def to_xla(self, torchvalues: Any) -> Any:
    """Copy CPU tensors in a tree to jax tensors; move modules.

    Args:
      torchvalues: tree of values; jax tensors and other values are unchanged.

    >>> torchax.default_env().to_xla([torch.ones(1), "a"])
    [tensor([1.], device='jax:0'), 'a']
    """
    return torch_pytree.tree_map(self._move_one_value, torchvalues)

  def _move_one_value(self, val):
    if isinstance(val, torch.nn.Module):
      return val.to("jax")
    if isinstance(val, Tensor) or not isinstance(val, torch.Tensor):
      return val
    return self.copy_to_jax(val)

  def copy_to_jax(
    self,
    tensor: torch.Tensor,
    device: Device = None,
    dtype: torch.dtype | None = None,
  ) -> Tensor:
    """Copy a CPU tensor to jax.

    Args:
      tensor: tensor of any shape.
      device: a jax device; without an index, and by default, the current one.
      dtype: dtype of the copy; by default that of `tensor`.

    >>> torchax.default_env().copy_to_jax(torch.ones(1), dtype=torch.float16)
    tensor([1.], dtype=torch.float16, device='jax:0')
    """
    array = self.array_of(tensor, placement.target_of(device), dtype)
    return new_tensor(array, self)

  @staticmethod
  def array_of(tensor: torch.Tensor, target, dtype=None) -> jax.Array:
    """Copy a CPU tensor to an array; `target` is from `placement.target_of`."""
    host_operations.guard_on_read(tensor)
    return placement.make(lambda: mappings.t2j(tensor, dtype=dtype), target)
