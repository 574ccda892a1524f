"""Tiny transformer with dropout, its layouts over a mesh, and the same step in JAX.

`sharding.py` measures it, and `test/distributed/training.py` trains it. A step returns
its dropout masks, so that tests can compare them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from torchax.interop import jax_jit

WORDS, WIDTH, HEADS, LAYERS, LENGTH, BATCH, DROP = 32, 16, 2, 1, 8, 8, 0.25
RATE = 0.1
IGNORED = -100  # label that F.cross_entropy ignores


class Layer(torch.nn.Module):
  """Attention and two linear layers, each followed by dropout."""

  def __init__(self):
    super().__init__()
    self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
    self.out = torch.nn.Linear(WIDTH, WIDTH)
    self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
    self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

  def forward(self, x, keep):
    heads = self.qkv(x).view(*x.shape[:2], HEADS, 3, -1).permute(3, 0, 2, 1, 4)
    scores = heads[0] @ heads[1].transpose(-1, -2) / 4
    mixed = (scores.softmax(-1) @ heads[2]).transpose(1, 2).flatten(2)
    x = x + self.out(mixed) * keep[0]
    return x + self.down(F.relu(self.up(x))) * keep[1]


class Transformer(torch.nn.Module):
  """Transformer: (batch, length) word numbers -> logits and dropout masks."""

  def __init__(self):
    super().__init__()
    self.words = torch.nn.Embedding(WORDS, WIDTH)
    self.layers = torch.nn.ModuleList([Layer() for _ in range(LAYERS)])
    self.head = torch.nn.Linear(WIDTH, WORDS)

  def forward(self, tokens):
    x, masks = self.words(tokens), []
    for layer in self.layers:
      keep = [F.dropout(torch.ones_like(x), DROP) for _ in range(2)]
      x = layer(x, keep)
      masks += keep
    return self.head(x), torch.stack(masks)


# Parts of names: parameters sharded by columns and by rows over the axis "model".
COLUMNS, ROWS = ("qkv", "up"), ("out.weight", "down.weight")


def _tensor_parallel(name: str) -> PartitionSpec:
  if any(part in name for part in COLUMNS):
    return PartitionSpec("model")
  return PartitionSpec(None, "model") if name.endswith(ROWS) else PartitionSpec()


def _sharded(name: str) -> PartitionSpec:
  return PartitionSpec("data")


def _replicated(name: str) -> PartitionSpec:
  return PartitionSpec()


# Layout -> (n devices -> sizes of the axes "data" and "model", name -> spec).
LAYOUTS = {
  "data": (lambda n: (n, 1), _replicated),
  "fsdp": (lambda n: (n, 1), _sharded),
  "tensor": (lambda n: (1, n), _tensor_parallel),
  "mixed": (lambda n: (n // 2, 2), _tensor_parallel),
}


def mesh_of(layout: str, devices: int) -> Mesh:
  """Return the layout's mesh over the first devices."""
  shape = LAYOUTS[layout][0](devices)
  chosen = np.array(jax.devices()[:devices]).reshape(shape)
  return Mesh(chosen, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def model_on(layout: str, mesh: Mesh) -> Transformer:
  """Return the model of seed 0, sharded as the layout says."""
  torch.manual_seed(0)
  model = Transformer().to("jax")
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      parameter.shard_(NamedSharding(mesh, LAYOUTS[layout][1](name)))
  return model


def batches(size: int) -> torch.Tensor:
  """Return (size, LENGTH + 1) random word numbers."""
  rows = np.random.default_rng(0).integers(0, WORDS, (size, LENGTH + 1))
  return torch.from_numpy(rows.astype(np.int32))


def step_of(model: Transformer, mesh: Mesh, layout: str, **options):
  """Return a compiled step of gradient descent: (tokens) -> (loss, masks)."""
  shardings = {
    name: NamedSharding(mesh, LAYOUTS[layout][1](name))
    for name, _ in model.named_parameters()
  }

  def step(tokens):
    logits, masks = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().long())
    loss.backward()
    with torch.no_grad():
      for name, parameter in model.named_parameters():
        parameter -= RATE * parameter.grad
        parameter.apply_jax_(jax.lax.with_sharding_constraint, shardings[name])
        parameter.grad = None
    return loss, masks

  return jax_jit(step, **options)


def functional_step(model: Transformer, differentiated):
  """Return a compiled step on given weights: (weights, tokens) -> (loss, weights).

  Args:
    model: model to call; its own parameters do not change.
    differentiated: transformation of the loss, a function of (weights, tokens), into a
      function that returns the loss and the gradients.
  """

  def loss_of(weights, tokens):
    logits, _ = torch.func.functional_call(model, weights, (tokens[:, :-1],))
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().long())

  both = differentiated(loss_of)

  @jax_jit
  def step(weights, tokens):
    loss, gradients = both(weights, tokens)
    return loss, {
      name: weight - RATE * gradients[name] for name, weight in weights.items()
    }

  return step


# The same step in plain JAX --------------------------------------------------------


def _linear(weights, name, x):
  return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _logits(weights, tokens, key):
  x = weights["words.weight"][tokens]
  for number in range(LAYERS):
    name = f"layers.{number}"
    keep = [
      jax.random.bernoulli(jax.random.fold_in(key, 2 * number + i), 1 - DROP, x.shape)
      / (1 - DROP)
      for i in range(2)
    ]
    heads = _linear(weights, f"{name}.qkv", x).reshape(*x.shape[:2], HEADS, 3, -1)
    query, keys, values = heads.transpose(3, 0, 2, 1, 4)
    scores = query @ keys.swapaxes(-1, -2) / 4
    mixed = (jax.nn.softmax(scores) @ values).swapaxes(1, 2).reshape(x.shape)
    x = x + _linear(weights, f"{name}.out", mixed) * keep[0]
    hidden = jax.nn.relu(_linear(weights, f"{name}.up", x))
    x = x + _linear(weights, f"{name}.down", hidden) * keep[1]
  return _linear(weights, "head", x)


def plain_step(weights, tokens, key, shardings):
  """Run the step on dicts of arrays; return (loss, weights)."""

  def loss_of(weights):
    found = jax.nn.log_softmax(_logits(weights, tokens[:, :-1], key))
    labels = tokens[:, 1:]
    is_counted = labels != IGNORED
    chosen = jnp.take_along_axis(found, labels[..., None], -1)[..., 0]
    return -jnp.where(is_counted, chosen, 0).sum() / is_counted.sum()

  loss, gradients = jax.value_and_grad(loss_of)(weights)
  updated = {name: w - RATE * gradients[name] for name, w in weights.items()}
  return loss, {
    name: jax.lax.with_sharding_constraint(w, shardings[name])
    for name, w in updated.items()
  }
