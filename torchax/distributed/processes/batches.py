"""Batches of several processes: which rows come in which step, means in a fixed order.

The rows of step t are a function of the seed and of t alone. So the position of the
data is the number of the step, a run goes on where it was killed, and it may go on with
another number of processes.

Devices add what they have found in another order than one device adds all of it, so
that sums of floating-point numbers differ in their last bits. `in_fixed_order` cuts a
batch into a fixed number of chunks. Each is computed by itself, by one program, and the
results are added in the order of the chunks.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from torchax.core.tracebacks import ending_at_the_user
from torchax.distributed.processes.arrays import rows_here
from torchax.interop import call_jax, jax_shard_map, scan
from torchax.rng import rng_scope

_MOST_SEEDS = 2**31 - 1


class Batches(torch.utils.data.Sampler[list[int]]):
  """The `batch_sampler` of a DataLoader whose batches are split among processes.

  In each epoch all rows come once, in an order of that epoch; what does not fill a
  batch is left out. Each process gets the rows of the global batch that its devices
  hold, in their order, so that the batch is that of a single process, row for row.

  Args:
    size: rows of the data set.
    batch_size: rows of a global batch.
    sharding: of the batch, see `rows_here`; by default this process has all rows.
    seed: of the order; the same in all processes.
    shuffle: False keeps the rows in their order.
    start: the first step: how many global batches have been used.
    epochs: after which the batches end; None never ends.

  Raises:
    ValueError: a batch larger than the data set, a negative start.

  >>> batches = Batches(10, batch_size=4, seed=1, epochs=2)
  >>> [len(rows) for rows in batches]
  [4, 4, 4, 4]
  >>> list(Batches(10, batch_size=4, seed=1, start=3, epochs=2)) == list(batches)[3:]
  True
  """

  def __init__(
    self,
    size: int,
    batch_size: int,
    sharding: Sharding | None = None,
    *,
    seed: int = 0,
    shuffle: bool = True,
    start: int = 0,
    epochs: int | None = None,
  ):
    if not 0 < batch_size <= size:
      raise ValueError(
        f"A batch has from 1 row to all {size} of the data set, but got {batch_size}."
      )
    if start < 0 or seed < 0:
      raise ValueError(
        f"Batches expects start >= 0 and seed >= 0, but got {start=}, {seed=}."
      )
    self.size, self.batch_size, self.seed, self.shuffle = (
      *(size, batch_size),
      *(seed, shuffle),
    )
    self.start, self.epochs = start, epochs
    self.rows = (
      list(range(batch_size)) if sharding is None else rows_here(sharding, batch_size)
    )

  @property
  def per_epoch(self) -> int:
    """How many batches an epoch has."""
    return self.size // self.batch_size

  def __len__(self) -> int:
    if self.epochs is None:
      raise TypeError("Batches without `epochs` never end, and have no length.")
    return max(0, self.epochs * self.per_epoch - self.start)

  def __iter__(self) -> Iterator[list[int]]:
    epoch, place = divmod(self.start, self.per_epoch)
    while self.epochs is None or epoch < self.epochs:
      order = self._order(epoch)
      for batch in range(place, self.per_epoch):
        rows = order[batch * self.batch_size : (batch + 1) * self.batch_size]
        yield rows[self.rows].tolist()
      epoch, place = epoch + 1, 0

  def _order(self, epoch: int) -> np.ndarray:
    if not self.shuffle:
      return np.arange(self.size)
    return np.random.default_rng([self.seed, epoch]).permutation(self.size)


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
