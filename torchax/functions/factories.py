"""Kernels of factories on jax, such as `torch.ones(2, device="jax")`.

torch parses the call and calls the device's kernel, which runs the lowering. torch's
C++ also creates tensors on the hidden device of wrappers: zeros of a gradient formula,
the number in `torch.where(mask, x, 0.0)`, or `type_as`. These mix with tensors of any
device. `torch.tensor` would copy into its new tensor where Python cannot see it: it
makes a CPU tensor first (`move_new_tensors_from_cpu`).
"""

from collections.abc import Callable

import jax.numpy as jnp
import torch

from torchax.compat import jax_compat, torch_compat
from torchax.core import mappings
from torchax.core.chains import WHOLE
from torchax.core.storage import LazyZeros
from torchax.devices import placement
from torchax.dispatch import device_plans, transfer
from torchax.environment import TENSOR_CONSTRUCTORS, Environment, env_on
from torchax.errors import UnsupportedDtypeError
from torchax.registry.names import aten
from torchax.tensor import Tensor, new_tensor

# ATen factories whose kernel calls the lowering.
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
  "kaiser_window",
  "kaiser_window.periodic",
  "kaiser_window.beta",
  "tril_indices",
  "triu_indices",
  "_efficientzerotensor",
)

# Operations that torch calls for sparse, quantised and nested tensors, with their
# dispatch keys.
_UNSUPPORTED = (
  ("empty.memory_format", "SparsePrivateUse1"),
  ("empty.memory_format", "SparseCsrPrivateUse1"),
  ("empty.memory_format", "QuantizedPrivateUse1"),
  ("empty_quantized", "QuantizedPrivateUse1"),
  ("_to_copy", "NestedTensorPrivateUse1"),
)


def _overload(name: str):
  packet, _, overload = name.partition(".")
  return getattr(getattr(aten, packet), overload or "default")


def _lowered_kernel(op) -> Callable:
  def kernel(*args, **kwargs):
    return env_on().dispatch(op, (), args, kwargs)

  return kernel


def _internal_kernel(op) -> Callable:
  def kernel(*args, **kwargs):
    return device_plans.run_internal_factory(env_on(), op, (), args, kwargs)

  return kernel


def _empty(size, *, dtype=None, device=None, **_ignored) -> torch.Tensor:
  """Return zeros, since JAX has no uninitialised memory; compile nothing."""
  if any(length < 0 for length in size):
    raise RuntimeError(
      f"Trying to create tensor with negative dimension {min(size)}: {list(size)}"
    )
  dtype = dtype or torch.get_default_dtype()
  env = env_on()
  asked, dtype = dtype, mappings.t2j_dtype(dtype)
  if jax_compat.is_staging():
    return new_tensor(jnp.zeros(size, dtype), env)
  chosen = placement.layout()
  spread = None if chosen is None else chosen(tuple(size))
  if spread is not None:
    return new_tensor(jnp.zeros(size, dtype, device=spread), env)
  tensor = torch_compat.make_wrapper(Tensor, size, dtype=mappings.j2t_dtype(dtype))
  # The zeros are created when they are first read.
  tensor._storage = LazyZeros.of(tuple(size), dtype, placement.target_of(device))
  tensor._chain, tensor._env = WHOLE, env
  if size == [0] and asked != tensor.dtype:
    tensor._asked_dtype = asked  # `torch.load` makes one, then calls `set_`
  return tensor


def _empty_strided(size, stride, **kwargs) -> torch.Tensor:
  return _empty(size, **kwargs)


def _internal_empty(size, *, device=None, **kwargs) -> torch.Tensor:
  with placement.using_default():
    return device_plans.mark_without_device(_empty(size, **kwargs))


def _internal_empty_strided(size, stride, **kwargs) -> torch.Tensor:
  return _internal_empty(size, **kwargs)


def _item(tensor: torch.Tensor):
  """Return the number of a tensor, for `torch.tensor([x, 1.0])` below dispatch."""
  if isinstance(tensor, Tensor):
    return transfer.item(tensor)
  raise RuntimeError("Tensor.item() cannot be called on meta tensors")


def _refuse(*args, **kwargs):
  raise UnsupportedDtypeError(
    "torchax holds dense and plain tensors, but was asked for a sparse, quantised or "
    "nested one. Make it on the CPU, and call `.to_dense()`, `.dequantize()` or "
    "`.to_padded_tensor(0.0)` before moving it."
  )


def _pin_memory(tensor: torch.Tensor, device=None) -> torch.Tensor:
  """Return the same memory: JAX does not distinguish pinned memory."""
  return tensor.detach()


def register_kernels() -> None:
  """Register the kernels of factories for both devices, "jax" and the hidden one."""
  torch_compat.move_new_tensors_from_cpu()
  register = torch_compat.register_kernel
  register("_pin_memory", _pin_memory, "CPU")
  register("empty.memory_format", _empty)
  register("empty_strided", _empty_strided)
  register("empty.memory_format", _internal_empty, torch_compat.HIDDEN_KEY)
  register("empty_strided", _internal_empty_strided, torch_compat.HIDDEN_KEY)
  register("_local_scalar_dense", _item, torch_compat.SHAPE_KEY)
  for name, key in _UNSUPPORTED:
    register(name, _refuse, key)
  for name in _LOWERED:
    op = _overload(name)
    if op:
      register(name, _lowered_kernel(op))
      register(name, _internal_kernel(op), torch_compat.HIDDEN_KEY)


def _without_device(func) -> Callable:
  """Drop `device=` of a factory with a jax `out=`: its C++ device is the hidden one."""

  def make(args, kwargs):
    if isinstance(kwargs.get("out"), Tensor):
      kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    return func(*args, **kwargs)

  return make


def _parse_to(args, kwargs):
  """Parse the arguments of `Module.to`; C++ would take a tensor's hidden device."""
  if args and isinstance(args[0], Tensor):
    args = (args[0].device, args[0].dtype, *args[1:])
  return torch_compat.parse_to(*args, **kwargs)


def _type_as(args, kwargs) -> torch.Tensor:
  """Return `x.type_as(other)` on the indexed device of `other`, unknown to C++."""
  tensor, other = args
  return tensor.to(other.device, other.dtype)


def register_functions(env: Environment) -> None:
  """Add factories with `out=`, `Tensor.to` and `type_as` to an environment."""
  for func in (*TENSOR_CONSTRUCTORS, torch.normal):
    env.functions.add(func, _without_device(func))
  env.functions.add(torch_compat.parse_to, _parse_to)
  env.functions.add(torch.Tensor.type_as, _type_as)
  for func in (torch_compat.tensor_to, torch_compat.resolving_to):
    env.functions.add(func, env._torch_Tensor_to)
