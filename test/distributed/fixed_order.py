"""Losses of a few steps with sums in a fixed order, on several numbers of devices.

usage: fixed_order.py OUT    in a process with eight devices
"""

import json
import pathlib
import sys

from jax.sharding import NamedSharding, PartitionSpec

import torchax
from benchmarks import sharded_transformer as transformer
from torchax import processes
from torchax.interop import jax_value_and_grad

CHUNKS, STEPS, BATCH = 8, 8, 32


def losses_on(devices: int) -> list[str]:
  """Return the losses as hexadecimal numbers."""
  mesh = transformer.mesh_of("data", devices)
  model = transformer.model_on("data", mesh)

  step = transformer.functional_step(
    model,
    lambda loss: processes.in_fixed_order(
      jax_value_and_grad(loss), mesh, "data", CHUNKS
    ),
  )
  rows = NamedSharding(mesh, PartitionSpec("data"))
  weights = {name: p.detach() for name, p in model.named_parameters()}
  data = transformer.batches(BATCH * STEPS).split(BATCH)
  found = []
  for tokens in data:
    loss, weights = step(weights, processes.global_batch(tokens, rows))
    found.append(loss.item().hex())
  return found


if __name__ == "__main__":
  torchax.enable_globally()
  found = {str(devices): losses_on(devices) for devices in (2, 4, 8)}
  pathlib.Path(sys.argv[1]).write_text(json.dumps(found))
