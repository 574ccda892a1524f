"""Making tensors with device="jax", with or without an enabled environment.

torch parses the call and hands it to a kernel of its out-of-tree backend, which runs
the lowering. `torch.tensor` keeps Python from seeing its copy, so it needs the
environment; without it, it raises instead of losing its data.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax import _jax_compat, _torch_compat
from torchax.devices import placement
from torchax.dispatch import host_operations
from torchax.environment import TENSOR_CONSTRUCTORS, Environment, as_jax, default_env
from torchax.errors import MixedDeviceError, UnsupportedDtypeError
from torchax.ops import mappings
from torchax.ops.names import aten
from torchax.tensor import Tensor, new_tensor

# ATen factories whose lowerings run as they are.
_LOWERED = (
  "ones",
  "zeros",
  "full",
  "arange",
  "arange.start",
  "arange.start_step",
  "linspace",
  "eye",
  "eye.m",
  "rand",
  "rand.generator",
  "randn",
  "randn.generator",
  "randint",
  "randint.low",
  "randint.generator",
  "randint.low_generator",
  "randperm",
  "randperm.generator",
  "logspace",
  "scalar_tensor",
  "tril_indices",
  "triu_indices",
)


# What torch calls for sparse and quantised tensors, and the key it calls it with.
_UNSUPPORTED = (
  ("empty.memory_format", "SparsePrivateUse1"),
  ("empty.memory_format", "SparseCsrPrivateUse1"),
  ("empty.memory_format", "QuantizedPrivateUse1"),
  ("empty_quantized", "QuantizedPrivateUse1"),
)


def _overload(name: str):
  packet, _, overload = name.partition(".")
  return getattr(getattr(aten, packet), overload or "default")


def _lowered_kernel(op) -> Callable:
  def kernel(*args, **kwargs):
    return default_env().dispatch(op, (), args, kwargs)

  return kernel


def _empty(size, *, dtype=None, device=None, **_ignored) -> Tensor:
  """Zeros: JAX has no uninitialised memory. Made on the host, so nothing compiles."""
  # Nothing is lost where there is no data; `torch.get_default_device` does that.
  if any(length < 0 for length in size):
    raise RuntimeError(
      f"Trying to create tensor with negative dimension {min(size)}: {list(size)}"
    )
  if _torch_compat.dispatch_is_excluded() and math.prod(size):
    raise MixedDeviceError(
      'torch.tensor(…, device="jax") and torch.as_tensor need the environment: call '
      'them inside `with torchax.default_env():`, or write `torch.tensor(…).to("jax")`.'
    )
  asked, dtype = dtype, mappings.t2j_dtype(dtype or torch.get_default_dtype())
  if _jax_compat.is_staging():
    return new_tensor(jnp.zeros(size, dtype), default_env())
  chosen = placement.layout()
  spread = None if chosen is None else chosen(tuple(size))
  if spread is not None:
    return new_tensor(jnp.zeros(size, dtype, device=spread), default_env())
  target = placement.target_of(device)
  tensor = new_tensor(jax.device_put(np.zeros(size, dtype), target), default_env())
  if size == [0] and asked not in (None, tensor.dtype):
    tensor._asked_dtype = asked  # `torch.load` makes one, and gives it a storage
  return tensor


def _empty_strided(size, stride, **kwargs) -> Tensor:
  return _empty(size, **kwargs)


def _unsupported(*args, **kwargs):
  raise UnsupportedDtypeError(
    "torchax holds dense and plain tensors, but was asked for a sparse or quantised "
    "one. Make it on the CPU; `.to_dense()` or `.dequantize()` it before moving it."
  )


def _pinned(tensor: torch.Tensor, device=None) -> torch.Tensor:
  """The same memory: JAX reads any of the host, and knows none that is pinned."""
  return tensor.detach()


def register_kernels() -> None:
  """Tells torch what runs for factories with device="jax"."""
  _torch_compat.register_kernel("_pin_memory", _pinned, "CPU")
  _torch_compat.register_kernel("empty.memory_format", _empty)
  _torch_compat.register_kernel("empty_strided", _empty_strided)
  for name, key in _UNSUPPORTED:
    _torch_compat.register_kernel(name, _unsupported, key)
  for name in _LOWERED:
    op = _overload(name)
    if not op:
      continue
    _torch_compat.register_kernel(name, _lowered_kernel(op))
    Environment.lowered_factories.add(op)


_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)


class _FromData:
  """`torch.tensor`, `as_tensor` and `asarray` with device="jax", or of jax tensors."""

  def __init__(self, func, env: Environment):
    self.func = func
    self.env = env

  def __call__(self, args, kwargs):
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    host_operations.note(data)
    device = kwargs.get("device")
    if self.func is not torch.tensor and isinstance(data, Tensor) and device is None:
      device = "jax"
    if type(data) in (list, tuple):
      args = (_with_numbers(data), *args[1:])
      kwargs = {k: v for k, v in kwargs.items() if k not in ("data", "obj")}
    if not self.env._should_use_torchax_tensor(device):
      # No memory is pinned: see `XLADispatchMode`, which does not see this one.
      plain = {k: v for k, v in kwargs.items() if k != "pin_memory"}
      return self.func(*args, **plain)
    if isinstance(data, Tensor):
      return self._from_jax_tensor(data, **kwargs)
    if isinstance(data, jax.Array):
      tensor = new_tensor(data, self.env)
      return self._from_jax_tensor(tensor, **kwargs)
    on_cpu = self.func(*args, **{**_options(kwargs), "device": "cpu"})
    tensor = self.env.moved(on_cpu, as_jax(device or torch.get_default_device()))
    return tensor.requires_grad_() if kwargs.get("requires_grad") else tensor

  def _from_jax_tensor(
    self, tensor, dtype=None, requires_grad=False, copy=None, device=None, **_ignored
  ):
    if device is not None:
      tensor = tensor.to(device)
    if self.func is not torch.tensor and not copy:
      return tensor.to(dtype) if dtype is not None else tensor
    copied = tensor.detach().clone()
    copied = copied if dtype is None else copied.to(dtype)
    return copied.requires_grad_() if requires_grad else copied


def _with_numbers(data: list | tuple) -> list:
  """Nested sequences with their jax tensors on the CPU, where torch can read them."""
  return [
    _with_numbers(part)
    if type(part) in (list, tuple)
    else part.detach().cpu()
    if isinstance(part, Tensor)
    else part
    for part in data
  ]


def _options(kwargs):
  return {k: v for k, v in kwargs.items() if k not in ("requires_grad", "pin_memory")}


_SPARSE_FACTORIES = (
  torch.sparse_coo_tensor,
  torch.sparse_csr_tensor,
  torch.sparse_csc_tensor,
  torch.sparse_bsr_tensor,
  torch.sparse_bsc_tensor,
  torch.sparse_compressed_tensor,
)


def _refused_on_jax(func, env: Environment) -> Callable:
  def make(args, kwargs):
    device = kwargs.get("device")
    if device is not None and env._should_use_torchax_tensor(device):
      _unsupported()
    return func(*args, **kwargs)

  return make


def register_functions(env: Environment) -> None:
  """Adds to an environment what torch does with devices: factories, `to`, `cuda`."""
  for func in (*TENSOR_CONSTRUCTORS, torch.normal):
    if func in _FROM_DATA:
      env.functions.add(func, _FromData(func, env))
    else:
      env.functions.add(func, _constructor(func, env))
  for func in host_operations.READS:
    env.functions.add(func, host_operations.noted(func))
  for func in _SPARSE_FACTORIES:
    env.functions.add(func, _refused_on_jax(func, env))
  for function in (_torch_compat.tensor_to, _torch_compat.resolving_to):
    env.functions.add(function, _to(env))
  env.functions.add(_torch_compat.parse_to, _parse_to)
  env.functions.add(torch.Tensor.cuda, _cuda(env))
  env.functions.add(_DEVICE, _device)


# What torch hands to function modes where `tensor.device` is read.
_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]


def _device(args, kwargs) -> torch.device:
  """The device of what a transform of `torch.func` has wrapped: C++ says meta."""
  return _torch_compat.innermost(args[0]).device


# Factories of a size alone, which need not go through torch's parser.
_BY_SIZE = {
  torch.ones: aten.ones.default,
  torch.zeros: aten.zeros.default,
  torch.rand: aten.rand.default,
  torch.randn: aten.randn.default,
}
_JAX_NAMES = frozenset({"jax", "jax:0"})


def _size_of(args) -> list[int] | None:
  """The size in `f(2, 3)` or `f((2, 3))`; None if torch has to look at it."""
  if len(args) == 1 and isinstance(args[0], tuple | list):
    args = args[0]
  size = list(args)
  return size if all(type(n) is int and n >= 0 for n in size) else None


def _constructor(func, env) -> Callable:
  by_size = _BY_SIZE.get(func)

  def construct(args, kwargs):
    device = kwargs.get("device")
    if device is None:
      return func(*args, **kwargs)
    if isinstance(kwargs.get("out"), Tensor) and env._should_use_torchax_tensor(device):
      # torch would compare it with the wrapper's meta device.
      return func(*args, **{k: v for k, v in kwargs.items() if k != "device"})
    if by_size is not None and len(kwargs) == 1 and device in _JAX_NAMES:
      size = _size_of(args)
      if size is not None and not _torch_compat.is_transforming():
        placed = None if device == "jax" else {"device": placement.torch_device(0)}
        return env.dispatch(by_size, (), (size,), placed)
    kind = torch.device(device).type
    if kind == "meta":
      with env.meta_is_meant():
        return func(*args, **kwargs)
    if kind == "cuda":
      return env._handle_tensor_constructor(func, args, kwargs)
    return func(*args, **kwargs)

  return construct


def _parse_to(args, kwargs):
  """What `Module.to` is asked for: C++ would take the wrapper's device, meta."""
  if args and isinstance(args[0], Tensor):
    args = (args[0].device, args[0].dtype, *args[1:])
  return _torch_compat.parse_to(*args, **kwargs)


def _to(env) -> Callable:
  def to(args, kwargs):
    tensor = args[0]
    if isinstance(tensor, Tensor):
      return env._torch_Tensor_to(args, kwargs)
    for value in (*args[1:], *kwargs.values()):
      is_device = isinstance(value, str | torch.device)
      if isinstance(value, Tensor) or (
        is_device and env._should_use_torchax_tensor(value)
      ):
        return env._torch_Tensor_to(args, kwargs)
    return _torch_compat.tensor_to(*args, **kwargs)

  return to


def _cuda(env) -> Callable:
  def cuda(args, kwargs):
    if env._should_use_torchax_tensor("cuda"):
      device = args[1] if len(args) > 1 else kwargs.get("device")
      index = (
        device if isinstance(device, int) else torch.device(device or "cuda").index
      )
      return env._torch_Tensor_to((args[0], placement.torch_device(index)), {})
    return torch.Tensor.cuda(*args, **kwargs)

  return cuda
