"""`fully_shard` on jax: the parameters are sharded, and XLA gathers them where used.

torch's gathers the parameters of a module before its forward pass and frees them after
it. Here a parameter keeps its shape and is annotated; when to gather it, and that its
gradient is reduced and scattered, is decided by the compiler.
"""

from collections.abc import Callable
from typing import Any

import jax
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchax.compat import torch_compat
from torchax.core.explanations import require_eager
from torchax.dispatch.transfer import keep_gradient_beside
from torchax.distributed import (
  fsdp_modules,
  meshes,
  mixed_precision,
  modules,
  placements,
)
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
  the mesh shards, one before it replicates (HSDP). Parameters on meta have zeros then,
  in parts. `reshard_after_forward` has no meaning here. The modules become
  `FSDPModule`s; see `fsdp_modules.py`.

  Raises:
    CollectiveError: a policy of offloading, or a placement of `shard_placement_fn`
      that does not fit. Nothing has changed.
    TracedStateError: in a compiled function.
  """
  parts = module if isinstance(module, list | tuple) else [module]
  if mesh is None and any(map(_is_on_jax, parts)):
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
  require_eager("`fully_shard`")
  _refuse_offloading(offload_policy)
  if mp_policy is not None:
    mixed_precision.require_known(mp_policy)
  ignored = {id(parameter) for parameter in ignored_params or ()}
  parameters = {id(p): p for part in parts for p in part.parameters()}
  planned = {
    key: _sharding(parameter, mesh, shard_placement_fn)
    for key, parameter in parameters.items()
    if key not in ignored
  }
  for inner in dict.fromkeys(inner for part in parts for inner in part.modules()):
    modules.move(inner, lambda tensor: planned.get(id(tensor)))
  for key, sharding in planned.items():
    parameter = parameters[key]
    array = placements.put(parameter.jax(), sharding, from_first=True)
    parameter.replace_jax(array)
    keep_gradient_beside(parameter)
  precision = _precision(parts, ignored, mp_policy)
  for part in parts:
    fsdp_modules.mark(part, fsdp_modules.Record(mesh.size(), precision))
  return module


def _precision(roots, ignored: set[int], policy):
  """What the modules compute in; None for the dtypes that they have."""
  if policy is None or (policy.param_dtype is None and policy.output_dtype is None):
    return None
  places = {
    (part, name): None
    for root in roots
    for part in _without_sharded(root)
    for name, parameter in part.named_parameters(recurse=False)
    if parameter.is_floating_point() and id(parameter) not in ignored
  }
  return mixed_precision.Precision(roots, list(places), policy)


def _without_sharded(module: torch.nn.Module):
  """A module and those inside of it, but for the ones that `fully_shard` has had."""
  yield module
  for child in module.children():
    if not fsdp_modules.is_sharded(child):
      yield from _without_sharded(child)


def _is_on_jax(module: torch.nn.Module) -> bool:
  return any(isinstance(parameter, Tensor) for parameter in module.parameters())


def _default_mesh() -> DeviceMesh:
  """One axis over all devices."""
  shape = (jax.device_count(),)
  return dist.init_device_mesh(meshes.DEVICE, shape, mesh_dim_names=("fsdp",))


def _refuse_offloading(offload_policy) -> None:
  if offload_policy is not None and type(offload_policy).__name__ != "OffloadPolicy":
    raise CollectiveError(
      f"fully_shard on jax takes no offload_policy, but got {offload_policy}. Leave it "
      "out: the parameters stay on the devices."
    )


def _sharding(parameter, mesh: DeviceMesh, choose: Callable | None):
  """How a parameter is to lie: as it does, and along the last axis of the mesh."""
  array = parameter.jax() if isinstance(parameter, Tensor) else None
  known = () if array is None else placements.placements_of(array, mesh)
  if array is not None and known and known[-1].is_shard():
    return array.sharding  # by an inner module's fully_shard
  others = (placements.replicated(),) * (mesh.ndim - 1)

  def along(last):
    return placements.sharding_of(mesh, (*others, last), parameter.shape, array)

  chosen = choose(parameter) if choose is not None else None
  if chosen is not None:
    return along(chosen)
  for dim in range(parameter.dim()):
    try:
      return along(placements.shard(dim))
    except CollectiveError:  # it does not divide
      continue
  return along(placements.replicated())


def refuse_first_version(original: Callable, self, module, *args, **kwargs) -> None:
  """`FullyShardedDataParallel(module)`, which flattens parameters; not on jax.

  Raises:
    CollectiveError: the module is on jax.
  """
  if isinstance(module, torch.nn.Module) and _is_on_jax(module):
    raise CollectiveError(
      "FullyShardedDataParallel joins parameters to flat ones, for which jax has no "
      "use. Write `torch.distributed.fsdp.fully_shard(module, mesh="
      'init_device_mesh("jax", (jax.device_count(),)))`.'
    )
  original(self, module, *args, **kwargs)


def register() -> None:
  """Puts the functions in place of torch's."""
  package = "torch.distributed.fsdp"
  route = torch_compat.reroute
  route(torch_compat.function_of(f"{package}.fully_shard"), fully_shard)
  for name, instead in (
    ("register_fsdp_forward_method", fsdp_modules.register_forward_method),
    ("share_comm_ctx", fsdp_modules.share_context),
  ):
    route(torch_compat.function_of(f"{package}.{name}"), instead)
  first: Any = torch_compat.function_of(f"{package}.FullyShardedDataParallel")
  torch_compat.reroute_method(first, "__init__", refuse_first_version)
