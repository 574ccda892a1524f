"""Means over a batch that do not depend on how many devices compute them.

Devices add what they have found in another order than one device adds all of it, so
that sums of floating-point numbers differ in their last bits. Here a batch is cut into
a fixed number of chunks. Each is computed by itself, by one program, and the results
are added in the order of the chunks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torchax.core.tracebacks import ending_at_the_user
from torchax.interop import call_jax, jax_shard_map, scan
from torchax.rng import rng_scope

_MOST_SEEDS = 2**31 - 1


def _on_each_chunk(function: Callable) -> Callable:
  """The function for the rows of one device, chunk by chunk, each with its own seed."""

  def of_device(parameters, rows, seeds):
    def of_chunk(carry, given):
      chunk, seed = given
      with rng_scope(seed):
        return carry, function(parameters, chunk)

    return scan(of_chunk, torch.zeros((), device="jax"), (rows, seeds))[1]

  return of_device


def _mean_in_order(everywhere: NamedSharding, found: jax.Array) -> jax.Array:
  """The mean of the results of all chunks, which each device adds in their order."""
  found = jax.lax.with_sharding_constraint(found, everywhere)
  return functools.reduce(lambda a, b: a + b, list(found)) / len(found)


@ending_at_the_user
def in_fixed_order(
  function: Callable[[Any, torch.Tensor], Any], mesh: Mesh, axis: str, chunks: int
) -> Callable[[Any, torch.Tensor], Any]:
  """The mean of a function over the chunks of a batch, on any number of devices.

  With `jax_value_and_grad(loss)` as the function, losses and gradients are the same on
  two and more devices of one kind, bit for bit; on a single device, where XLA compiles
  another program, the last bit may differ. All devices have all parameters, and each
  gets the results of all chunks: `chunks` times the bytes of one sum.

  Args:
    function: `(parameters, rows) -> tree of tensors`, a mean over its rows. What it
      draws is drawn for each chunk; other numbers than those of the whole batch.
    mesh, axis: of the devices, and its axis over which the batch is spread.
    chunks: a multiple of the size of that axis.

  Returns:
    `(parameters, batch) -> tree of tensors`, to be called in a function that is
    compiled; the batch has a multiple of `chunks` rows.

  Raises:
    ValueError: chunks that the devices, or the rows, cannot share equally.
  """
  if chunks < 1 or chunks % mesh.shape[axis]:
    raise ValueError(
      f"in_fixed_order expects a number of chunks that the {mesh.shape[axis]} parts of "
      f"the axis {axis!r} divide, but got {chunks}."
    )
  parts, whole = PartitionSpec(axis), PartitionSpec()

  of_all = jax_shard_map(
    _on_each_chunk(function),
    mesh=mesh,
    in_specs=(whole, parts, parts),
    out_specs=parts,
    check_vma=False,
  )

  mean = functools.partial(_mean_in_order, NamedSharding(mesh, whole))

  def run(parameters, batch):
    if batch.shape[0] % chunks:
      raise ValueError(
        f"in_fixed_order cuts a batch into {chunks} chunks of equally many rows, but "
        f"got {batch.shape[0]} rows."
      )
    seeds = torch.randint(_MOST_SEEDS, (chunks,), device="jax", dtype=torch.int32)
    found = of_all(parameters, batch.unflatten(0, (chunks, -1)), seeds)
    return call_jax(lambda tree: jax.tree.map(mean, tree), found)

  return run
