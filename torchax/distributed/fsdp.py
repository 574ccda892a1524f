"""`fully_shard` on jax: the parameters are sharded, and XLA gathers them where used.

torch's gathers the parameters of a module before its forward pass and frees them after
it. Here a parameter keeps its shape and is annotated; when to gather it, and that its
gradient is reduced and scattered, is decided by the compiler.
"""

from collections.abc import Callable

import jax
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchax import _torch_compat
from torchax.distributed import meshes, placements
from torchax.errors import CollectiveError
from torchax.tensor import Tensor


def fully_shard(
  original: Callable,
  module,
  *,
  mesh=None,
  shard_placement_fn=None,
  mp_policy=None,
  offload_policy=None,
  ignored_params=None,
  **options,
):
  """`fully_shard`: each parameter is split along its first dimension that divides.

  A parameter of which no dimension does is whole on all devices. The last dimension of
  the mesh shards, one before it replicates (HSDP). `reshard_after_forward` has no
  meaning here.

  Raises:
    CollectiveError: a policy of mixed precision or of offloading, or a placement of
      `shard_placement_fn` that does not fit.
  """
  modules = module if isinstance(module, list | tuple) else [module]
  if mesh is None and any(map(_is_on_jax, modules)):
    mesh = _default_mesh()
  if not meshes.is_on_jax(mesh):
    given = {
      "mesh": mesh,
      "shard_placement_fn": shard_placement_fn,
      "mp_policy": mp_policy,
      "offload_policy": offload_policy,
      "ignored_params": ignored_params,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return original(module, **given, **options)
  _refuse_policies(mp_policy, offload_policy)
  ignored = {id(parameter) for parameter in ignored_params or ()}
  for part in modules:
    part.to(meshes.DEVICE)
    for parameter in part.parameters():
      if id(parameter) not in ignored:
        _shard(parameter, mesh, shard_placement_fn)
  return module


def _is_on_jax(module: torch.nn.Module) -> bool:
  return any(isinstance(parameter, Tensor) for parameter in module.parameters())


def _default_mesh() -> DeviceMesh:
  """One axis over all devices."""
  shape = (jax.device_count(),)
  return dist.init_device_mesh(meshes.DEVICE, shape, mesh_dim_names=("fsdp",))


def _refuse_policies(mp_policy, offload_policy) -> None:
  given = vars(mp_policy) if mp_policy is not None else {}
  dtypes = {name: kind for name, kind in given.items() if isinstance(kind, torch.dtype)}
  if dtypes:
    raise CollectiveError(
      f"fully_shard on jax takes no mp_policy, but got {dtypes}. Write "
      '`with torch.autocast("jax", dtype=torch.bfloat16):` around the forward pass.'
    )
  if offload_policy is not None and type(offload_policy).__name__ != "OffloadPolicy":
    raise CollectiveError(
      f"fully_shard on jax takes no offload_policy, but got {offload_policy}. Leave it "
      "out: the parameters stay on the devices."
    )


def _shard(parameter: Tensor, mesh: DeviceMesh, choose: Callable | None) -> None:
  """Adds the last axis of a mesh to how a parameter lies, in place."""
  array = parameter.jax()
  known = placements.placements_of(array, mesh)
  if known and known[-1].is_shard():
    return  # by an inner module's fully_shard
  chosen = choose(parameter) if choose is not None else None
  dims = range(parameter.dim()) if chosen is None else [chosen.dim]
  others = (placements.replicated(),) * (mesh.ndim - 1)
  for dim in dims:
    where = (*others, placements.shard(dim))
    try:
      sharding = placements.sharding_of(mesh, where, parameter.shape, array)
      break
    except CollectiveError:
      if chosen is not None:
        raise
  else:
    where = (*others, placements.replicated())
    sharding = placements.sharding_of(mesh, where, parameter.shape, array)
  parameter.replace_jax(placements.put(array, sharding, from_first=True))


def register() -> None:
  """Puts the function in place of torch's."""
  name = "torch.distributed.fsdp.fully_shard"
  _torch_compat.reroute(_torch_compat.function_of(name), fully_shard)
