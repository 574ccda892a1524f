"""Residuals of compiled functions: arguments and weights are kept, not copied."""

import jax
import pytest
import torch
import torch.nn.functional as F
from compare import assert_same

from torchax.errors import DonationError
from torchax.interop import jax_jit

W = torch.arange(12.0).reshape(3, 4) / 7
X = torch.arange(6.0).reshape(2, 3) - 2


def weight() -> torch.Tensor:
  return W.to("jax").requires_grad_()


def results(function, *args) -> list[tuple[int, ...]]:
  """Return the shapes of the results of a program."""
  return [info.shape for info in jax.tree.leaves(function.trace(*args).out_info)]


def test_programs_return_no_operands():
  w, x = weight(), X.to("jax").requires_grad_()
  multiply = jax_jit(lambda x: (x @ w).sin())
  # The result, and the product for the cosine; neither the argument nor the weight.
  assert results(multiply, x) == [(2, 4), (2, 4)]
  multiply(x).sum().backward()
  product = (X @ W).cos()
  assert_same(x.grad, product @ W.T)
  assert_same(w.grad, X.T @ product)


def test_results_are_residuals_too():
  x = X.to("jax").requires_grad_()
  function = jax_jit(lambda x: {"exp": x.exp(), "twice": 2 * x})
  assert results(function, x) == [(2, 3), (2, 3)]
  exp, twice = function(x).values()
  with torch.no_grad():
    twice.zero_()
  exp.sum().backward()
  assert_same(x.grad, X.exp())


@pytest.mark.parametrize("name", ["donate_argnums", "in_shardings"])
def test_donated_and_sharded_arguments_are_copied(name):
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  options = {name: {"donate_argnums": 0, "in_shardings": here}[name]}
  w = weight()
  multiply = jax_jit(lambda x: x @ w, options)
  assert results(multiply, X.to("jax")) == [(2, 4), (2, 3)]
  multiply(X.to("jax")).sum().backward()
  assert_same(w.grad, X.T @ torch.ones(2, 4))


def test_a_numpy_argument_may_change_before_the_backward_pass():
  w, x = weight(), X.numpy().copy()
  loss = jax_jit(lambda x: (x @ w).sum())(x)
  x *= 0
  loss.backward()
  assert_same(w.grad, X.T @ torch.ones(2, 4))


def test_a_weight_may_change_before_the_backward_pass():
  w, x = weight(), X.to("jax").requires_grad_()
  loss = jax_jit(lambda x: (x @ w).sum())(x)
  with torch.no_grad():
    w.zero_()
  loss.backward()
  assert_same(x.grad, torch.ones(2, 4) @ W.T)


def attention(x):
  return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("run", [lambda f: f, jax_jit], ids=["eager", "compiled"])
def test_a_donated_residual_is_named(run):
  x = X[None].to("jax").requires_grad_()
  loss = run(attention)(x).sum()
  jax_jit(lambda x: x + 1, {"donate_argnums": 0})(x.detach())
  with pytest.raises(DonationError, match="backward pass"):
    loss.backward()


def test_a_program_in_a_program_keeps_its_operands():
  w, x = weight(), X.to("jax").requires_grad_()
  inner = jax_jit(lambda x: (x @ w).sin())
  jax_jit(lambda x: inner(x) * 2)(x).sum().backward()
  product = 2 * (X @ W).cos()
  assert_same(x.grad, product @ W.T)
  assert_same(w.grad, X.T @ product)
