"""Uninitialized parameters on jax, as in `torch.nn.LazyLinear`; state of optimizers.

Until its shape is known, a placeholder is an empty CPU tensor that stores its device.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from torchax.compat.patches import patch
from torchax.compat.torch_compat.device_backend import BACKEND


class _Placed:
  """Placeholder on the CPU that becomes a tensor on its stored device."""

  _device: torch.device

  @property
  def device(self) -> torch.device:
    return self._device

  def materialize(self, shape, device=None, dtype=None) -> None:
    """Become a tensor of a known shape, like `UninitializedParameter.materialize`."""
    tensor = torch.empty(
      shape, device=device or self._device, dtype=dtype or self.data.dtype
    )
    if isinstance(self, torch.nn.Parameter):
      tensor = torch.nn.Parameter(tensor, self.requires_grad)
    torch.utils.swap_tensors(self, tensor)

  def __deepcopy__(self, memo):
    if id(self) not in memo:
      copied = type(self).__base__(self.requires_grad, dtype=self.data.dtype)
      memo[id(self)] = _make_placeholder(copied, self._device)
    return memo[id(self)]


class _PlacedParameter(_Placed, UninitializedParameter):
  pass


class _PlacedBuffer(_Placed, UninitializedBuffer):
  pass


def _make_placeholder(tensor, device: torch.device):
  """Turn an uninitialized tensor into a placeholder for a device."""
  is_parameter = isinstance(tensor, torch.nn.Parameter)
  tensor.__class__ = _PlacedParameter if is_parameter else _PlacedBuffer
  tensor._device = device
  return tensor


@contextlib.contextmanager
def move_placeholders(module: torch.nn.Module, fn: Callable) -> Iterator[None]:
  """Move the placeholders of a module by `fn`; hide them from torch in the block."""
  hidden = []
  for tensors in (module._parameters, module._buffers):
    for name, tensor in tensors.items():
      if not is_lazy(tensor):
        continue
      example = fn(torch.empty(0, dtype=tensor.data.dtype, device=tensor.device))
      if BACKEND in (example.device.type, tensor.device.type):
        tensor.data = tensor.data.to(example.dtype)
        hidden.append((tensors, name, _make_placeholder(tensor, example.device)))
        tensors[name] = None
  try:
    yield
  finally:
    for tensors, name, tensor in hidden:
      tensors[name] = tensor


def place_new_placeholders() -> None:
  """Make `UninitializedParameter(device="jax")` and buffers create placeholders."""
  for cls in (UninitializedParameter, UninitializedBuffer):
    new = staticmethod(_with_placeholders(cls.__new__))
    patch(cls, "__new__", new, "lazy modules on jax")


def _with_placeholders(make: Callable) -> Callable:
  def new(cls, *args, **kwargs):
    arguments = inspect.signature(make).bind(cls, *args, **kwargs).arguments
    device = arguments.get("device")
    requested = torch.get_default_device() if device is None else torch.device(device)
    if requested.type != BACKEND:
      return make(cls, *args, **kwargs)
    return _make_placeholder(make(**{**arguments, "device": "cpu"}), requested)

  return new


def init_optimizer_group(optimizer: torch.optim.Optimizer, group: dict) -> None:
  """Create the state of a group's parameters, as the first step would.

  Do nothing if the class has no such method; its first step then creates the state.
  """
  init = getattr(optimizer, "_init_group", None)
  if init is None:
    return
  parameters = list(inspect.signature(init).parameters.values())[1:]
  if all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
    init(group, *[[] for _ in parameters])
