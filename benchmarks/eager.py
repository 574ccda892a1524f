"""Eager operations, against `jnp.add` or the same computation in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F

import torchax
from benchmarks.timing import Row, compare

DRAWS = 100


def _drawn(sample):
  """Return the fastest form of a draw in JAX: key and sample in one program."""
  key = jax.random.key(0)
  count = iter(range(1 << 30))
  fused = jax.jit(lambda key, i: sample(jax.random.fold_in(key, i)))
  return lambda: fused(key, np.uint32(next(count)))


def rows() -> list[Row]:
  """Return the rows of eager operations."""
  array = jnp.ones((32, 32))
  x = torch.ones(32, 32, device="jax")
  w = torch.ones(32, 32, device="jax")

  def add():
    return jnp.add(array, array)

  def assign():
    y = x.clone()
    y[1:5] = 1.0
    return y.add_(1.0)

  uniform = _drawn(lambda key: jax.random.uniform(key, (32, 32)))
  normal = _drawn(lambda key: jax.random.normal(key, (32, 32)))
  keep = _drawn(lambda key: jnp.where(jax.random.bernoulli(key, 0.5, (32, 32)), 2.0, 0))
  mask = _drawn(lambda key: jax.random.bernoulli(key, 0.5, (32, 32)).astype(float))
  integers = _drawn(lambda key: jax.random.randint(key, (32, 32), 0, 1000))
  arrivals = _drawn(lambda key: jax.random.exponential(key, (32, 32)))
  by_add = {"baseline_name": "jnp.add"}
  return [
    compare("eager x + x, 32×32", lambda: x + x, add, 3),
    compare("eager x @ w", lambda: x @ w, lambda: jnp.matmul(array, array), 3),
    compare(
      "eager reshape().view()",
      lambda: x.reshape(16, 64).view(64, 16),
      add,
      4,
      **by_add,
    ),
    compare("eager x[1:5] + 1", lambda: x[1:5] + 1, add, 6, **by_add),
    compare("eager clone, slice assign, add_", assign, add, 14, **by_add),
    compare("eager softmax", lambda: torch.softmax(x, -1), add, 4, **by_add),
    compare("eager layer_norm", lambda: F.layer_norm(x, (32,)), add, 4, **by_add),
    compare("eager randn", lambda: torch.randn(32, 32, device="jax"), normal, 2),
    compare("eager rand", lambda: torch.rand(32, 32, device="jax"), uniform, 2),
    compare(
      "eager randint",
      lambda: torch.randint(1000, (32, 32), device="jax"),
      integers,
      2,
    ),
    compare("eager exponential_", lambda: x.clone().exponential_(), arrivals, 3),
    compare("eager dropout", lambda: F.dropout(x, 0.5), keep, 2.5),
    compare("eager bernoulli", lambda: torch.bernoulli(x), mask, 2.5),
    compare(
      f"{DRAWS} eager draws in a ledger",
      _recorded,
      _draws,
      None,
      baseline_name="no ledger",
    ),
    *_mlp_rows(x, add),
  ]


def _draws() -> torch.Tensor:
  for _ in range(DRAWS):
    drawn = torch.rand(32, 32, device="jax")
  return drawn


def _recorded() -> torch.Tensor:
  with torchax.default_env().rng.record():
    return _draws()


def _mlp_rows(x, add) -> list[Row]:
  torch.manual_seed(0)
  model = torch.nn.Sequential(
    torch.nn.Linear(32, 64),
    torch.nn.GELU(),
    torch.nn.Dropout(0.1),
    torch.nn.Linear(64, 32),
  ).to("jax")
  frozen = [parameter.detach() for parameter in model.parameters()]

  def forward():
    hidden = F.gelu(F.linear(x, frozen[0], frozen[1]))
    return F.linear(F.dropout(hidden, 0.1), frozen[2], frozen[3])

  def forward_backward():
    loss = model(x).sum()
    loss.backward()
    grad = model[0].weight.grad
    model.zero_grad()
    return grad

  return [
    compare(
      "eager MLP (Linear–GELU–Dropout–Linear), functions",
      forward,
      add,
      20,
      baseline_name="jnp.add",
    ),
    compare(
      "eager MLP, nn.Sequential, gradients recorded",
      lambda: model(x),
      add,
      20,
      baseline_name="jnp.add",
    ),
    compare(
      "eager MLP, nn.Sequential, forward and backward",
      forward_backward,
      add,
      60,
      baseline_name="jnp.add",
    ),
  ]
