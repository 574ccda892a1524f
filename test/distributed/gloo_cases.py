"""Functional collectives on jax, compared with torch's gloo.

usage:
  gloo_cases.py RANK SIZE FOLDER    one of SIZE processes of plain torch
  gloo_cases.py OUT                 the laws, in a process with eight devices

Each process writes its results to FOLDER, the folder of OUT: by name of the case, the
result and the gradient of the input. A law compares one case.
"""

import functools
import pathlib
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

ROWS = 8


def inputs(size: int, dtype: torch.dtype) -> torch.Tensor:
  """Return the inputs of all members, (member, row, column)."""
  generator = torch.Generator().manual_seed(size)
  if dtype == torch.int32:
    return torch.randint(0, 16, (size, ROWS, 4), generator=generator, dtype=dtype)
  return torch.rand(size, ROWS, 4, generator=generator) + 0.5


def weighted(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
  """Return a sum of the result, with weights that depend on this member."""
  numbers = torch.arange(1.0, result.numel() + 1, device=x.device)
  return (result * numbers.view(result.shape).sin()).sum() * x.detach().flatten()[0]


def turned(size: int) -> list[int]:
  """Return the destination of each member's tensor."""
  return [(rank + 1) % size for rank in range(size)]


def _equal(size: int) -> list[int]:
  return [ROWS // size] * size


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
  return torch.cat([functional.wait_tensor(tensor) for tensor in tensors])


# Name -> function of a member's tensor, its group and the number of members.
FLOATS: dict[str, Callable] = {
  **{
    f"all_reduce {name}": lambda x, group, size, name=name: functional.all_reduce(
      x, name, group
    )
    for name in ("sum", "product", "min", "max")
  },
  "all_gather of rows": lambda x, group, size: functional.all_gather_tensor(
    x, 0, group
  ),
  "all_gather of columns": lambda x, group, size: functional.all_gather_tensor(
    x, 1, group
  ),
  "reduce_scatter of rows": lambda x, group, size: functional.reduce_scatter_tensor(
    x, "sum", 0, group
  ),
  "reduce_scatter of columns": lambda x, group, size: functional.reduce_scatter_tensor(
    x, "sum", 1, group
  ),
  "all_to_all": lambda x, group, size: functional.all_to_all_single(
    x, _equal(size), _equal(size), group
  ),
  "broadcast": lambda x, group, size: functional.broadcast(x, 1, group),
  # torch permutes only tensors with one dim.
  "permute": lambda x, group, size: functional.permute_tensor(
    x.flatten(), turned(size), group
  ),
  "all_reduce of several": lambda x, group, size: joined(
    functional.all_reduce_coalesced([x, x * 2], "sum", group)
  ),
  "all_gather of several": lambda x, group, size: joined(
    functional.all_gather_into_tensor_coalesced([x * 2, x], group)
  ),
  "reduce_scatter of several": lambda x, group, size: joined(
    functional.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 0], group)
  ),
  "all_gather with autograd": lambda x, group, size: (
    functional.all_gather_tensor_autograd(x * 1, 0, group)
  ),
  "reduce_scatter with autograd": lambda x, group, size: (
    functional.reduce_scatter_tensor_autograd(x * 1, "sum", 0, group)
  ),
  "all_to_all with autograd": lambda x, group, size: (
    functional.all_to_all_single_autograd(x * 1, _equal(size), _equal(size), group)
  ),
}
INTEGERS: dict[str, Callable] = {
  f"all_reduce {name}": lambda x, group, size, name=name: functional.all_reduce(
    x, name, group
  )
  for name in ("sum", "product", "min", "max", "band", "bor", "bxor")
}
TABLES = {torch.float32: FLOATS, torch.int32: INTEGERS}
CASES = {
  f"{name}, {str(dtype).removeprefix('torch.')}": (function, dtype)
  for dtype, table in TABLES.items()
  for name, function in table.items()
}
SIZES = (2, 4)


# In torch, only the sum of all_reduce has a gradient. That of broadcast is the gradient
# of a copy: it stays with each member and does not go to the source.
WITHOUT_GRADIENT = (
  *("all_reduce product", "all_reduce min", "all_reduce max"),
  "broadcast",
)


def run(function: Callable, x: torch.Tensor, group, size: int, differentiates: bool):
  """Return a result, and the gradient of its weighted sum if asked for and defined."""
  x = x.detach().requires_grad_(differentiates)
  result = functional.wait_tensor(function(x, group, size))
  if not (differentiates and result.requires_grad):
    return result.detach(), None
  return result.detach(), torch.autograd.grad(weighted(result, x), x)[0]


def with_gloo(rank: int, size: int, folder: pathlib.Path) -> None:
  """Write the results of one process with gloo."""
  store = dist.FileStore(str(folder / f"store {size}"), size)
  dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
  found = {}
  for name, (function, dtype) in CASES.items():
    x, group = inputs(size, dtype)[rank], dist.group.WORLD
    has_one = dtype.is_floating_point and not name.startswith(WITHOUT_GRADIENT)
    found[name] = run(function, x, group, size, has_one)
  torch.save(found, folder / f"{rank} of {size}.pt")
  dist.barrier()
  dist.destroy_process_group()


# On jax -------------------------------------------------------------------------------


@functools.cache
def of_gloo(size: int) -> list[dict]:
  """Return the results that each gloo process has written."""
  folder = pathlib.Path(sys.argv[1]).parent
  return [torch.load(folder / f"{rank} of {size}.pt") for rank in range(size)]


def agree(name: str, size: int) -> None:
  """Raise if a case on jax differs from gloo."""
  from jax.sharding import PartitionSpec
  from torch.distributed.device_mesh import init_device_mesh

  import torchax
  from torchax.interop import jax_jit, jax_shard_map

  function, dtype = CASES[name]
  expected = [found[name] for found in of_gloo(size)]
  has_gradient = expected[0][1] is not None
  mesh = init_device_mesh("jax", (size,), mesh_dim_names=(f"ranks_{size}",))
  spec = PartitionSpec(f"ranks_{size}")

  def of_one(stacked):
    result, gradient = run(function, stacked[0], mesh, size, has_gradient)
    return result[None], (gradient if has_gradient else stacked[0])[None]

  mapped = jax_shard_map(
    of_one, mesh=torchax.distributed.jax_mesh(mesh), in_specs=spec, out_specs=spec
  )
  results, gradients = jax_jit(mapped)(inputs(size, dtype).to("jax"))
  for rank, (result, gradient) in enumerate(expected):
    torch.testing.assert_close(results[rank].cpu(), result, rtol=1e-6, atol=1e-6)
    if has_gradient:
      torch.testing.assert_close(gradients[rank].cpu(), gradient)


def main() -> None:
  """Run one process of gloo, or the laws."""
  if len(sys.argv) == 4:
    rank, size, folder = sys.argv[1:]
    with_gloo(int(rank), int(size), pathlib.Path(folder))
    return
  import many_devices

  many_devices.main(
    {
      f"{name} of {size}": functools.partial(agree, name, size)
      for name in CASES
      for size in SIZES
    }
  )


if __name__ == "__main__":
  main()
