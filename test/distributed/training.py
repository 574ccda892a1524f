"""Training of the tiny transformer over meshes; writes its losses and masks.

usage:
  training.py OUT RUN... [--steps=4] [--checkpoints=PATH] [--die-after=STEP] [--moved]

A RUN is a layout and a number of devices: "fsdp:8". OUT has for each run the losses as
hexadecimal numbers and a digest of the masks of each step. `--moved` adds the bytes
that the devices send, and those of the same step in plain JAX. `--checkpoints` resumes
from the last checkpoint, and saves one after each step.
"""

import argparse
import functools
import hashlib
import json
import os
import pathlib
import signal

from torchax import processes

processes.initialize()

import jax  # noqa: E402
import torch  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import torchax  # noqa: E402
from benchmarks import sharded_transformer as transformer  # noqa: E402


def _digest(masks: torch.Tensor) -> str:
  return hashlib.sha256(processes.gather(masks).numpy().tobytes()).hexdigest()


def _moved(step, model, mesh, layout, tokens) -> dict:
  shardings = {
    name: NamedSharding(mesh, transformer.LAYOUTS[layout][1](name))
    for name, _ in model.named_parameters()
  }
  weights = {name: p.detach().jax() for name, p in model.named_parameters()}
  plain = jax.jit(functools.partial(transformer.plain_step, shardings=shardings))
  key = torchax.default_env().rng.state.key
  return {
    "ours": processes.collectives(step, tokens),
    "plain": processes.collectives(plain, weights, tokens.jax(), key),
  }


def _resumed(path, model, found: dict) -> int:
  """Load the latest checkpoint; return the number of steps done."""
  if not path or not os.path.exists(path):
    return 0
  state = torchax.load_checkpoint(path, {"model": model.state_dict()})
  model.load_state_dict(state["model"])
  torch.jax.set_rng_state(state["rng"])
  found |= state["found"]
  return state["step"]


def train(run: str, options) -> dict:
  """Return the losses and masks of a run."""
  layout, devices = run.split(":")
  mesh = transformer.mesh_of(layout, int(devices))
  model = transformer.model_on(layout, mesh)
  rows = NamedSharding(mesh, PartitionSpec("data"))
  data = transformer.batches(32)
  step = transformer.step_of(model, mesh, layout)
  found: dict = {"losses": [], "masks": []}
  start = _resumed(options.checkpoints, model, found)
  batches = processes.Batches(32, transformer.BATCH, rows, start=start)
  for number, mine in zip(range(start, options.steps), batches):
    tokens = processes.global_batch(data[mine], rows)
    loss, masks = step(tokens)
    found["losses"].append(loss.item().hex())
    found["masks"].append(_digest(masks))
    if options.checkpoints:
      state = {"model": model.state_dict(), "rng": torch.jax.get_rng_state()}
      state |= {"step": number + 1, "found": found}
      torchax.save_checkpoint(state, options.checkpoints, number + 1, background=True)
    if number + 1 == options.die_after and jax.process_index() == 1:
      os.kill(os.getpid(), signal.SIGKILL)
  specs = {name: str(p.jax().sharding.spec) for name, p in model.named_parameters()}
  expected = {
    name: str(PartitionSpec(*transformer.LAYOUTS[layout][1](name))) for name in specs
  }
  assert specs == expected, "a step moved its parameters"
  if options.moved:
    found |= _moved(step, model, mesh, layout, tokens)
  return found


def main() -> None:
  """Execute all runs; process 0 writes the results."""
  parser = argparse.ArgumentParser()
  parser.add_argument("out", type=pathlib.Path)
  parser.add_argument("runs", nargs="+")
  parser.add_argument("--steps", type=int, default=4)
  parser.add_argument("--checkpoints")
  parser.add_argument("--die-after", type=int)
  parser.add_argument("--moved", action="store_true")
  options = parser.parse_args()
  torchax.enable_globally()
  found = {run: train(run, options) for run in options.runs}
  torchax.checkpoint.finish_saving()
  if jax.process_index() == 0:
    options.out.write_text(json.dumps(found))


if __name__ == "__main__":
  main()
