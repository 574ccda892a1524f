"""torch's `context_parallel` on a mesh on jax: attention over a sharded sequence.

Inside the block the buffers are sharded along their sequences, and keep their shapes.
XLA partitions attention, and gathers keys and values, as torch does by default. Any
mask, dropout and the gradients have the numbers of one device.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchax.compat import torch_compat
from torchax.distributed import meshes, placements
from torchax.errors import CollectiveError
from torchax.tensor import Tensor


def context_parallel(
  original: Callable,
  mesh: DeviceMesh,
  *,
  buffers: Sequence[torch.Tensor] | None = None,
  buffer_seq_dims: Sequence[int] | None = None,
  no_restore_buffers: set[torch.Tensor] | None = None,
) -> Iterator[None]:
  """Implement `context_parallel`: shard the buffers, in place, until the block ends.

  Raises:
    ValueError: the buffers do not match their dimensions, or do not include
      `no_restore_buffers`.
    CollectiveError: a buffer is not on jax, or the mesh does not divide its sequence.
  """
  if not meshes.is_on_jax(mesh):
    yield from original(
      mesh,
      buffers=buffers,
      buffer_seq_dims=buffer_seq_dims,
      no_restore_buffers=no_restore_buffers,
    )
    return
  buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
  kept = {id(buffer) for buffer in no_restore_buffers or ()}
  if len(buffers) != len(dims):
    raise ValueError(
      f"`context_parallel` expects a sequence dimension for each of {len(buffers)} "
      f"buffers, but got {len(dims)}: buffer_seq_dims={dims}."
    )
  if not kept <= {id(buffer) for buffer in buffers}:
    raise ValueError("`no_restore_buffers` must be a subset of `buffers`.")
  sharded = [
    placements.place(buffer.detach(), mesh, [placements.shard(dim)] * mesh.ndim)
    for buffer, dim in zip(_on_jax(buffers), dims)
  ]
  before = [buffer.jax() for buffer in buffers]
  for buffer, shards in zip(buffers, sharded):
    buffer.replace_jax(shards.jax())
  try:
    yield
  finally:
    for buffer, array in zip(buffers, before):
      if id(buffer) not in kept:
        buffer.replace_jax(array)


def unshard(
  original: Callable,
  mesh: DeviceMesh,
  buffers: Sequence[torch.Tensor],
  seq_dims: Sequence[int],
  load_balancer=None,
) -> list[torch.Tensor]:
  """Implement `context_parallel_unshard`: replicate the buffers over the mesh.

  Raises:
    CollectiveError: a load balancer is given, or a buffer is not on jax.
  """
  if not meshes.is_on_jax(mesh):
    return original(mesh, buffers, seq_dims, load_balancer)
  if load_balancer is not None:
    raise CollectiveError(
      "`context_parallel_unshard` on jax expects load_balancer=None, but got "
      f"{type(load_balancer).__name__}. Sequences keep their order there."
    )
  return [placements.place(buffer, mesh, None) for buffer in _on_jax(buffers)]


def _on_jax(buffers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
  for buffer in buffers:
    if not isinstance(buffer, Tensor):
      raise CollectiveError(
        "`context_parallel` on a mesh on jax expects buffers on jax, but got one on "
        f'{buffer.device}. Move it before: buffer.to("jax").'
      )
  return buffers


def register() -> None:
  """Replace torch's functions."""
  torch_compat.enter_context_parallel(context_parallel, unshard)
