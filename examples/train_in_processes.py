r"""Train a small network in two processes, and resume from a checkpoint.

Each process reads its own rows; the parameters are sharded over all devices (FSDP). The
losses equal those of a single process. With `--until` the run ends early, as if killed;
the next run with the same `--checkpoints` resumes from the last checkpoint, and its
losses equal those of an uninterrupted run.

Prints the loss of each step, as a hexadecimal number so that all bits can be compared.

usage: JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2 \
         torchrun --standalone --nproc-per-node=2 examples/train_in_processes.py \
         [--steps=20] [--checkpoints=DIR] [--until=STEP]
"""

import os

from absl import app, flags

from torchax import processes

processes.initialize()  # must come before anything uses a device

import jax  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import torchax  # noqa: E402
from torchax.interop import jax_jit  # noqa: E402

_STEPS = flags.DEFINE_integer("steps", 20, "Training steps in all.", 1)
_UNTIL = flags.DEFINE_integer("until", None, "Number of steps after which to stop.")
_CHECKPOINTS = flags.DEFINE_string("checkpoints", None, "Directory of checkpoints.")

ROWS, BATCH, WIDTH = 256, 32, 16


def data() -> torch.Tensor:
  """Return (ROWS, WIDTH) random numbers; a real program reads its rows from files."""
  return torch.randn(
    ROWS, WIDTH, device="cpu", generator=torch.Generator().manual_seed(0)
  )


def main(_) -> None:
  """Entry point of `absl.app.run`."""
  torchax.enable_globally()
  mesh = jax.make_mesh(
    (jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  sharding = NamedSharding(mesh, PartitionSpec("data"))

  torch.manual_seed(0)  # the same in all processes: they hold shards of one model
  model = torch.nn.Sequential(
    torch.nn.Linear(WIDTH, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1)
  )
  model.append(torch.nn.Linear(64, WIDTH))
  model.to("jax")
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.shard_(sharding)

  def step(batch):
    loss = F.mse_loss(model(batch), batch)
    loss.backward()
    with torch.no_grad():
      for parameter in model.parameters():
        parameter -= 0.1 * parameter.grad
        parameter.apply_jax_(jax.lax.with_sharding_constraint, sharding)
        parameter.grad = None
    return loss

  step = jax_jit(step)
  start, folder = 0, _CHECKPOINTS.value
  if folder and os.path.exists(folder):
    state = torchax.load_checkpoint(folder, {"model": model.state_dict()})
    model.load_state_dict(state["model"])
    torch.jax.set_rng_state(state["rng"])
    start = state["step"]

  # The number of the step is the position in the data.
  batches = processes.Batches(ROWS, BATCH, sharding, seed=0, start=start)
  loader = torch.utils.data.DataLoader(data(), batch_sampler=batches)
  for number, local in zip(range(start, _UNTIL.value or _STEPS.value), loader):
    loss = step(processes.global_batch(local, sharding))
    if jax.process_index() == 0:
      print(f"step {number} loss {loss.item().hex()}")
    if folder:
      state = {"model": model.state_dict(), "rng": torch.jax.get_rng_state()}
      state["step"] = number + 1
      torchax.save_checkpoint(state, folder, number + 1, background=True)
  torchax.checkpoint.finish_saving()


if __name__ == "__main__":
  app.run(main)
