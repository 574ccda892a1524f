"""Training step over eight devices of the host: its time, and the bytes it moves.

The shardings are data, FSDP, tensor and mixed, each against the same step in plain JAX.
The benchmark runs in a process of its own with eight devices. They share this machine's
cores, so the times are the cost on the host and do not show scaling.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import jax
from jax.sharding import NamedSharding, PartitionSpec

import torchax
from benchmarks import sharded_transformer as transformer
from benchmarks.timing import Row, compare
from torchax import processes
from torchax.interop import jax_value_and_grad

DEVICES = 8
CHUNKS = (8, 32)  # chunks of the batch in `in_fixed_order`: one and four a device


def rows() -> list[Row]:
  """Return two rows for each layout and each number of chunks."""
  done = subprocess.run(
    [sys.executable, "-m", "benchmarks.sharding"],
    env={
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
    },
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  return [Row(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def _rows_of(layout: str) -> list[Row]:
  mesh = transformer.mesh_of(layout, DEVICES)
  model = transformer.model_on(layout, mesh)
  sharding = NamedSharding(mesh, PartitionSpec("data"))
  tokens = processes.global_batch(transformer.batches(transformer.BATCH), sharding)
  step = transformer.step_of(model, mesh, layout)
  weights = {name: p.detach().jax() for name, p in model.named_parameters()}
  shardings = {name: weight.sharding for name, weight in weights.items()}
  plain = jax.jit(functools.partial(transformer.plain_step, shardings=shardings))
  key = torchax.default_env().rng.state.key
  array = tokens.jax()
  ours = processes.collectives(step, tokens)
  theirs = processes.collectives(plain, weights, array, key)
  text = ", ".join(
    f"{kind} {size}" for kind, size in processes.bytes_by_kind(ours).items()
  )
  name = f"{layout} sharding over {DEVICES} devices of the host"
  moved = [
    float(sum(processes.bytes_by_kind(found).values())) for found in (ours, theirs)
  ]
  return [
    Row(f"sent: {name}", "plain JAX", *moved, 1.001, text, unit="bytes"),
    # No goal: devices wait for one another here; `train_step` has one for the step.
    compare(
      f"step, {name}",
      lambda: step(tokens)[0],
      lambda: plain(weights, array, key)[0],
      goal=None,
      note="the plain step does not keep its weights",
    ),
  ]


def _rows_of_fixed_order(chunks: int) -> list[Row]:
  """Measure sums in a fixed order against those of XLA's partitioner."""
  mesh = transformer.mesh_of("data", DEVICES)
  model = transformer.model_on("data", mesh)
  sharding = NamedSharding(mesh, PartitionSpec("data"))
  tokens = processes.global_batch(transformer.batches(4 * DEVICES), sharding)
  weights = {name: p.detach() for name, p in model.named_parameters()}
  in_order = transformer.functional_step(
    model,
    lambda loss: processes.in_fixed_order(
      jax_value_and_grad(loss), mesh, "data", chunks
    ),
  )
  unordered = transformer.functional_step(model, jax_value_and_grad)
  name = f"in_fixed_order over {DEVICES} devices of the host, {chunks} chunks"
  collectives = [
    processes.collectives(f, weights, tokens) for f in (in_order, unordered)
  ]
  sent = [float(sum(processes.bytes_by_kind(found).values())) for found in collectives]
  return [
    Row(f"sent: {name}", "one sum of all devices", *sent, None, unit="bytes"),
    compare(
      f"step, {name}",
      lambda: in_order(weights, tokens)[0],
      lambda: unordered(weights, tokens)[0],
      goal=None,
      baseline_name="one sum of all devices",
      note="data sharding; each device gets the results of all chunks",
    ),
  ]


def main() -> None:
  """Print the rows as JSON, for `rows`."""
  torchax.enable_globally()
  found = [row for layout in transformer.LAYOUTS for row in _rows_of(layout)]
  for chunks in CHUNKS:
    found += _rows_of_fixed_order(chunks)
  print(json.dumps([dataclasses.asdict(row) for row in found]))


if __name__ == "__main__":
  main()
