"""Pipeline parallelism (GPipe): four devices, each with one stage of a model.

The parameters of the stages are stacked, and each device holds one stage. The batch is
split into microbatches. In each tick a device runs its stage on the microbatch from its
neighbour and sends the result on. A stage is idle before the first microbatch reaches
it and after the last one; these ticks are the bubble. Without accelerators, JAX splits
the CPU into four devices.

Prints the shape of the weights on one device, the collectives and the size of the
bubble. Then trains the pipeline and the same model on one device, and prints how far
their gradients and losses differ.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism" (2018), https://arxiv.org/abs/1811.06965.

usage: python examples/pipeline.py [--steps=5] [--microbatches=8]
"""

from collections import Counter

import jax
import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from absl import app, flags
from jax.sharding import AxisType, PartitionSpec
from torch import nn

import torchax
from torchax.interop import call_jax, gradient_checkpoint, jax_jit, jax_shard_map, scan
from torchax.mesh_util import Mesh
from torchax.processes import collectives as collectives_of

_STEPS = flags.DEFINE_integer("steps", 5, "Training steps.", 1)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Microbatches in a batch.", 1)

STAGES, AXIS = 4, "stage"
ROWS, WIDTH = 4, 32  # of a microbatch


class Stage(nn.Module):
  """One stage of the model; its output has the shape of its input."""

  def __init__(self):
    super().__init__()
    self.norm = nn.LayerNorm(WIDTH)
    self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

  def forward(self, x):
    return x + self.down(F.gelu(self.up(self.norm(x))))


def run_pipeline(mesh: jax.sharding.Mesh, stage: nn.Module, parameters: dict, batch):
  """Run all stages on a batch (microbatches, rows, width); return the same shape.

  Args:
    stage: module that computes each stage, with the parameters of that stage.
    parameters: stacked parameters of all stages, by their names in `stage`.
  """
  to_next = [(i + 1) % STAGES for i in range(STAGES)]
  by_stage, for_all = PartitionSpec(AXIS), PartitionSpec()

  @jax_shard_map(mesh=mesh, in_specs=(by_stage, for_all), out_specs=for_all)
  def on_stage(parameters, batch):
    # The carry of the loop varies over the stages, so JAX wants an initial value that
    # varies as well.
    batch = call_jax(jax.lax.pcast, batch, AXIS, to="varying")
    own = {name: parameter[0] for name, parameter in parameters.items()}
    is_first = call_jax(jax.lax.axis_index, AXIS) == 0
    # The backward pass keeps the input of a stage and recomputes its activations.
    run = gradient_checkpoint(lambda x: torch.func.functional_call(stage, own, (x,)))

    def tick(received, microbatch):
      result = run(torch.where(is_first, microbatch, received))
      return collectives.permute_tensor(result, to_next, AXIS), result

    # The first stage runs on zeros while the last microbatches pass the other stages.
    zeros = torch.zeros_like(batch[: STAGES - 1])
    start = torch.zeros_like(batch[0])
    _, results = scan(tick, start, torch.cat([batch, zeros]))
    # Results of the last stage, from the tick in which the first microbatch reached it.
    return collectives.broadcast(results[STAGES - 1 :], STAGES - 1, AXIS)

  return on_stage(parameters, batch)


def train(model, parameters, x, y) -> tuple[list[float], list[torch.Tensor]]:
  """Train; return the loss of each step and the gradients of the first step."""
  optimizer = torch.optim.AdamW(parameters, 1e-2)

  @jax_jit
  def step(x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss

  losses = [step(x, y).item()]
  gradients = [parameter.grad.cpu() for parameter in parameters]
  losses += [step(x, y).item() for _ in range(_STEPS.value - 1)]
  return losses, gradients


def main(argv) -> None:
  del argv
  torch.manual_seed(0)
  plain = nn.Sequential(*[Stage() for _ in range(STAGES)]).to("jax")
  x, y = torch.randn(2, _MICROBATCHES.value, ROWS, WIDTH, device="jax")

  pipe = Mesh(jax.make_mesh((STAGES,), (AXIS,), axis_types=(AxisType.Auto,)))
  stacked, _ = torch.func.stack_module_state(list(plain))
  stacked = {name: pipe.shard(p.detach(), (AXIS,)) for name, p in stacked.items()}
  for parameter in stacked.values():
    parameter.requires_grad_()
  replicated = [pipe.shard(tensor, ()) for tensor in (x, y)]

  def model(x):
    return run_pipeline(pipe.jax_mesh, plain[0], stacked, x)

  weight = stacked["up.weight"]
  part = tuple(weight.jax().addressable_shards[0].data.shape)
  print(f"weights {tuple(weight.shape)}: each device holds {part}")
  gradient = jax_jit(lambda x, y: F.mse_loss(model(x), y).backward())
  sent = Counter(one.kind for one in collectives_of(gradient, *replicated))
  print("collectives of loss and gradients:", dict(sent))
  ticks = _MICROBATCHES.value + STAGES - 1
  print(
    f"a stage works in {_MICROBATCHES.value} of {ticks} ticks: a bubble of "
    f"{(STAGES - 1) / ticks:.0%}"
  )

  one, expected = train(plain, list(plain.parameters()), x, y)
  piped, found = train(model, list(stacked.values()), *replicated)
  # `expected` lists the parameters stage by stage: group them by parameter.
  per_stage = [expected[i :: len(found)] for i in range(len(found))]
  differences = [
    (torch.stack(of_stages) - of_stacked).norm() / of_stacked.norm()
    for of_stages, of_stacked in zip(per_stage, found, strict=True)
  ]
  print(f"largest relative difference of the gradients: {max(differences):.1e}")
  print("losses of the plain model:", *[f"{loss:.5f}" for loss in one])
  print("losses of the pipeline:   ", *[f"{loss:.5f}" for loss in piped])
  difference = max(abs(a - b) for a, b in zip(one, piped, strict=True))
  print(f"largest difference of the losses: {difference:.1e}")


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", STAGES)  # has no effect on accelerators
  torchax.enable_globally()
  app.run(main)
