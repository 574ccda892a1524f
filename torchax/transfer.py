"""Operations that read numbers back to the host or move them between devices."""

import jax
import torch

from torchax.errors import TracedStateError, UnsupportedDtypeError
from torchax.ops import mappings
from torchax.tensor import Tensor, new_tensor
from torchax.view_info import WHOLE

aten = torch.ops.aten


def _item(tensor: Tensor):
  """The only number of a tensor as a Python number.

  Raises:
    TracedStateError: inside a compiled function, where it has no value yet.
  """
  array = tensor.jax()
  if isinstance(array, jax.core.Tracer):
    raise TracedStateError(
      "`.item()` (also `bool()`, `int()`, `float()`, `if tensor:`) needs a number, but "
      "the tensor is being traced by a JAX transformation and has none yet. Keep the "
      "value a tensor (`torch.where` instead of `if`), or compute it outside of the "
      "compiled function."
    )
  return array.item()


class CopyPlan:
  """`copy_`: within jax by the derived in-place form, else through the host."""

  def __init__(self, in_place, env):
    self.in_place = in_place
    self.env = env

  def __call__(self, args, kwargs):
    target, source = args[0], args[1]
    if not isinstance(target, Tensor):
      return target.copy_(source.torch())
    if source.shape != target.shape:
      source = source.expand(target.shape)  # torch's error where it does not fit
    if isinstance(source, Tensor):
      return self.in_place((target, source), {})
    moved = mappings.t2j(source)
    same = tuple(source.shape) == tuple(target.shape)
    if same and target._chain is WHOLE and moved.dtype == target._storage.read().dtype:
      target._storage.write(moved)
      return target
    return self.in_place((target, new_tensor(moved, self.env)), {})


class ToCopyPlan:
  """`_to_copy`: to the CPU, or to another dtype on jax."""

  def __init__(self, cast, env):
    self.cast = cast
    self.env = env

  def __call__(self, args, kwargs):
    kwargs = dict(kwargs or {})
    device = kwargs.pop("device", None)
    tensor, dtype = args[0], kwargs.get("dtype")
    if not isinstance(tensor, Tensor):
      moved = new_tensor(mappings.t2j(tensor), self.env)
      return moved if dtype is None else self.cast((moved,), {"dtype": dtype})
    # torch asks for "meta" where it means the device of a wrapper.
    if device is None or device.type in ("jax", "meta"):
      return self.cast(args, {} if dtype is None else {"dtype": dtype})
    copied = mappings.j2t(tensor.jax())
    return copied if dtype is None else copied.to(dtype)


# What torch calls to make a sparse tensor of jax tensors.
_SPARSE_MAKERS = (
  aten._to_sparse,
  aten._to_sparse_csr,
  aten._to_sparse_csc,
  aten._to_sparse_bsr,
  aten._to_sparse_bsc,
  aten._sparse_coo_tensor_with_dims_and_tensors,
  aten._sparse_compressed_tensor_unsafe,
)


def _refuse_sparse(op):
  raise UnsupportedDtypeError(
    f"{op} makes a sparse tensor, but torchax holds dense ones. Call `.to_dense()` "
    "before moving it to jax, or `.cpu()` to go on with a sparse one on the CPU."
  )


def plan(op, schema, plan_by_registry, env):
  """The plan of a transfer, None for any other operation."""
  if getattr(op, "overloadpacket", None) in _SPARSE_MAKERS:
    return lambda args, kwargs: _refuse_sparse(op)
  if op is aten._local_scalar_dense.default:
    return lambda args, kwargs: _item(args[0])
  if op is aten.copy_.default:
    return CopyPlan(plan_by_registry(op), env)
  if op is aten._to_copy.default:
    return ToCopyPlan(plan_by_registry(op), env)
  return None
