"""Registration, meshes and a model that the laws of meshes share.

The laws are in `mesh_cases.py` and `following_cases.py`.
"""

import functools
from collections.abc import Callable

import jax
import torch
import torch.nn.functional as F
from jax.sharding import AxisType
from torch import nn

import torchax
from torchax import mesh_util
from torchax.interop import jax_jit

CASES: dict[str, Callable] = {}


def case(function: Callable) -> Callable:
  """Register a law."""
  CASES[function.__name__] = function
  return function


def for_each_kind(function: Callable) -> Callable:
  """Register a law for automatic and for explicit axes."""
  for kind in (AxisType.Auto, AxisType.Explicit):
    name = f"{function.__name__}_on_{kind.name.lower()}_axes"
    CASES[name] = functools.partial(function, kind)
  return function


def mesh_of(kind: AxisType, sharder=None, **axes: int) -> mesh_util.Mesh:
  sizes, names = tuple(axes.values()), tuple(axes)
  made = jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))
  return mesh_util.Mesh(made, sharder)


ALL = mesh_util.SingleAxisSharder("fsdp", 8, replicate_unshardable=True)
TENSOR_PARALLEL = mesh_util.ShardingRules(
  [
    ("*.in_proj_weight", ("model", None)),
    ("*.out_proj.weight", (None, "model")),
    ("*.linear1.weight", ("model", None)),
    ("*.linear1.bias", ("model",)),
    ("*.linear2.weight", (None, "model")),
  ],
  by_module={nn.Embedding: {"weight": ("data", "model")}},
)


class Model(nn.Module):
  """Transformer of one layer with dropout, and parameters initialized by hand."""

  def __init__(self):
    super().__init__()
    self.embedding = nn.Embedding(32, 16)
    self.positions = nn.Parameter(torch.randn(8, 16) * 0.02)
    self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    self.out = nn.Linear(16, 32, bias=False)
    self.register_buffer("scale", torch.arange(8.0).add(1).rsqrt())

  def forward(self, tokens):
    hidden = self.embedding(tokens) + self.positions * self.scale[:, None]
    return self.out(self.layer(hidden))


def batch(mesh=None) -> list:
  """Return tokens and labels; on a mesh, sharded over its first axis."""
  tokens = torch.arange(64).reshape(8, 8) % 32
  both = [tokens, (tokens * 7) % 32]
  if mesh is None:
    return [tensor.to("jax") for tensor in both]
  return [mesh.shard(tensor, (mesh.jax_mesh.axis_names[0],)) for tensor in both]


def trained(model, tokens, labels, compiles: bool):
  """Train two steps of AdamW; return the losses and the optimizer."""
  optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

  def step(tokens, labels):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
    return loss

  step = jax_jit(step) if compiles else step
  torch.manual_seed(1)
  with torchax.default_env():
    return [step(tokens, labels).item() for _ in range(2)], optimizer


@functools.cache
def on_one_device(compiles: bool = False):
  """Return the model's initial values and its losses on one device."""
  torch.manual_seed(0)
  with torchax.default_env(), torch.device("jax"):
    model = Model()
  first = {name: t.cpu().clone() for name, t in model.state_dict().items()}
  return first, trained(model, *batch(), compiles)[0]


def made_on(mesh: mesh_util.Mesh) -> Model:
  torch.manual_seed(0)
  return mesh.initialize_model_sharded(Model, ())


def require_alike(tensor, other) -> None:
  """Assert that two tensors have the same sharding."""
  found, expected = tensor.jax().sharding, other.jax().sharding
  assert found.is_equivalent_to(expected, other.dim()), (found, expected)
  assert getattr(found, "mesh", None) == getattr(expected, "mesh", None)
