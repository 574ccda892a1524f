"""Comparison of gradients on the CPU and on jax."""

import torch
from compare import assert_same, to_jax
from ops.harness import floats

import torchax
from torchax.tensor import Tensor

A = floats(3, 4)
B = floats(3, 4, seed=1)
env = torchax.default_env()


def leaf(values: torch.Tensor = A) -> torch.Tensor:
  """Return a new CPU leaf."""
  return values.clone().requires_grad_()


def both(values: torch.Tensor = A) -> tuple[torch.Tensor, Tensor]:
  """Return a CPU leaf and its copy on jax."""
  cpu = leaf(values)
  return cpu, to_jax(cpu)


def same_gradients(function, *values: torch.Tensor) -> None:
  """Assert that `function(*leaves)` and its gradients equal the CPU's."""
  cpu = [leaf(v) for v in values]
  on_jax = [to_jax(v) for v in cpu]
  expected, actual = function(*cpu), function(*on_jax)
  assert_same(actual.detach(), expected.detach())
  expected.sum().backward()
  actual.sum().backward()
  for have, want in zip(on_jax, cpu):
    assert_same(have.grad, want.grad)


class Doubling(torch.autograd.Function):
  """In-place doubling, whose backward multiplies the gradient by `factor`."""

  @staticmethod
  def forward(ctx, x, factor=2):
    ctx.factor = factor
    ctx.mark_dirty(x)
    return x.mul_(2)

  @staticmethod
  def backward(ctx, gradient):
    return gradient * ctx.factor, None
