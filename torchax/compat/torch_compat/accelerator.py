"""`torch.accelerator`, `fork_rng`, `flex_attention` and others, answered in Python.

Of this backend, C++ knows one device without memory and streams. The names here are
attributes of modules of torch, and hold for the whole process.
"""

import functools
import importlib
import inspect

import torch

from torchax.compat import private
from torchax.compat.patches import patch
from torchax.compat.torch_compat.device_backend import BACKEND

_FEATURE = "torch.accelerator on jax"
# First version of torch that has the function.
_SINCE = {"emptyHostCache": "2.12"}


def answer_for_accelerator(answers: dict) -> None:
  """Make `torch.accelerator` call Python; some calls would crash in C++.

  Args:
    answers: replacement by the last part of the name, such as "getDeviceIndex", with
      the same arguments. Functions that this torch lacks are skipped.
  """
  owner = private.resolve("torch._C")
  for name, answer in answers.items():
    path = f"torch._C._accelerator_{name}"
    if private.find(path, _FEATURE, instead=None, since=_SINCE.get(name)):
      patch(owner, f"_accelerator_{name}", answer, _FEATURE)


_DATA_PARALLEL = "torch.nn.parallel.data_parallel"
_REPLICAS = "torch.nn.DataParallel of modules on jax"
_available_device_type = private.find(
  f"{_DATA_PARALLEL}._get_available_device_type", _REPLICAS, instead=None
)


def leave_data_parallel_alone() -> None:
  """Make `torch.nn.DataParallel` call its module directly, as on the CPU.

  torch would look for kernels that copy modules to the other devices.
  """
  if _available_device_type is None:
    return

  @functools.wraps(_available_device_type)
  def _get_available_device_type():
    device_type = _available_device_type()
    return None if device_type == BACKEND else device_type

  # Not by attributes: a function of its name hides the module.
  module = importlib.import_module(_DATA_PARALLEL)
  patch(module, "_get_available_device_type", _get_available_device_type, _REPLICAS)


_fork_rng = torch.random.fork_rng


def fork_one_stream() -> None:
  """Make `torch.random.fork_rng` save the random state of jax once, by default.

  All devices share one state. Counting devices, as torch does, would initialize JAX.
  """

  # torch 2.11 saves the state of CUDA devices by default, later ones the accelerator's.
  default = inspect.signature(_fork_rng).parameters["device_type"].default

  @functools.wraps(_fork_rng)
  def fork_rng(devices=None, *args, **kwargs):
    kind = kwargs.get("device_type", args[3] if len(args) > 3 else default)
    if devices is None and kind in (None, BACKEND):
      devices = [0]
    return _fork_rng(devices, *args, **kwargs)

  patch(torch.random, "fork_rng", fork_rng, "the random state of jax in fork_rng")


# The method of C++; `resolve_in_to` replaces it.
tensor_to = torch.Tensor.to


@functools.wraps(tensor_to)
def resolving_to(self, *args, **kwargs):
  """Call `Tensor.to` with a device that has its index."""
  args = [resolving_to.resolve(arg) for arg in args]
  kwargs = {name: resolving_to.resolve(arg) for name, arg in kwargs.items()}
  return tensor_to(self, *args, **kwargs)


def resolve_in_to(resolve) -> None:
  """Make `Tensor.to` move to `resolve(device)`.

  C++ reads a device of this backend without an index as the first one.
  """
  resolving_to.resolve = resolve
  patch(torch.Tensor, "to", resolving_to, "the current device of several, in Tensor.to")


_FLEX = "torch.nn.attention.flex_attention on jax"
_validate_device = private.find(
  "torch.nn.attention.flex_attention._validate_device", _FLEX, instead=None
)


def accept_jax_in_flex_attention() -> None:
  """Make `flex_attention` accept jax tensors; torch has a fixed list of devices."""
  if _validate_device is None:
    return

  @functools.wraps(_validate_device)
  def validate_device(query, key, value):
    if query.device.type != BACKEND:
      _validate_device(query, key, value)

  owner = private.resolve("torch.nn.attention.flex_attention")
  patch(owner, "_validate_device", validate_device, _FLEX)


# torch's implementation by plain operations, which computes the whole matrix of scores.
unfused_flex_attention = private.find(
  "torch._higher_order_ops.flex_attention.math_attention", _FLEX
)
