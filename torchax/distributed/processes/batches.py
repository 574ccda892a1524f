"""Which rows of a data set come in which step: one order, however many processes.

The rows of step t are a function of the seed and of t alone. So the position of the
data is the number of the step, a run goes on where it was killed, and it may go on with
another number of processes.
"""

from collections.abc import Iterator

import numpy as np
import torch
from jax.sharding import Sharding

from torchax.distributed.processes.arrays import rows_here


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
