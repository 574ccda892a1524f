"""Assembly of global arrays from the rows of each process, and their replication."""

import functools
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from torchax.core import mappings
from torchax.core.partitions import is_tensor
from torchax.core.tracebacks import hide_library_frames
from torchax.environment import default_env
from torchax.errors import ProcessError
from torchax.tensor import Tensor, new_tensor


def rows_here(sharding: Sharding, batch_size: int) -> list[int]:
  """Return the rows of a global batch that are on devices of this process.

  Two processes have the same rows if the batch is not split between them, as in tensor
  parallelism over processes.

  Args:
    sharding: sharding of the batch; only its first dimension matters.
    batch_size: number of rows of the global batch.

  Returns:
    Row indices, ascending.

  Raises:
    ValueError: the rows do not divide equally among the devices.

  >>> mesh = jax.make_mesh((1,), ("data",))
  >>> rows_here(NamedSharding(mesh, PartitionSpec("data")), 4)
  [0, 1, 2, 3]
  """
  size = sharding.shard_shape((batch_size,))[0]  # raises if it does not divide
  indices = sharding.addressable_devices_indices_map((batch_size,)).values()
  starts = {index[0].indices(batch_size)[0] for index in indices if index is not None}
  return [row for start in sorted(starts) for row in range(start, start + size)]


@hide_library_frames
def global_batch(local: Any, sharding: Sharding) -> Any:
  """Assemble global tensors from the rows of each process.

  Args:
    local: a tree of CPU tensors or numpy arrays of shape (rows of this process, …): the
      rows of `rows_here`, in order. A DataLoader over `Batches` yields them.
    sharding: sharding of the global tensors, of shape (rows of all processes, …).

  Returns:
    The tree with global jax tensors.

  Raises:
    ProcessError: a leaf has no dimensions, or leaves differ in their number of rows.

  >>> import jax
  >>> mesh = jax.make_mesh((1,), ("data",))
  >>> global_batch(torch.ones(2, 3), NamedSharding(mesh, PartitionSpec("data"))).shape
  torch.Size([2, 3])
  """
  leaves, treedef = jax.tree.flatten(local, is_leaf=is_tensor)
  values = [_to_numpy(leaf) for leaf in leaves]
  if len({value.shape[:1] for value in values}) > 1 or not all(v.ndim for v in values):
    raise ProcessError(
      "global_batch expects tensors with the rows of this process as their first "
      f"dimension, the same number in all, but got {[list(v.shape) for v in values]}."
    )
  env = default_env()
  arrays = [jax.make_array_from_process_local_data(sharding, v) for v in values]
  return jax.tree.unflatten(treedef, [new_tensor(array, env) for array in arrays])


def _to_numpy(leaf) -> np.ndarray:
  if isinstance(leaf, Tensor):
    return leaf.numpy()
  return mappings.values_for_jax(torch.as_tensor(leaf, device="cpu"))


@hide_library_frames
def gather(tree: Any) -> Any:
  """Replicate global tensors, so that each process has all of their values.

  All processes must call it. The result takes the memory of the whole tensor on each
  device; its `.numpy()`, `.cpu()` and `print` work in every process.

  Args:
    tree: a tree of tensors and other values; arrays of one process stay unchanged.

  Returns:
    The tree with replicated tensors.

  Raises:
    ProcessError: the sharding of a global array is not a `NamedSharding`.
  """
  leaves, treedef = jax.tree.flatten(tree, is_leaf=is_tensor)
  return jax.tree.unflatten(treedef, [_replicate(leaf) for leaf in leaves])


def _replicate(leaf):
  array = leaf.jax() if isinstance(leaf, Tensor) else leaf
  if not isinstance(array, jax.Array) or array.is_fully_addressable:
    return leaf
  if array.is_fully_replicated:
    return leaf
  sharding = array.sharding
  if not isinstance(sharding, NamedSharding):
    raise ProcessError(
      "gather expects arrays over a mesh (NamedSharding), but got one with "
      f"{sharding}. Move it with `tensor.shard_(NamedSharding(mesh, spec))`."
    )
  result = _replicate_to(NamedSharding(sharding.mesh, PartitionSpec()))(array)
  return new_tensor(result, default_env()) if isinstance(leaf, Tensor) else result


@functools.lru_cache(maxsize=16)
def _replicate_to(sharding: NamedSharding):
  return jax.jit(lambda array: array, out_shardings=sharding)
