"""Multi-process programs: start processes, compare their state, split their data.

Users call these functions as `torchax.processes`. Start at `start.py`.

>>> from torchax import processes
>>> processes.initialize()  # a single process: nothing to connect
>>> [rows for rows in processes.Batches(6, batch_size=3, shuffle=False, epochs=1)]
[[0, 1, 2], [3, 4, 5]]
"""

from torchax.distributed.processes.agreement import (
  barrier,
  require_equal,
  require_same_program,
)
from torchax.distributed.processes.arrays import gather, global_batch, rows_here
from torchax.distributed.processes.batches import Batches, in_fixed_order
from torchax.distributed.processes.communication_cost import (
  Collective,
  bytes_by_kind,
  collectives,
)
from torchax.distributed.processes.start import initialize

__all__ = [
  "Batches",
  "Collective",
  "barrier",
  "collectives",
  "gather",
  "global_batch",
  "in_fixed_order",
  "initialize",
  "bytes_by_kind",
  "require_equal",
  "require_same_program",
  "rows_here",
]
