"""Draws on several devices; `test_devices.py` runs it for each number of devices.

usage:
  XLA_FLAGS=--xla_force_host_platform_device_count=4 python device_program.py out.npz

It writes arrays by name. Arrays named "sharded …" must not depend on the number of
devices; arrays named "shards …" are drawn on 8 devices only.
"""

import sys

import jax
import numpy as np
import torch
import torch.nn.functional as F
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torchax.interop import (
  jax_jit,
  jax_shard_map,
  jax_value_and_grad,
  jax_view,
  scan,
  torch_view,
)

ROWS, COLUMNS = 256, 128


def _draws(x) -> dict:
  """Return draws of shape (8, 16) and one of a replicated shape."""
  return {
    "mask": F.dropout(x, 0.5),
    "normal": torch.randn_like(x),
    "integers": torch.randint(0, 1000, x.shape, device="jax"),
    "choice": torch.multinomial(x, 5),
    "choice again": torch.multinomial(x, 5, True),
    "iterations": scan(lambda c, _: (c, F.dropout(x, 0.5)), x[0], length=2)[1][1],
    "order": torch.randperm(8, device="jax"),
  }


def sharded_draws(mesh) -> dict:
  """Return draws of a compiled function with sharded arguments and results."""
  rows = NamedSharding(mesh, PartitionSpec("data"))
  draw = jax_jit(_draws, {"in_shardings": rows, "out_shardings": rows})
  torch.manual_seed(1)
  x = torch.arange(1.0, 129.0).view(8, 16).to("jax")
  found = {}
  for call in ("first", "second"):
    drawn = draw(x)
    assert len(drawn["mask"].jax().sharding.device_set) == mesh.size
    found |= {f"{call} {name}": value for name, value in drawn.items()}
  return found | {"after": torch.rand(4, device="jax")}


def _model():
  torch.manual_seed(2)
  layers = [torch.nn.Linear(16, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 8)]
  return torch.nn.Sequential(*layers).to("jax")


def training(mesh, spec: PartitionSpec) -> dict:
  """Return losses and dropout masks of some steps; `spec` shards the parameters."""
  model = _model()
  params = {name: p.detach() for name, p in model.named_parameters()}
  rows = NamedSharding(mesh, PartitionSpec("data"))
  placed = NamedSharding(mesh, spec)

  def loss(params, x, y):
    hidden = model[1](torch.tanh(F.linear(x, params["0.weight"], params["0.bias"])))
    out = F.linear(hidden, params["2.weight"], params["2.bias"])
    return ((out - y) ** 2).mean(), hidden != 0

  def step(params, x, y):
    (value, mask), gradients = jax_value_and_grad(loss, {"has_aux": True})(params, x, y)
    return {n: p - 0.1 * gradients[n] for n, p in params.items()}, value, mask

  step = jax_jit(step, {"in_shardings": (placed, rows, rows)})
  torch.manual_seed(3)
  x, y = torch.randn(64, 16, device="jax"), torch.randn(64, 8, device="jax")
  params = torch_view(jax.device_put(jax_view(params), placed))
  losses, masks = [], []
  for _ in range(4):
    params, value, mask = step(params, x, y)
    params = torch_view(jax.device_put(jax_view(params), placed))
    losses.append(value.item())
    masks.append(mask.numpy())
  return {"losses": np.array(losses), "masks": np.stack(masks)}


POLICIES = {
  "different": "different",
  "same": "same",
  "same along model": {"model": "same"},
  "same along data": {"data": "same", "model": "different"},
}


def shards(mesh) -> dict:
  """Return draws of 4 × 2 shards by each policy, eager and compiled, and a gradient."""
  spec = PartitionSpec("data", "model")
  options = {"mesh": mesh, "in_specs": (spec,), "out_specs": spec}
  weight = torch.ones(COLUMNS // 2, device="jax", requires_grad=True)
  x = torch.ones(ROWS, COLUMNS, device="jax", requires_grad=True)
  found = {}
  for name, policy in POLICIES.items():
    f = jax_shard_map(lambda x: F.dropout(x * weight, 0.5), options, randomness=policy)
    forms = {"jit": jax_jit(f), "eager": f}
    for form in forms if name == "same along model" else ("jit",):
      torch.manual_seed(4)
      drawn = forms[form](x)
      gradients = torch.autograd.grad(drawn.sum(), [x, weight])
      found |= {
        f"{name} {form}": drawn.detach(),
        f"{name} {form} gradient of x": gradients[0],
        f"{name} {form} gradient of weight": gradients[1],
        f"{name} {form} after": torch.rand(4, device="jax"),
      }
    if name == "different":
      found["different jit again"] = forms["jit"](x).detach()
  return found | _shards_of_generators(options, x.detach())


def _shards_of_generators(options, x) -> dict:
  found = {}
  for name in ("different", "same"):
    generator = torch.Generator().manual_seed(5)
    f = jax_shard_map(
      lambda x: torch.rand(x.shape, generator=generator, device="jax"),  # noqa: B023
      options,
      randomness=name,
    )
    found[f"generator {name}"] = jax_jit(f)(x)
    found[f"generator {name} state"] = generator.get_state()
  return found


def main(path: str) -> None:
  devices = np.array(jax.devices())
  mesh = Mesh(devices, ("data",))
  results = {"sharded": sharded_draws(mesh)}
  results["sharded, parameters replicated:"] = training(mesh, PartitionSpec())
  results["sharded, parameters sharded:"] = training(mesh, PartitionSpec("data"))
  if len(devices) == 8:
    results["shards"] = shards(Mesh(devices.reshape(4, 2), ("data", "model")))
  arrays = {
    f"{group} {name}": value.numpy() if isinstance(value, torch.Tensor) else value
    for group, values in results.items()
    for name, value in values.items()
  }
  np.savez(path, devices=len(devices), **arrays)


if __name__ == "__main__":
  main(sys.argv[1])
