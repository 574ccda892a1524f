"""Batches split among processes, and means in a fixed order of summation.

The rows of step t depend only on the seed and on t. The step number therefore is the
position in the data: a killed run can resume, even with another number of processes.

Several devices add floating-point numbers in another order than one device, so sums
differ in their last bits. `in_fixed_order` cuts a batch into a fixed number of chunks,
runs one program on each chunk, and adds the results in the order of the chunks.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from torchax.core.tracebacks import hide_library_frames
from torchax.distributed.processes.arrays import rows_here
from torchax.interop import call_jax, jax_shard_map, scan
from torchax.rng import rng_scope

_MAX_SEED = 2**31 - 1


class Batches(torch.utils.data.Sampler[list[int]]):
  """Batch sampler of a DataLoader whose batches are split among processes.

  Each epoch visits all rows once, in its own order; an incomplete last batch is
  dropped. Each process gets the rows of the global batch that its devices hold, in
  order. Row for row, the global batch equals that of a single process.

  Args:
    size: number of rows of the data set.
    batch_size: number of rows of a global batch.
    sharding: sharding of the batch, see `rows_here`; by default this process gets all
      rows.
    seed: seed of the order; the same in all processes.
    shuffle: False keeps the rows in their order.
    start: first step: the number of global batches already used.
    epochs: number of epochs; None never ends.

  Raises:
    ValueError: the batch is larger than the data set, or `start` or `seed` is negative.

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
        f"Batches expects from 1 to {size} rows in a batch, but got {batch_size}."
      )
    if start < 0 or seed < 0:
      raise ValueError(
        f"Batches expects start >= 0 and seed >= 0, but got {start=}, {seed=}."
      )
    self.size, self.batch_size = size, batch_size
    self.seed, self.shuffle = seed, shuffle
    self.start, self.epochs = start, epochs
    self.rows = (
      list(range(batch_size)) if sharding is None else rows_here(sharding, batch_size)
    )

  @property
  def per_epoch(self) -> int:
    """Number of batches of an epoch."""
    return self.size // self.batch_size

  def __len__(self) -> int:
    if self.epochs is None:
      raise TypeError("Batches without `epochs` never end, and have no length.")
    return max(0, self.epochs * self.per_epoch - self.start)

  def __iter__(self) -> Iterator[list[int]]:
    epoch, step = divmod(self.start, self.per_epoch)
    while self.epochs is None or epoch < self.epochs:
      order = self._order(epoch)
      for batch in range(step, self.per_epoch):
        rows = order[batch * self.batch_size : (batch + 1) * self.batch_size]
        yield rows[self.rows].tolist()
      epoch, step = epoch + 1, 0

  def _order(self, epoch: int) -> np.ndarray:
    if not self.shuffle:
      return np.arange(self.size)
    return np.random.default_rng([self.seed, epoch]).permutation(self.size)


def _on_each_chunk(function: Callable) -> Callable:
  """Map a function over the chunks of one device, each with its own seed."""

  def map_chunks(parameters, rows, seeds):
    def step(carry, chunk_and_seed):
      chunk, seed = chunk_and_seed
      with rng_scope(seed):
        return carry, function(parameters, chunk)

    return scan(step, torch.zeros((), device="jax"), (rows, seeds))[1]

  return map_chunks


def _mean_in_order(replicated: NamedSharding, results: jax.Array) -> jax.Array:
  """Return the mean over the chunks; each device adds all of them in order."""
  results = jax.lax.with_sharding_constraint(results, replicated)
  return functools.reduce(lambda a, b: a + b, list(results)) / len(results)


@hide_library_frames
def in_fixed_order(
  function: Callable[[Any, torch.Tensor], Any], mesh: Mesh, axis: str, chunks: int
) -> Callable[[Any, torch.Tensor], Any]:
  """Return the mean of a function over the chunks of a batch, summed in fixed order.

  With `jax_value_and_grad(loss)` as the function, losses and gradients are bit-for-bit
  equal on any number of devices of one kind from two on. On a single device, XLA
  compiles another program, and the last bit may differ. Parameters are replicated, and
  each device receives the results of all chunks: `chunks` times the bytes of one sum.

  Args:
    function: `(parameters, rows) -> tree of tensors`, a mean over its rows. It draws
      separately for each chunk, so its draws differ from those for the whole batch.
    mesh, axis: device mesh, and its axis over which the batch is sharded.
    chunks: a multiple of the size of that axis.

  Returns:
    `(parameters, batch) -> tree of tensors`, to be called in a compiled function; the
    number of rows of the batch must be a multiple of `chunks`.

  Raises:
    ValueError: the chunks do not divide equally among the devices, or the rows among
      the chunks.

  >>> from torchax.interop import jax_jit
  >>> mesh = jax.make_mesh((1,), ("data",))
  >>> mean = lambda parameters, rows: (parameters * rows).mean()
  >>> step = jax_jit(in_fixed_order(mean, mesh, "data", chunks=2))
  >>> step(torch.tensor(2.0, device="jax"), torch.arange(4.0, device="jax"))
  tensor(3., device='jax:0')
  """
  if chunks < 1 or chunks % mesh.shape[axis]:
    raise ValueError(
      f"in_fixed_order expects a number of chunks that the {mesh.shape[axis]} parts of "
      f"the axis {axis!r} divide, but got {chunks}."
    )
  parts, whole = PartitionSpec(axis), PartitionSpec()
  on_all_devices = jax_shard_map(
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
        f"in_fixed_order expects a batch of {chunks} chunks with equally many rows, "
        f"but got {batch.shape[0]} rows."
      )
    seeds = torch.randint(_MAX_SEED, (chunks,), device="jax", dtype=torch.int32)
    results = on_all_devices(parameters, batch.unflatten(0, (chunks, -1)), seeds)
    return call_jax(lambda tree: jax.tree.map(mean, tree), results)

  return run
