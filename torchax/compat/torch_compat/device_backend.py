"""Registration of the device "jax" with torch: its name, kernels and hooks."""

import contextlib
import functools
import importlib
import sys
import threading

import torch
from torch.utils import backend_registration

from torchax.compat import private
from torchax.compat.patches import patch
from torchax.compat.torch_compat.wrappers import (
  AUTOCAST,
  AUTOCAST_KEYS,
  HIDDEN_DEVICE,
  HIDDEN_KEY,
  SHAPE_KEY,
)

BACKEND = "jax"

# Without a guard, torch refuses to move a module to the device.
_GUARD = "moving modules to the device"
_DeviceGuardBase = private.essential("torch._C._acc.DeviceGuard", _GUARD)
_register_guard = private.essential(
  "torch._C._acc.register_python_privateuseone_device_guard", _GUARD
)
_DEVICE_TYPE = private.essential("torch._C._autograd.DeviceType.PrivateUse1", _GUARD)
_ACCELERATOR = "torch.accelerator, and torch.compile of code on jax"
_HooksBase = private.find(
  "torch._C._acc.PrivateUse1Hooks", _ACCELERATOR, instead=object
)
_register_hooks = private.find(
  "torch._C._acc.register_python_privateuseone_hook", _ACCELERATOR, instead=None
)


class _DeviceGuard(_DeviceGuardBase):
  """Device guard without devices to switch in C++; see `accelerator.py`."""

  def type_(self):
    return _DEVICE_TYPE


class _Hooks(_HooksBase):
  """Hooks that report the backend as available, without creating a device context."""

  def is_available(self) -> bool:
    return True

  def has_primary_context(self, device_index: int) -> bool:
    return False

  def is_built(self) -> bool:
    return True


# torch keeps no reference to these objects.
_hooks, _guard = _Hooks(), _DeviceGuard()
_kernels = torch.library.Library("aten", "IMPL")

_name_of_backend = private.find(
  "torch._C._get_privateuse1_backend_name",
  "the error that another backend has taken torch's device",
  instead=lambda: BACKEND if hasattr(torch, BACKEND) else "privateuseone",
)


def _set_module(name: str, module) -> None:
  setattr(torch, name, module)
  sys.modules[f"torch.{name}"] = module  # for `import torch.jax`


_register_module = private.find(
  "torch._register_device_module",
  "importing torch.jax as a module",
  instead=_set_module,
)


def register_backend(device_module) -> None:
  """Name torch's device for out-of-tree backends "jax".

  Raises:
    RuntimeError: another backend of this process has taken that device.
  """
  backend = _name_of_backend()
  if backend not in ("privateuseone", BACKEND):
    raise RuntimeError(
      f"torch has one device for out-of-tree backends, and {backend!r} has taken it. "
      "Import torchax in a process without that backend."
    )
  if backend == BACKEND and hasattr(torch, BACKEND):
    return
  torch.utils.rename_privateuse1_backend(BACKEND)
  _register_module(BACKEND, device_module)
  backend_registration.generate_methods_for_privateuse1_backend(for_storage=False)
  patch(torch.nn.Module, "jax", _module_to, "Module.jax, which moves parameters")
  if _register_hooks and _HooksBase is not object:
    _register_hooks(_hooks)
  _register_device()


def _register_device() -> None:
  """Register a device of the backend with torch's C++.

  At its first backward pass autograd starts a thread for each registered device, and
  then fails in forked processes. This backend needs no such thread: in C++ its wrappers
  are on the hidden device. So autograd is started before the device is registered.
  """
  # A separate thread has none of the caller's modes.
  starting = threading.Thread(target=_start_autograd)
  starting.start()
  starting.join()
  _register_guard(_guard)


def _start_autograd() -> None:
  # Raises in a process forked from one with autograd threads, such as for a GPU.
  with contextlib.suppress(RuntimeError):
    torch.zeros((), device="cpu", requires_grad=True).backward()


def _module_to(self, device=None):
  """Move the parameters and buffers of a module to a jax device; see `Module.to`."""
  # torch's generated method calls `Tensor.jax(device)`, which returns an array here.
  device = torch.device(BACKEND, device) if isinstance(device, int) else device
  return self.to(BACKEND if device is None else device)


def register_kernel(name: str, kernel, key: str = "PrivateUse1") -> None:
  """Run `kernel` for `aten::name` when called with device="jax" and no jax tensor."""
  # torch has its own kernels for the keys of a wrapper.
  _kernels.impl(name, kernel, key, allow_override=key in (HIDDEN_KEY, SHAPE_KEY))


_fallbacks = torch.library.Library("_", "IMPL")
# Operations without an autocast kernel run unchanged.
_fallbacks.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


@functools.cache
def _autocast_kernels(namespace: str) -> torch.library.Library:
  return torch.library.Library(namespace, "IMPL", "AutocastPrivateUse1")


def register_autocast_kernel(overload, kernel) -> None:
  """Run `kernel(*args, **kwargs)` for an overload while autocast for jax is enabled.

  The kernel runs above autograd. It must call operations under `without_autocast`.
  """
  _autocast_kernels(overload.namespace).impl(overload, kernel)


_excluding = private.find("torch._C._ExcludeDispatchKeyGuard", AUTOCAST)


def without_autocast():
  """Return a context in which autocast for jax is disabled."""
  return _excluding(AUTOCAST_KEYS)


def require_autocast() -> None:
  """Raise PrivateApiError if `torch.autocast("jax")` would have no effect."""
  private.require(AUTOCAST)


_FOREACH = "the foreach implementations of optimizers and gradient clipping"
_group_tensors = private.find(
  "torch._C._group_tensors_by_device_and_dtype", _FOREACH, instead=None
)
_FOREACH_MODULES = ("torch.optim.optimizer", "torch.utils._foreach_utils")
_supported_types = [
  private.find(f"{module}._foreach_supported_types", _FOREACH, instead=None)
  for module in _FOREACH_MODULES
]


def _group_tensors_by_device_and_dtype(tensorlistlist, with_indices=False):
  """Group tensors by (device, dtype) like torch, with the devices that Python sees.

  C++ sees the hidden device of wrappers, for which torch rejects foreach.
  """
  groups = _group_tensors(tensorlistlist, with_indices)
  regrouped = {}
  for (device, dtype), (lists, indices) in groups.items():
    if device != HIDDEN_DEVICE:
      regrouped[device, dtype] = lists, indices
      continue
    rows: dict[torch.device, list[int]] = {}
    for row, tensor in enumerate(lists[0]):
      rows.setdefault(tensor.device, []).append(row)
    for device, chosen in rows.items():
      if len(rows) == 1:
        regrouped[device, dtype] = lists, indices
      else:
        parts = [[part[row] for row in chosen] if part else part for part in lists]
        regrouped[device, dtype] = parts, indices and [indices[row] for row in chosen]
  return regrouped


def support_foreach(*classes: type) -> None:
  """Make optimizers and `torch.nn.utils` use foreach for tensors of these classes.

  If torch lacks the private pieces, they process one tensor after the other.
  """
  if _group_tensors is None or None in _supported_types:
    return
  for module, supported in zip(_FOREACH_MODULES, _supported_types):
    owner = importlib.import_module(module)
    patch(owner, "_foreach_supported_types", [*supported, *classes], _FOREACH)
  name = "_group_tensors_by_device_and_dtype"
  patch(private.resolve("torch._C"), name, _group_tensors_by_device_and_dtype, _FOREACH)
