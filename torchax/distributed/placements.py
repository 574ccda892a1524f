"""Conversion between torch's `DTensor` placements and JAX's `NamedSharding`.

A jax tensor has the shape of the global tensor; its array is sharded over the devices,
and XLA communicates. torch's `DTensor` is the view of one rank among many. Here one
process drives all devices, so the local tensor is the global tensor.

  Shard(d)     dimension d is split along the axis
  Replicate()  replicated along the axis
  Partial()    the reduced value, replicated; XLA decides when to reduce
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

# A class of `torch.distributed.tensor`, which takes a second to import.
Placement = Any


_KINDS = ("Shard", "Replicate", "Partial")


def shard(dim: int) -> Placement:
  """Return `Shard(dim)` without importing its module at start."""
  return torch_compat.function_of("torch.distributed.tensor.Shard")(dim)


def replicate() -> Placement:
  """Return `Replicate()` without importing its module at start."""
  return torch_compat.function_of("torch.distributed.tensor.Replicate")()


def normalize(mesh: DeviceMesh, placements: Sequence[Placement] | None) -> tuple:
  """Return one placement per mesh dimension; all `Replicate()` for None.

  Raises:
    ValueError: the number of placements differs from the dimensions of the mesh.
    CollectiveError: a placement is of an unsupported kind.
  """
  if placements is None:
    return (replicate(),) * mesh.ndim
  placements = tuple(placements)
  if len(placements) != mesh.ndim:
    raise ValueError(
      f"Expected a placement for each of the {mesh.ndim} dimensions of the mesh, but "
      f"got {len(placements)}: {placements}."
    )
  for placement in placements:
    if type(placement).__name__ not in _KINDS:
      raise CollectiveError(
        "A mesh on jax expects Shard(dim), Replicate() or Partial(), but got "
        f"{placement}. Several axes may split one dimension: Shard(0), Shard(0)."
      )
  return placements


def sharding_of(
  mesh: DeviceMesh,
  placements: Sequence[Placement] | None,
  shape: Sequence[int],
  array: jax.Array | None = None,
) -> NamedSharding:
  """Return the sharding for placements on a mesh.

  Args:
    mesh: result of `init_device_mesh("jax", …)`, or a submesh of it, flattened or not.
      Along axes outside the submesh, `array` keeps its sharding.
    placements: one per dimension of the mesh; None replicates.
    shape: shape of the tensor.
    array: the array to be placed.

  Raises:
    CollectiveError: a dimension does not exist, or an axis does not divide it.
    ValueError: the number of placements differs from the dimensions of the mesh.

  >>> from torch.distributed.tensor import Shard
  >>> mesh = torch.distributed.init_device_mesh("jax", (1,), mesh_dim_names=("data",))
  >>> sharding_of(mesh, [Shard(1)], (2, 4)).spec
  PartitionSpec(None, 'data')
  """
  whole = jax_mesh(mesh)
  by_dim = axes_of(mesh)
  own = tuple(axis for axes in by_dim for axis in axes)
  entries = _other_axes(array, whole, own, len(shape))
  for axes, placement in zip(by_dim, normalize(mesh, placements), strict=True):
    if placement.is_shard() and axes:
      dim = _checked_dim(placement, shape)
      entries[dim] = (*_axis_names(entries[dim]), *axes)
  for dim, names in enumerate(entries):
    count = int(np.prod([whole.shape[axis] for axis in _axis_names(names)], dtype=int))
    if shape[dim] % count:
      raise CollectiveError(
        f"Dimension {dim} of a tensor of shape {tuple(shape)} does not divide into "
        f"{count} parts along {', '.join(_axis_names(names))}. Pad it, or place it by "
        "Replicate()."
      )
  return NamedSharding(whole, PartitionSpec(*[names or None for names in entries]))


def _checked_dim(placement: Placement, shape: Sequence[int]) -> int:
  if not -len(shape) <= placement.dim < len(shape):
    raise CollectiveError(
      f"{placement} expects a dimension {placement.dim}, but got a tensor of shape "
      f"{tuple(shape)}."
    )
  return placement.dim % len(shape)


def _axis_names(names) -> tuple[str, ...]:
  return names if isinstance(names, tuple) else ()


def _other_axes(array, mesh, own: tuple[str, ...], ndim: int) -> list:
  """Return, per dimension, the axes other than `own` that split it; open in a trace."""
  if array is None or len(own) == len(mesh.axis_names):
    return [()] * ndim
  if devices.is_traced(array):
    return [PartitionSpec.UNCONSTRAINED] * ndim
  axes_by_dim = _axes_by_dim(array)
  if axes_by_dim is None or array.sharding.mesh != mesh:
    return [()] * ndim
  return [tuple(axis for axis in names if axis not in own) for names in axes_by_dim]


def _axes_by_dim(array: jax.Array) -> list[tuple[str, ...]] | None:
  sharding = getattr(array, "sharding", None)
  if not isinstance(sharding, NamedSharding):
    return None
  spec = (*sharding.spec, *(None,) * array.ndim)[: array.ndim]
  return [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]


def placements_of(array: jax.Array, mesh: DeviceMesh) -> tuple[Placement, ...]:
  """Return the placements of an array on a mesh; () if not on it or in a trace.

  An array split along only some axes of a flattened dimension is not on that mesh.

  Args:
    array: array of any shape.
    mesh: result of `init_device_mesh("jax", …)`, or a submesh of it.

  Returns:
    One placement per dimension of the mesh, `Shard` or `Replicate`.

  >>> from torch.distributed.tensor import Shard
  >>> mesh = torch.distributed.init_device_mesh("jax", (1,))
  >>> x = torch.distributed.tensor.distribute_tensor(torch.ones(2, 4), mesh, [Shard(1)])
  >>> placements_of(x.jax(), mesh)
  (Shard(dim=1),)
  """
  if devices.is_traced(array):
    return ()
  axes_by_dim = _axes_by_dim(array)
  if axes_by_dim is None or array.sharding.mesh != jax_mesh(mesh):
    return ()
  by_axis = {axis: dim for dim, names in enumerate(axes_by_dim) for axis in names}
  placements = []
  for axes in axes_of(mesh):
    dims = {by_axis.get(axis) for axis in axes} or {None}
    dim = dims.pop()
    split = () if dim is None else [axis for axis in axes_by_dim[dim] if axis in axes]
    if dims or (dim is not None and tuple(split) != axes):
      return ()
    placements.append(replicate() if dim is None else shard(dim))
  return tuple(placements)


def with_placements(
  tensor: torch.Tensor, sharding: NamedSharding, from_first: bool = True
) -> jax.Array:
  """Return the values of a tensor as an array with a sharding.

  Args:
    tensor: on jax, on the CPU (each device receives only its part), or on meta (becomes
      zeros).
    sharding: sharding of the result.
    from_first: see `put`.
  """
  if isinstance(tensor, Tensor):
    return put(tensor.jax(), sharding, from_first)
  shape = tuple(tensor.shape)
  if tensor.is_meta:
    return jnp.zeros(shape, mappings.t2j_dtype(tensor.dtype), device=sharding)
  if sharding.is_fully_addressable:
    return mappings.t2j(tensor, sharding=sharding)
  return _global_array(mappings.values_for_jax(tensor), sharding, from_first)


def _global_array(
  numbers: np.ndarray, sharding: NamedSharding, from_first: bool
) -> jax.Array:
  if from_first:
    numbers = np.asarray(multihost_utils.broadcast_one_to_all(numbers))
  return jax.make_array_from_callback(numbers.shape, sharding, numbers.__getitem__)


def put(array: jax.Array, sharding: NamedSharding, from_first: bool) -> jax.Array:
  """Return an array with a sharding; in a trace, add a sharding constraint.

  Args:
    array: an array of this process, or a global array.
    sharding: sharding of the result.
    from_first: take the values of the first process; else each process provides its
      own.
  """
  if devices.is_traced(array):
    return lax.with_sharding_constraint(array, sharding)
  if array.is_fully_addressable and not sharding.is_fully_addressable:
    return _global_array(np.asarray(array), sharding, from_first)
  return jax.device_put(array, sharding)


class _Place(torch.autograd.Function):
  """Placement of a tensor; its gradient gets the same sharding."""

  @staticmethod
  def forward(ctx, tensor, sharding, from_first):
    ctx.sharding = sharding
    return new_tensor(put(tensor.jax(), sharding, from_first), tensor._env)

  @staticmethod
  def backward(ctx, gradient):
    return _Place.apply(gradient, ctx.sharding, False), None, None


def _to_jax(tensor: torch.Tensor, mesh, placements, from_first: bool) -> torch.Tensor:
  """Move a tensor to jax; directly sharded if neither autograd nor a trace records."""
  is_recorded = tensor.requires_grad and torch.is_grad_enabled()
  if is_recorded or jax_compat.is_staging():
    return tensor.to("jax")
  sharding = sharding_of(mesh, placements, tensor.shape)
  return new_tensor(with_placements(tensor, sharding, from_first), env_on())


def place(
  tensor: torch.Tensor,
  mesh: DeviceMesh,
  placements: Sequence[Placement] | None,
  from_first: bool = False,
) -> Tensor:
  """Return a tensor placed on a mesh; autograd records it.

  Args:
    tensor: on any device; moved to jax if needed.
    mesh, placements: see `sharding_of`.
    from_first: see `put`.
  """
  if not isinstance(tensor, Tensor):
    tensor = _to_jax(tensor, mesh, placements, from_first)
  sharding = sharding_of(mesh, placements, tensor.shape, tensor.jax())
  placed = _Place.apply(tensor, sharding, from_first)
  placed._device_mesh, placed._placements = mesh, normalize(mesh, placements)
  return placed
