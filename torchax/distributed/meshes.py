"""`DeviceMesh` on jax: torch's mesh over JAX's devices, one JAX axis per dimension.

`init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))` is a mesh of torch's own
class. Its numbers are indices in `jax.devices()`, not ranks: a rank here is a process.
The group of a dimension has the name of its axis. Functional collectives with
`mesh["tp"]` find it by that name in `jax_shard_map(f, mesh=jax_mesh(mesh), …)`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchax.compat import torch_compat
from torchax.distributed import process_group
from torchax.errors import CollectiveError
from torchax.ops import jc10d

DEVICE = process_group.NAME

_roots: dict[jax.sharding.Mesh, DeviceMesh] = {}
"""JAX's mesh -> torch's; of several equal meshes, the latest."""


class AxisGroup(dist.ProcessGroup):
  """Group of a mesh dimension, for functional collectives only; others raise.

  Attributes:
    group_name: name in torch's registry of groups.
  """

  group_name = ""

  def getBackendName(self) -> str:
    """Return "jax", the name of the backend."""
    return DEVICE

  def _refuse(self, *args):
    raise CollectiveError(
      "The group of a mesh dimension joins devices, not processes. Its collectives are "
      "the functional ones, in a function of one shard: `torch.distributed."
      '_functional_collectives.all_reduce(x, "sum", mesh["tp"])` inside of '
      "`jax_shard_map(f, mesh=torchax.distributed.jax_mesh(mesh), …)`. Outside of it a "
      "tensor is whole, and needs none."
    )

  allreduce = allreduce_coalesced = reduce = broadcast = allgather = _refuse
  _allgather_base = allgather_into_tensor_coalesced = gather = scatter = _refuse
  reduce_scatter = _reduce_scatter_base = reduce_scatter_tensor_coalesced = _refuse
  alltoall = alltoall_base = barrier = send = recv = recv_anysource = _refuse
  all_gather_single = all_gather_single_coalesced = all_to_all_single = _refuse
  reduce_scatter_single = reduce_scatter_single_coalesced = _refuse


def is_on_jax(mesh) -> bool:
  """Return True for a `DeviceMesh` on jax."""
  return isinstance(mesh, DeviceMesh) and mesh.device_type == DEVICE


def _names_of(mesh: DeviceMesh) -> tuple[str, ...]:
  """Return the dimension names of a mesh; those of a root are JAX's axis names."""
  return mesh.mesh_dim_names or tuple(f"dim_{i}" for i in range(mesh.ndim))


def axes_of(mesh: DeviceMesh) -> list[tuple[str, ...]]:
  """Return the axes of JAX's mesh for each dimension of a mesh or submesh.

  A flattened dimension has several axes, any other has one.
  """
  return [jc10d.GROUPS[name] for name in torch_compat.names_of_groups(mesh)]


def jax_mesh(mesh: DeviceMesh) -> jax.sharding.Mesh:
  """Return the JAX mesh of a `DeviceMesh` on jax; for a submesh, that of its root.

  Its axes have the names of the dimensions; unnamed ones are "dim_0", "dim_1", …. They
  are `Auto` axes: XLA chooses the sharding of arrays without annotation.

  Args:
    mesh: result of `init_device_mesh("jax", …)`, or a submesh of it.

  Raises:
    CollectiveError: the mesh is on another device.

  >>> mesh = torch.distributed.init_device_mesh("jax", (1,), mesh_dim_names=("data",))
  >>> jax_mesh(mesh).axis_names
  ('data',)
  """
  if not is_on_jax(mesh):
    raise CollectiveError(
      'Expected a mesh of `init_device_mesh("jax", shape)`, but got '
      f"{type(mesh).__name__} on {getattr(mesh, 'device_type', None)}."
    )
  return _as_jax(torch_compat.root_of(mesh))


@functools.lru_cache(maxsize=256)
def _as_jax(root: DeviceMesh) -> jax.sharding.Mesh:
  indices = root.mesh.numpy()
  return jax.sharding.Mesh(np.array(jax.devices())[indices], _names_of(root))


def device_mesh_of(mesh: jax.sharding.Mesh) -> DeviceMesh | None:
  """Return the latest `DeviceMesh` made with this JAX mesh, or None."""
  return _roots.get(mesh)


def make(original: Callable, self, device_type: str, mesh=None, **kwargs) -> None:
  """Implement `DeviceMesh(device_type, mesh, mesh_dim_names=)` for "jax".

  Raises:
    CollectiveError: the mesh needs devices that JAX does not have.
  """
  if device_type != DEVICE:
    original(self, device_type, mesh, **kwargs)
    return
  process_group.start()
  rank = next(i for i, d in enumerate(jax.devices()) if d in jax.local_devices())
  options, root = torch_compat.options_of_mesh(original, kwargs, rank)
  original(self, device_type, mesh, **options)
  if root is None:
    _complete(self)
  elif kwargs.get("_init_backend", True):
    _complete_flattened(self, root)


def _complete(mesh: Any) -> None:
  """Register the JAX mesh of a new mesh, and the groups of its dimensions."""
  indices, devices = mesh.mesh.numpy(), jax.devices()
  if indices.size and indices.max() >= len(devices):
    raise CollectiveError(
      f"A mesh of shape {indices.shape} needs the devices up to number "
      f"{indices.max()}, but JAX has {len(devices)}. On a machine without "
      "accelerators, XLA_FLAGS=--xla_force_host_platform_device_count=8 gives it eight."
    )
  whole = jax_mesh(mesh)
  _roots[whole] = mesh
  names = [_group(whole, axis, (axis,)) for axis in whole.axis_names]
  torch_compat.set_groups_of_mesh(mesh, mesh, {name: _groups[name] for name in names})


def _complete_flattened(mesh: Any, root: Any) -> None:
  """Set the group of a submesh made by `_flatten`: all axes that it flattens."""
  whole = jax_mesh(root)
  axes = tuple(whole.axis_names[dim] for dim in _dims_of(mesh, root))
  name = _group(whole, *_names_of(mesh), axes)
  torch_compat.set_groups_of_mesh(mesh, root, {name: _groups[name]})


def _dims_of(flattened: Any, root: Any) -> list[int]:
  """Return the dimensions of `root` that a flattened submesh covers, slowest first.

  Dimensions of size 1 are left out: they split nothing.
  """
  indices = root.mesh.numpy()
  positions = [
    np.argwhere(indices == index)[0] for index in flattened.mesh.numpy().flat
  ]
  steps = np.diff(np.array(positions), axis=0) != 0
  varying = [dim for dim in range(indices.ndim) if steps[:, dim].any()]
  return sorted(varying, key=lambda dim: -int(steps[:, dim].argmax()))


def refuse_unflattened(original: Callable, self, *args, **kwargs):
  """Raise for `_unflatten` on jax: the axes of a mesh there are fixed.

  Raises:
    CollectiveError: the mesh is on jax.
  """
  if not is_on_jax(self):
    return original(self, *args, **kwargs)
  raise CollectiveError(
    "A mesh on jax has the axes that it was made with, and cannot be unflattened. Make "
    'it with all of them, `init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))'
    '`, and flatten a part: `mesh["dp", "tp"]._flatten("world")`.'
  )


# torch's registry keeps only the C++ part of a group alive, not its Python object.
_groups: dict[str, AxisGroup] = {}


def _group(mesh: jax.sharding.Mesh, name: str, axes: tuple[str, ...]) -> str:
  """Return the name of the group of one or several axes; create it if needed."""
  sizes = [mesh.shape[axis] for axis in axes]
  group = torch_compat.group_by_name(name)
  is_ours = group is _groups.get(name) and jc10d.GROUPS.get(name) == axes
  if group is not None and not (is_ours and group.size() == math.prod(sizes)):
    own = () if axes == (name,) else axes
    name = ":".join((name, str(math.prod(sizes)), *own))
    group = torch_compat.group_by_name(name)
  if group is None:
    dims = [mesh.axis_names.index(axis) for axis in axes]
    ranks: dict[int, int] = {}
    for position, device in np.ndenumerate(mesh.devices):
      rank = np.ravel_multi_index([position[dim] for dim in dims], sizes) if dims else 0
      ranks.setdefault(device.process_index, int(rank))
    own_rank = ranks.get(jax.process_index(), 0)
    _groups[name] = AxisGroup(own_rank, math.prod(sizes))
    _groups[name].group_name = name
    torch_compat.enter_group(_groups[name], ranks)
  jc10d.GROUPS[name] = axes
  return name
