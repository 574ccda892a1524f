"""Laws of torch's meshes: devices, flattened dimensions, groups of collectives.

`dtensor_cases.py` runs them.
"""

import jax
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from distributed.dtensor_parts import (
  assert_trains_alike,
  case,
  grid,
  line,
  numbers,
  pair,
)
from jax.sharding import PartitionSpec
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
  ColwiseParallel,
  RowwiseParallel,
  parallelize_module,
)

from torchax.distributed import jax_mesh, placements_of, sharding_of
from torchax.errors import CollectiveError
from torchax.interop import jax_jit, jax_shard_map


@case
def a_mesh_is_of_jaxs_devices_and_its_rank_is_the_process():
  mesh = grid()
  assert mesh.device_type == "jax" and mesh.shape == (2, 4) and mesh.size() == 8
  assert mesh["tp"].size() == 4 and mesh["dp", "tp"] == mesh
  assert dist.get_world_size() == 1 and dist.get_rank() == mesh.get_rank() == 0
  assert mesh.get_local_rank("tp") == 0 and mesh.get_coordinate() == (0, 0)
  assert mesh.get_group("tp").size() == 4 and dist.get_backend() == "jax"
  as_jax = jax_mesh(mesh)
  assert as_jax == jax_mesh(mesh["tp"])
  assert as_jax.axis_names == ("dp", "tp") and as_jax.devices.shape == (2, 4)
  assert list(as_jax.devices.flat) == jax.devices()
  turned = DeviceMesh("jax", [[7, 6], [5, 4]], mesh_dim_names=("a", "b"))
  assert [d.id for d in jax_mesh(turned).devices.flat] == [7, 6, 5, 4]
  assert jax_mesh(line()).axis_names == ("dim_0",)


@case
def meshes_of_one_name_and_several_sizes_have_groups_of_their_own():
  meshes = [init_device_mesh("jax", (n,), mesh_dim_names=("tp",)) for n in (8, 2, 8)]
  assert [mesh.get_group().size() for mesh in meshes] == [8, 2, 8]

  def gathered(mesh):
    gather = jax_shard_map(
      lambda x: functional.all_gather_tensor(x, 0, mesh),
      mesh=jax_mesh(mesh),
      in_specs=PartitionSpec("tp"),
      out_specs=PartitionSpec("tp"),
    )
    return gather(numbers(8).to("jax")).shape[0]

  assert [gathered(mesh) for mesh in meshes] == [64, 16, 64]


def cube() -> DeviceMesh:
  return init_device_mesh("jax", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))


@case
def a_flattened_mesh_is_one_dimension_of_several_axes():
  mesh = cube()
  flat = mesh["dp", "cp"]._flatten("dp_cp")
  assert flat.mesh_dim_names == ("dp_cp",) and flat.size() == 4
  assert mesh["dp_cp"] == flat == mesh["dp", "cp"]._flatten("dp_cp")
  assert jax_mesh(flat) == jax_mesh(mesh)
  assert flat.get_group() is mesh.get_group("dp_cp") and flat.get_group().size() == 4
  assert flat.get_coordinate() == (0,) and flat.get_local_rank() == 0
  assert mesh["dp_cp", "tp"].shape == (4, 2)
  assert [g.size() for g in mesh["dp_cp", "tp"].get_all_groups()] == [4, 2]
  whole = mesh._flatten("world")
  assert whole.size() == 8 and whole.get_group().size() == 8
  again = cube()["cp", "tp"]._flatten("dp_cp")  # the same name, of other axes
  expected = [PartitionSpec(("dp", "cp")), PartitionSpec(("cp", "tp"))]
  for part, spec in zip((flat, again), expected, strict=True):
    found = sharding_of(part, [Shard(0)], (8, 4))
    wanted = jax.sharding.NamedSharding(jax_mesh(part), spec)
    assert found.is_equivalent_to(wanted, 2)


@case
def tensors_lie_on_flattened_meshes():
  mesh = cube()
  flat = mesh["dp", "cp"]._flatten("dp_cp")
  both = mesh["dp_cp", "tp"]
  x = distribute_tensor(numbers(8, 8), both, [Shard(0), Shard(1)])
  assert x.placements == (Shard(0), Shard(1)) and x.device_mesh == both
  assert placements_of(x.jax(), mesh) == (Shard(0), Shard(0), Shard(1))
  assert placements_of(x.jax(), flat) == (Shard(0),)
  assert x.jax().addressable_shards[0].data.shape == (2, 4)
  y = x.redistribute(flat, [Shard(1)])
  assert placements_of(y.jax(), mesh) == (Shard(1), Shard(1), Shard(1))
  one = distribute_tensor(numbers(8, 4), mesh, [Shard(0), Replicate(), Replicate()])
  assert placements_of(one.jax(), flat) == ()  # along a part of its axes alone
  assert torch.equal(one.redistribute(flat, [Shard(0)]).cpu(), numbers(8, 4))


@case
def a_flattened_mesh_is_a_group_of_collectives():
  mesh = cube()
  rows = numbers(8, 4)
  for axes in (("dp", "cp"), ("dp", "tp"), ("dp", "cp", "tp")):
    group = mesh[axes]._flatten("_".join(axes))
    spec = PartitionSpec(axes)
    options = {"mesh": jax_mesh(mesh), "in_specs": spec}
    total = jax_shard_map(
      lambda x, group=group: functional.all_reduce(x.sum(0), "sum", group),
      out_specs=PartitionSpec(),
      **options,
    )
    torch.testing.assert_close(total(rows.to("jax")).cpu(), rows.sum(0))
    gathered = jax_shard_map(
      lambda x, group=group: functional.all_gather_tensor(x, 0, group),
      out_specs=spec,
      **options,
    )
    torch.testing.assert_close(
      gathered(rows.to("jax")).cpu(), rows.repeat(group.size(), 1)
    )


@case
def modules_are_fully_sharded_over_a_flattened_mesh():
  block, reference = pair()
  mesh = cube()
  mesh["dp", "cp"]._flatten("dp_cp")
  plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
  parallelize_module(block.to("jax"), mesh["tp"], plan)
  fully_shard(block, mesh=mesh["dp_cp"])
  assert placements_of(block.up.weight.jax(), mesh) == (Shard(0),) * 3
  assert_trains_alike(block, reference)


@case
def a_dimension_of_a_mesh_is_a_group_of_collectives():
  mesh = grid()
  rows = numbers(8, 8)

  def run(function):
    spec = PartitionSpec("tp")
    mapped = jax_shard_map(function, mesh=jax_mesh(mesh), in_specs=spec, out_specs=spec)
    return jax_jit(mapped)(rows.to("jax")).cpu()

  total = rows.reshape(4, 2, 8).sum(0).repeat(4, 1)
  for group in (mesh["tp"], (mesh, 1), mesh.get_group("tp")):
    found = run(lambda x, g=group: functional.all_reduce(x, "sum", g))
    torch.testing.assert_close(found, total)
  found = run(lambda x: functional.all_reduce(x, "sum", dist.group.WORLD))
  torch.testing.assert_close(found, 2 * total)  # all axes that are mapped
  found = run(lambda x: functional.reduce_scatter_tensor(x, "sum", 1, mesh["tp"]))
  torch.testing.assert_close(
    found, torch.cat(rows.reshape(4, 2, 8).sum(0).chunk(4, dim=1))
  )
  found = run(lambda x: functional.all_to_all_single(x.T, None, None, mesh["tp"]))
  expected = [torch.cat([c.T.chunk(4)[i] for c in rows.chunk(4)]) for i in range(4)]
  torch.testing.assert_close(found, torch.cat(expected))


@case
def a_permutation_sends_from_member_to_member_and_gradients_back():
  mesh = grid()

  def turned(group):
    return jax_shard_map(
      lambda x: functional.permute_tensor(x, [2, 0, 3, 1], group),
      mesh=jax_mesh(mesh),
      in_specs=PartitionSpec("tp"),
      out_specs=PartitionSpec("tp"),
    )

  x = numbers(4).to("jax").requires_grad_()
  weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
  for group in ("tp", mesh["tp"], (mesh, 1)):
    x.grad = None
    y = turned(group)(x)
    assert torch.equal(y.detach().cpu(), numbers(4)[[1, 3, 0, 2]])
    (y * weights.to("jax")).sum().backward()
    assert torch.equal(x.grad.cpu(), weights[[2, 0, 3, 1]])
  with pytest.raises(CollectiveError, match="permutation of 0 to 3.*got .0, 0, 1, 2"):
    jax_shard_map(
      lambda x: functional.permute_tensor(x, [0, 0, 1, 2], "tp"),
      mesh=jax_mesh(mesh),
      in_specs=PartitionSpec("tp"),
      out_specs=PartitionSpec("tp"),
    )(x)
