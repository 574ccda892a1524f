"""Operations that read values back to the host or move tensors between devices.

`special_plans.py` builds the plans here; `Environment` uses `Move` for `Tensor.to`.
"""

import functools
import weakref
from typing import Any

import jax
import torch

from torchax.compat import jax_compat, torch_compat
from torchax.core import mappings
from torchax.core.chains import WHOLE
from torchax.core.error_messages import no_numbers, packed_error
from torchax.core.storage import LazyZeros
from torchax.devices import placement, shards
from torchax.dispatch import host_operations
from torchax.dispatch.batched_gradients import over_batches
from torchax.errors import UnsupportedDtypeError
from torchax.registry.names import aten, present
from torchax.tensor import Tensor, new_tensor

_HIDDEN = torch_compat.HIDDEN_DEVICE


def item(tensor: Tensor):
  """Return the only element of a tensor as a Python number.

  Raises:
    TracedStateError: inside a compiled function, where it has no value yet.
  """
  array = tensor.jax()
  if isinstance(array, jax.core.Tracer):
    raise no_numbers("`.item()` (also `bool()`, `int()`, `float()`, `if tensor:`)")
  if array.dtype == mappings.PACKED:
    raise packed_error("_local_scalar_dense")
  try:
    return array.item()
  except RuntimeError as error:
    if jax_compat.is_about_other_processes(error):
      raise shards.not_addressable_error(array, "`.item()`") from None
    raise


class CopyPlan:
  """Plan of `copy_`: the derived in-place variant within jax, else through the host."""

  def __init__(self, op, default, env):
    self.in_place = default()
    self.env = env

  def __call__(self, args, kwargs):
    target, source = args[0], args[1]
    if not isinstance(target, Tensor):
      return target.copy_(source.torch())
    if not isinstance(source, torch.Tensor):
      source = torch.tensor(source, device="cpu")
    if source.shape != target.shape:
      source = source.expand(target.shape)  # torch's error where it does not fit
    storage = target._storage
    # Convert floats by torch, from 64 bits, which jax might not keep.
    is_inexact = target.dtype.is_floating_point or target.dtype.is_complex
    dtype = target.dtype if is_inexact else None
    is_blank = type(storage) is LazyZeros and target._chain is WHOLE
    if is_blank and source.device.type == "cpu":
      array = self.env.array_of(source, storage.device, dtype)
      storage.write(mappings.to_dtype(array, target.dtype))
      return target
    sharding = placement.committed_sharding(storage.operand)
    if isinstance(source, Tensor):
      return self.in_place((target, _source_at_target(source, target, sharding)), {})
    host_operations.guard_on_read(source)
    spread = placement.several_device_sharding(storage.operand)
    at_once = spread if target._chain is WHOLE else None
    moved = mappings.t2j(source, dtype=dtype, sharding=at_once)
    same = tuple(source.shape) == tuple(target.shape)
    if same and target._chain is WHOLE and moved.dtype == storage.operand.dtype:
      if sharding is not None:
        moved = placement.restore_sharding(moved, sharding)
      storage.write(moved, target)
      return target
    return self.in_place((target, new_tensor(moved, self.env)), {})


def _source_at_target(source: Tensor, target: Tensor, sharding) -> Tensor:
  array = source._storage.operand
  source_sharding = placement.committed_sharding(array)
  if source_sharding == sharding or placement.is_traced(array):
    return source
  if source_sharding and sharding and source_sharding.device_set == sharding.device_set:
    return source
  if target._chain is WHOLE:
    moved = placement.restore_sharding(source.jax(), sharding)
  else:
    moved = placement.replicate_on(source.jax(), sharding)
  return new_tensor(moved, source._env)


class ToCopyPlan:
  """Plan of `_to_copy`: a move between devices, or a cast on jax."""

  def __init__(self, op, default, env):
    self.cast = default()
    self.env = env

  def __call__(self, args, kwargs):
    kwargs = dict(kwargs or {})
    device = kwargs.pop("device", None)
    tensor, dtype = args[0], kwargs.get("dtype")
    if not isinstance(tensor, Tensor):
      return self.env.copy_to_jax(tensor, device, dtype)
    if device is None or device.type == "jax" or device == _HIDDEN:
      copied = self.cast(args, {} if dtype is None else {"dtype": dtype})
      if device is None or device.index is None or device == _HIDDEN:
        return copied
      operand = copied._storage.operand
      moved = placement.put(operand, device)
      return copied if moved is operand else new_tensor(moved, self.env)
    return _move(tensor, dtype, device, self.env)


# Operations that make sparse, quantised, nested and mkldnn tensors from jax tensors, or
# read properties of these.
_REFUSED = {
  "sparse": (
    aten._to_sparse,
    aten._to_sparse_csr,
    aten._to_sparse_csc,
    aten._to_sparse_bsr,
    aten._to_sparse_bsc,
    aten._sparse_addmm,
    aten._sparse_coo_tensor_unsafe,
    aten._sparse_coo_tensor_with_dims_and_tensors,
    aten._sparse_compressed_tensor_unsafe,
    aten._spdiags,
    aten.is_coalesced,
    aten.sparse_compressed_tensor,
    aten.sparse_mask,
  ),
  "quantised": (
    aten.dequantize,
    aten.int_repr,
    aten.q_per_channel_axis,
    aten.q_per_channel_scales,
    aten.q_scale,
    aten.q_zero_point,
    aten.qscheme,
    aten.quantize_per_channel,
    aten.quantize_per_tensor,
    aten.quantize_per_tensor_dynamic,
  ),
  "nested": (
    aten._nested_from_padded,
    aten._nested_tensor_from_mask,
    aten._nested_tensor_from_tensor_list,
    aten._nested_view_from_buffer,
  ),
  "mkldnn": (aten.to_mkldnn,),
}
_REFUSED_KIND = {
  packet: kind for kind, row in _REFUSED.items() for packet in present(row)
}


_WAY_OUT = {
  "sparse": ".to_dense()",
  "quantised": ".dequantize()",
  "nested": ".to_padded_tensor(value)",
  "mkldnn": ".to_dense()",
}

# The usual cause, and what to use instead.
_INSTEAD = {
  "sparse": (
    " The gradient of `nn.Embedding(sparse=True)` is such a tensor: build the "
    "embedding with `sparse=False`."
  ),
  "quantised": (
    " In place of `torch.ao.quantization` use weights of eight bits from torchao: "
    "`quantize_(model, Int8WeightOnlyConfig())`."
  ),
  "nested": " On jax, nested tensors have `layout=torch.jagged`.",
}


def is_refused(op, schema) -> bool:
  """Return True for operations of sparse, quantised, nested and mkldnn tensors."""
  return op.overloadpacket in _REFUSED_KIND


def refusing_plan(op, default, env):
  """Return the plan of a refused operation; see `special_plans.Special`."""
  kind = _REFUSED_KIND[op.overloadpacket]

  def refuse(args, kwargs):
    raise UnsupportedDtypeError(
      f"{op} is for {kind} tensors, but torchax holds dense and plain ones. Call "
      f"`{_WAY_OUT[kind]}` on such a tensor before moving it to jax, or `.cpu()` on "
      f"this one to go on with it on the CPU.{_INSTEAD.get(kind, '')}"
    )

  return refuse


def _refuse_to_pin(*args, **kwargs):
  raise RuntimeError(
    "pin_memory() expects a dense CPU tensor, but got one on jax. Pin the source of a "
    "transfer, not its result."
  )


# Overload -> function of the same arguments that replaces it.
FUNCTIONS = {
  aten.is_pinned.default: lambda *args, **kwargs: False,
  aten._pin_memory.default: _refuse_to_pin,
  aten._local_scalar_dense.default: item,
}


class Move(torch_compat.OwnFunction):
  """Copy between devices; its gradient is moved back to the device of the input."""

  @staticmethod
  def forward(tensor, dtype, device, env):
    return _move(tensor.detach(), dtype, device, env)

  @staticmethod
  def setup_context(ctx, inputs, output):
    tensor, _, ctx.device, ctx.env = inputs
    source = torch_compat.innermost(tensor)
    ctx.source_is_jax = isinstance(source, Tensor)
    ctx.sharding = None
    if ctx.source_is_jax:
      array = source._storage.operand
      is_part = source._chain is not WHOLE and placement.is_on_several_devices(array)
      ctx.sharding = placement.committed_sharding(source.jax() if is_part else array)
    ctx.source_dtype, ctx.dtype = tensor.dtype, output.dtype
    ctx.set_materialize_grads(False)

  @staticmethod
  def jvp(ctx, tangent, *_):
    return (
      None if tangent is None else Move.apply(tangent, ctx.dtype, ctx.device, ctx.env)
    )

  @staticmethod
  def vmap(info, in_dims, tensor, *arguments):
    return Move.apply(tensor, *arguments), in_dims[0]

  @staticmethod
  @functools.partial(over_batches, is_mapped=False)
  def backward(ctx, grad):
    device = "jax" if ctx.source_is_jax else "cpu"
    moved = Move.apply(grad, ctx.source_dtype, device, ctx.env)
    if ctx.source_is_jax and isinstance(moved, Tensor):
      moved = _PutOn.apply(moved, ctx.sharding, _PLACED)
    return moved, None, None, None


class _PutOn(torch_compat.OwnFunction):
  """Identity that puts a tensor on a sharding, and its gradient on the old one."""

  @staticmethod
  def forward(ctx, tensor, sharding, functions):
    array = tensor.jax()
    sharding_of, put = ctx.functions = functions
    ctx.sharding = sharding_of(array)
    return new_tensor(put(array, sharding), tensor._env)

  @staticmethod
  @over_batches
  def backward(ctx, grad):
    return _PutOn.apply(grad, ctx.sharding, ctx.functions), None, None


# Functions of `_PutOn`: for arrays on devices, and for traced ones too.
_PLACED = (placement.committed_sharding, placement.restore_sharding)
_TRACED = (placement.several_device_sharding, placement.constrain)


def shard_gradient_like(tensor: Tensor) -> None:
  """Register a hook that gives the gradient of a sharded leaf the leaf's sharding.

  XLA's partitioner alone might replicate the gradient.
  """
  if not tensor.requires_grad or not tensor.is_leaf or "_beside" in tensor.__dict__:
    return
  reference = weakref.ref(tensor)

  def beside(grad):
    leaf = reference()
    sharding = (
      None if leaf is None else placement.several_device_sharding(leaf._storage.operand)
    )
    if sharding is None or not isinstance(grad, Tensor) or leaf._chain is not WHOLE:
      return None
    found = getattr(grad._storage.array, "sharding", None)
    return None if found == sharding else _PutOn.apply(grad, sharding, _TRACED)

  tensor.__dict__["_beside"] = tensor.register_hook(beside)


def _move(tensor: Any, dtype, device, env) -> torch.Tensor:
  if torch.device(device).type == "meta":
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device)
  if torch.device(device).type != "jax":
    moved = mappings.j2t(tensor.jax())
    return moved if dtype is None else moved.to(dtype)
  if isinstance(tensor, Tensor):
    cast: Any = tensor if dtype is None else tensor.to(dtype)
    return new_tensor(placement.put(cast.jax(), device), env)
  return env.copy_to_jax(tensor, device, dtype)


def arguments_of_to(args, kwargs) -> tuple:
  """Parse the arguments of `Tensor.to`.

  Returns:
    (device, dtype, memory format, copy); None for absent ones.

  Raises:
    TypeError: no signature of `Tensor.to` accepts the arguments.
  """
  rest, kwargs = list(args), dict(kwargs or {})
  other = rest[0] if rest else kwargs.pop("other", None)
  if isinstance(other, torch.Tensor):
    rest[:1] = [other.device, other.dtype]
  copy = bool(kwargs.pop("copy", False)) or _pop_copy(rest)
  device, dtype, _, memory_format = torch_compat.parse_to(*rest, **kwargs)
  return device, dtype, memory_format, copy


def _pop_copy(arguments: list) -> bool:
  """Remove `copy` from the positional arguments of `Tensor.to` and return it.

  Raises:
    TypeError: there are arguments after it.
  """
  index = 2 if isinstance(arguments[0] if arguments else None, torch.dtype) else 3
  if len(arguments) > index + 1:
    raise TypeError(
      f"to() expects up to {index + 1} positional arguments, but got {len(arguments)}."
    )
  return bool(arguments.pop()) if len(arguments) > index else False
