"""Placements of torch's `DTensor` on a mesh, as `NamedSharding` of JAX's arrays.

A tensor on jax is whole: its shape is that of the global tensor, its array is in parts
on the devices, and XLA communicates. A `DTensor` of torch's class is what one rank of
many has; here one rank has all, so that its local tensor is the global one.

  Shard(d)     dimension d is split along the axis
  Replicate()  whole along the axis
  Partial()    the sum is whole as well: XLA decides when it is done
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from torch.distributed.device_mesh import DeviceMesh

from torchax.compat import jax_compat, torch_compat
from torchax.core import mappings
from torchax.devices import placement as devices
from torchax.distributed.meshes import axes_of, jax_mesh
from torchax.environment import env_on
from torchax.errors import CollectiveError
from torchax.tensor import Tensor, new_tensor

# Of `torch.distributed.tensor`, a module that takes a second to import.
Placement = Any


_KINDS = ("Shard", "Replicate", "Partial")


def shard(dim: int) -> Placement:
  """`Shard(dim)`."""
  return torch_compat.function_of("torch.distributed.tensor.Shard")(dim)


def replicated() -> Placement:
  """`Replicate()`."""
  return torch_compat.function_of("torch.distributed.tensor.Replicate")()


def checked(mesh: DeviceMesh, placements: Sequence[Placement] | None) -> tuple:
  """One placement for each dimension of the mesh; `Replicate()` if there are none.

  Raises:
    ValueError: another number of them.
    CollectiveError: another kind.
  """
  if placements is None:
    return (replicated(),) * mesh.ndim
  placements = tuple(placements)
  if len(placements) != mesh.ndim:
    raise ValueError(
      f"Expected a placement for each of the {mesh.ndim} dimensions of the mesh, but "
      f"got {len(placements)}: {placements}."
    )
  for placement in placements:
    if type(placement).__name__ not in _KINDS:
      raise CollectiveError(
        "A placement on jax is Shard(dim), Replicate() or Partial(), but got "
        f"{placement}. Several axes may split one dimension: Shard(0), Shard(0)."
      )
  return placements


def sharding_of(
  mesh: DeviceMesh,
  placements: Sequence[Placement] | None,
  shape: Sequence[int],
  array: jax.Array | None = None,
) -> NamedSharding:
  """The sharding that placements on a mesh stand for.

  Args:
    mesh: of `init_device_mesh("jax", …)`, or a part of it, flattened or not. Along the
      axes of the others, an array stays as it is.
    placements: one for each dimension of the mesh; `Replicate()` if there are none.
    shape: of the tensor.
    array: the one that is to be placed.

  Raises:
    CollectiveError: a dimension that is not there, or that an axis does not divide.
    ValueError: another number of placements than dimensions of the mesh.
  """
  whole = jax_mesh(mesh)
  by_dim = axes_of(mesh)
  own = tuple(axis for axes in by_dim for axis in axes)
  entries = _other_axes(array, whole, own, len(shape))
  for axes, placement in zip(by_dim, checked(mesh, placements), strict=True):
    if placement.is_shard() and axes:
      dim = _dim_of(placement, shape)
      entries[dim] = (*_known(entries[dim]), *axes)
  for dim, names in enumerate(entries):
    count = int(np.prod([whole.shape[axis] for axis in _known(names)], dtype=int))
    if shape[dim] % count:
      raise CollectiveError(
        f"Dimension {dim} of a tensor of shape {tuple(shape)} does not divide into "
        f"{count} parts along {', '.join(_known(names))}. Pad it, or place it by "
        "Replicate()."
      )
  return NamedSharding(whole, PartitionSpec(*[names or None for names in entries]))


def _dim_of(placement: Placement, shape: Sequence[int]) -> int:
  if not -len(shape) <= placement.dim < len(shape):
    raise CollectiveError(
      f"{placement} needs a dimension {placement.dim}, but got a tensor of shape "
      f"{tuple(shape)}."
    )
  return placement.dim % len(shape)


def _known(names) -> tuple[str, ...]:
  return names if isinstance(names, tuple) else ()


def _other_axes(array, mesh, own: tuple[str, ...], ndim: int) -> list:
  """By dimension, the axes besides `own` that split it; left open in a trace."""
  if array is None or len(own) == len(mesh.axis_names):
    return [()] * ndim
  if devices.is_traced(array):
    return [PartitionSpec.UNCONSTRAINED] * ndim
  found = _axes_by_dim(array)
  if found is None or array.sharding.mesh != mesh:
    return [()] * ndim
  return [tuple(axis for axis in names if axis not in own) for names in found]


def _axes_by_dim(array: jax.Array) -> list[tuple[str, ...]] | None:
  sharding = getattr(array, "sharding", None)
  if not isinstance(sharding, NamedSharding):
    return None
  spec = (*sharding.spec, *(None,) * array.ndim)[: array.ndim]
  return [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]


def placements_of(array: jax.Array, mesh: DeviceMesh) -> tuple[Placement, ...]:
  """How an array lies on a mesh; () where it does not, or is not known in a trace.

  It does not lie on a flattened mesh if it is split along a part of its axes alone.
  """
  if devices.is_traced(array):
    return ()
  found = _axes_by_dim(array)
  if found is None or array.sharding.mesh != jax_mesh(mesh):
    return ()
  by_axis = {axis: dim for dim, names in enumerate(found) for axis in names}
  placements = []
  for axes in axes_of(mesh):
    dims = {by_axis.get(axis) for axis in axes} or {None}
    dim = dims.pop()
    split = () if dim is None else [axis for axis in found[dim] if axis in axes]
    if dims or (dim is not None and tuple(split) != axes):
      return ()
    placements.append(replicated() if dim is None else shard(dim))
  return tuple(placements)


def laid_out(
  tensor: torch.Tensor, sharding: NamedSharding, from_first: bool = True
) -> jax.Array:
  """The numbers of a tensor with a sharding.

  Args:
    tensor: on jax; on the CPU, of which each device gets its part alone; or on meta,
      which has zeros then.
    sharding: where they are to lie.
    from_first: see `put`.
  """
  if isinstance(tensor, Tensor):
    return put(tensor.jax(), sharding, from_first)
  shape = tuple(tensor.shape)
  if tensor.is_meta:
    return jnp.zeros(shape, mappings.t2j_dtype(tensor.dtype), device=sharding)
  if sharding.is_fully_addressable:
    return mappings.t2j(tensor, place=sharding)
  return _over_processes(mappings.values_for_jax(tensor), sharding, from_first)


def _over_processes(
  numbers: np.ndarray, sharding: NamedSharding, from_first: bool
) -> jax.Array:
  if from_first:
    numbers = np.asarray(multihost_utils.broadcast_one_to_all(numbers))
  return jax.make_array_from_callback(numbers.shape, sharding, numbers.__getitem__)


def put(array: jax.Array, sharding: NamedSharding, from_first: bool) -> jax.Array:
  """An array with a sharding; in a trace, XLA is told.

  Args:
    array: whole, or global.
    sharding: where it is to lie.
    from_first: the numbers are those of the first process, else of each one its own.
  """
  if devices.is_traced(array):
    return lax.with_sharding_constraint(array, sharding)
  if array.is_fully_addressable and not sharding.is_fully_addressable:
    return _over_processes(np.asarray(array), sharding, from_first)
  return jax.device_put(array, sharding)


class _Place(torch.autograd.Function):
  """Places a tensor, and its gradient in the same way."""

  @staticmethod
  def forward(ctx, tensor, sharding, from_first):
    ctx.sharding = sharding
    return new_tensor(put(tensor.jax(), sharding, from_first), tensor._env)

  @staticmethod
  def backward(ctx, gradient):
    return _Place.apply(gradient, ctx.sharding, False), None, None


def _on_jax(tensor: torch.Tensor, mesh, placements, from_first: bool) -> torch.Tensor:
  """A tensor of another device on jax; at once in parts, where nobody records that."""
  is_recorded = tensor.requires_grad and torch.is_grad_enabled()
  if is_recorded or jax_compat.is_staging():
    return tensor.to("jax")
  sharding = sharding_of(mesh, placements, tensor.shape)
  return new_tensor(laid_out(tensor, sharding, from_first), env_on())


def place(
  tensor: torch.Tensor,
  mesh: DeviceMesh,
  placements: Sequence[Placement] | None,
  from_first: bool = False,
) -> Tensor:
  """A tensor on a mesh, and recorded by autograd; see `sharding_of`.

  Args:
    tensor: of any device; one of another device is moved to jax.
    mesh, placements: where it is to lie.
    from_first: see `put`.
  """
  if not isinstance(tensor, Tensor):
    tensor = _on_jax(tensor, mesh, placements, from_first)
  sharding = sharding_of(mesh, placements, tensor.shape, tensor.jax())
  placed = _Place.apply(tensor, sharding, from_first)
  placed._device_mesh, placed._placements = mesh, checked(mesh, placements)
  return placed
