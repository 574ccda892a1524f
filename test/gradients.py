"""Leaves on the CPU and on jax, whose gradients tests compare."""

import torch
from compare import assert_same, to_jax
from ops.harness import floats

import torchax
from torchax.tensor import Tensor

A = floats(3, 4)
B = floats(3, 4, seed=1)
env = torchax.default_env()


def leaf(values: torch.Tensor = A) -> torch.Tensor:
  """A fresh CPU leaf."""
  return values.clone().requires_grad_()


def both(values: torch.Tensor = A) -> tuple[torch.Tensor, Tensor]:
  """A CPU leaf and its twin on jax."""
  cpu = leaf(values)
  return cpu, to_jax(cpu)


def same_gradients(function, *values: torch.Tensor) -> None:
  """`function(*leaves)` and its gradients agree with the CPU's."""
  cpu = [leaf(v) for v in values]
  on_jax = [to_jax(v) for v in cpu]
  expected, actual = function(*cpu), function(*on_jax)
  assert_same(actual.detach(), expected.detach())
  expected.sum().backward()
  actual.sum().backward()
  for have, want in zip(on_jax, cpu):
    assert_same(have.grad, want.grad)


class Doubling(torch.autograd.Function):
  """Doubles its argument in place; the gradient is `factor` times what comes."""

  @staticmethod
  def forward(ctx, x, factor=2):
    ctx.factor = factor
    ctx.mark_dirty(x)
    return x.mul_(2)

  @staticmethod
  def backward(ctx, gradient):
    return gradient * ctx.factor, None
