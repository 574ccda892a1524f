"""Two processes that compute together until process 1 ends.

usage: endings.py WAY    one of "well", "raise", "exit", "kill" and "stop"
"""

import os
import signal
import sys

from torchax import processes

processes.initialize(heartbeat_timeout=10, shutdown_timeout=10)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from torchax.interop import jax_jit  # noqa: E402

mesh = Mesh(np.array(jax.devices()), ("data",))
rows = processes.rows_here(NamedSharding(mesh, PartitionSpec("data")), 8)
x = processes.global_batch(
  torch.arange(8.0)[rows], NamedSharding(mesh, PartitionSpec("data"))
)
total = jax_jit(lambda x: x.sum())
sys.stdout.write(f"the sum is {total(x).item()}\n")
sys.stdout.flush()
if jax.process_index() == 1:
  if sys.argv[1] == "raise":
    raise ValueError("of process 1")
  if sys.argv[1] == "exit":
    sys.exit(3)
  if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
  if sys.argv[1] == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
assert total(x + 1).item() == 36.0
