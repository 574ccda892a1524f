"""Batches of gradients: `is_grads_batched`, `vectorize=True`, vmap over `grad`."""

import copy

import pytest
import torch
import torch.nn.functional as F
from compare import assert_same, to_jax
from torch.autograd.functional import hessian, jacobian

import torchax
from torchax.interop import jax_jit

X = torch.arange(6.0).reshape(2, 3) / 5
W = torch.linspace(-1, 1, 12).reshape(4, 3)
SEEDS = torch.linspace(-1, 1, 24).reshape(3, 2, 4)


def linear(x):
  return F.linear(x, W.to(x.device)).sin()


FUNCTIONS = {
  "linear": linear,
  "layer_norm": lambda x: F.layer_norm(linear(x), (4,)).sin(),
  "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
  "an ATen operation": lambda x: (x @ x.T).softmax(-1),
  "a compiled function": lambda x: jax_jit(lambda y: torch.tanh(y @ y.T).exp())(x),
  "a copy to the CPU": lambda x: x.sin().cpu() * 2,
  "a copy to jax and back": lambda x: (x.sin().to("jax") * 2).to(x.device),
}
# Equivalent forms whose second gradients the CPU has.
ON_CPU = FUNCTIONS | {
  "attention": lambda x: (x @ x.T / 3**0.5).softmax(-1) @ x,
  "a compiled function": lambda x: torch.tanh(x @ x.T).exp(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vectorized_jacobian_equals_cpu(name):
  with torchax.default_env():
    actual = jacobian(FUNCTIONS[name], to_jax(X), vectorize=True)
  assert_same(actual, jacobian(ON_CPU[name], X), name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vectorized_hessian_equals_cpu(name):
  with torchax.default_env():
    actual = hessian(lambda x: FUNCTIONS[name](x).sum(), to_jax(X), vectorize=True)
  assert_same(actual, hessian(lambda x: ON_CPU[name](x).sum(), X), name)


def test_batched_gradients_have_a_graph_of_their_own():
  def second(x):
    x.requires_grad_()
    y = F.layer_norm(linear(x), (4,))
    seeds = SEEDS.to(x.device)
    (first,) = torch.autograd.grad(
      y, x, seeds, is_grads_batched=True, create_graph=True
    )
    return torch.autograd.grad(first.square().sum(), x)

  with torchax.default_env():
    actual = second(to_jax(X))
  assert_same(actual, second(X.clone()))


MODULES = {
  "LSTM": lambda: torch.nn.LSTM(3, 2),
  "GRU": lambda: torch.nn.GRU(3, 2),
  "TransformerEncoderLayer": lambda: torch.nn.TransformerEncoderLayer(3, 1, 4, 0.0),
}


@pytest.mark.parametrize("name", MODULES)
def test_batched_gradients_of_parameters_equal_cpu(name):
  torch.manual_seed(0)
  module = MODULES[name]()

  def gradients(module, x):
    y = module(x[:, None])
    y = y[0] if isinstance(y, tuple) else y
    seeds = torch.stack([torch.ones_like(y), torch.zeros_like(y), y.detach()])
    return torch.autograd.grad(
      y, list(module.parameters()), seeds, is_grads_batched=True
    )

  with torchax.default_env():
    actual = gradients(copy.deepcopy(module).to("jax"), to_jax(X))
  assert_same(actual, gradients(module, X), name)


@pytest.mark.parametrize("in_dims", [0, 1])
def test_vmap_runs_over_the_gradient_of_an_outer_graph(in_dims):
  def rows(x):
    x.requires_grad_()
    y = F.layer_norm(linear(x), (4,))
    seeds = SEEDS.to(x.device).movedim(0, in_dims)

    def pull(seed):
      return torch.autograd.grad(y, x, seed, retain_graph=True)[0]

    return torch.vmap(pull, in_dims)(seeds)

  with torchax.default_env():
    actual = rows(to_jax(X))
  assert_same(actual, rows(X.clone()))


def test_each_row_of_a_batch_has_the_mask_of_the_forward_pass():
  with torchax.default_env():
    x = torch.ones(4, 5, device="jax", requires_grad=True)
    y = F.dropout(x, 0.5)
    seeds = torch.ones(3, 4, 5, device="jax")
    (rows,) = torch.autograd.grad(y, x, seeds, is_grads_batched=True)
  assert 0 < y.count_nonzero() < 20
  for row in rows:
    assert torch.equal(row, y)


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_tangents_follow_a_copy_between_devices(device):
  with torchax.default_env():
    other = "cpu" if device == "jax" else "jax"
    x = X.to(device)
    value, tangent = torch.func.jvp(lambda x: x.sin().to(other), (x,), (x,))
    assert value.device.type == tangent.device.type == other
    mapped = torch.func.vmap(lambda row: row.to(other).sin())(x)
  torch.testing.assert_close(tangent.cpu(), X.cos() * X)
  torch.testing.assert_close(mapped.cpu(), X.sin())
