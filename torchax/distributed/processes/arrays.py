"""Arrays of all processes: made of what each has read, and brought together again."""

import functools
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from torchax.core import mappings
from torchax.core.tracebacks import ending_at_the_user
from torchax.environment import default_env
from torchax.errors import ProcessError
from torchax.tensor import Tensor, new_tensor


def rows_here(sharding: Sharding, batch_size: int) -> list[int]:
  """The rows of a global batch that lie on devices of this process.

  Two processes have the same rows where the batch is not split between them, as in
  tensor parallelism over processes.

  Args:
    sharding: of the batch; its first dimension decides.
    batch_size: rows of the global batch.

  Returns:
    Numbers of rows, ascending.

  Raises:
    ValueError: the devices cannot have equally many rows.
  """
  shard = sharding.shard_shape((batch_size,))[0]  # raises if it does not divide
  indices = sharding.addressable_devices_indices_map((batch_size,)).values()
  starts = {index[0].indices(batch_size)[0] for index in indices if index is not None}
  return [row for start in sorted(starts) for row in range(start, start + shard)]


@ending_at_the_user
def global_batch(local: Any, sharding: Sharding) -> Any:
  """Makes tensors of all processes of the rows that each process has read.

  Args:
    local: a tree of CPU tensors or numpy arrays of shape (rows of this process, …):
      those of `rows_here`, in their order, as a DataLoader over `Batches` has them.
    sharding: of the global tensors, of shape (rows of all, …).

  Returns:
    The tree with jax tensors.

  Raises:
    ProcessError: leaves of a tree that have no, or differently many, rows.

  >>> import jax
  >>> mesh = jax.make_mesh((1,), ("data",))
  >>> global_batch(torch.ones(2, 3), NamedSharding(mesh, PartitionSpec("data"))).shape
  torch.Size([2, 3])
  """
  leaves, treedef = jax.tree.flatten(local, is_leaf=_is_tensor)
  values = [_on_host(leaf) for leaf in leaves]
  if len({value.shape[:1] for value in values}) > 1 or not all(v.ndim for v in values):
    raise ProcessError(
      "global_batch expects tensors with the rows of this process as their first "
      f"dimension, equally many in all, but got {[list(v.shape) for v in values]}."
    )
  env = default_env()
  arrays = [jax.make_array_from_process_local_data(sharding, v) for v in values]
  return jax.tree.unflatten(treedef, [new_tensor(array, env) for array in arrays])


def _is_tensor(leaf) -> bool:
  return isinstance(leaf, torch.Tensor)


def _on_host(leaf) -> np.ndarray:
  if isinstance(leaf, Tensor):
    return leaf.numpy()
  return mappings.values_for_jax(torch.as_tensor(leaf, device="cpu"))


@ending_at_the_user
def gather(tree: Any) -> Any:
  """Tensors of all processes with all their numbers in each process.

  All processes call it. The result takes the memory of the whole on each device; its
  `.numpy()`, `.cpu()` and `print` work in every process.

  Args:
    tree: of tensors and other values; what lies on devices of one process stays.
  """
  leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_tensor)
  return jax.tree.unflatten(treedef, [_gathered(leaf) for leaf in leaves])


def _gathered(leaf):
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
  whole = _replicate(NamedSharding(sharding.mesh, PartitionSpec()))(array)
  return new_tensor(whole, default_env()) if isinstance(leaf, Tensor) else whole


@functools.lru_cache(maxsize=16)
def _replicate(sharding: NamedSharding):
  return jax.jit(lambda array: array, out_shardings=sharding)
