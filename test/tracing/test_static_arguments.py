"""Arguments of compiled functions that are not arrays."""

import pytest
import torch

import torchax
from torchax.interop import JittableModule, jax_jit

X = torch.arange(3.0)


@pytest.fixture
def env():
  return torchax.default_env()


@pytest.fixture
def traced(env):
  """Return a compiled function that decides in Python, and a list of its traces."""
  calls = []

  def function(x, double, name="a", dtype=None):
    calls.append(1)
    y = x * 2 if double else x
    y = y if name == "a" else -y
    return y if dtype is None else y.to(dtype)

  with env:
    yield jax_jit(function), calls


def test_flags_strings_and_dtypes_are_constants(traced):
  run, calls = traced
  x = X.to("jax")
  assert run(x, True).tolist() == [0.0, 2.0, 4.0]
  assert run(x, False).tolist() == [0.0, 1.0, 2.0]
  assert run(x, double=True, name="b").tolist() == [0.0, -2.0, -4.0]
  assert run(x, True, dtype=torch.bfloat16).dtype is torch.bfloat16
  assert len(calls) == 4
  run(x, True), run(x, False)
  assert len(calls) == 4


def test_numbers_are_operands(env):
  calls = []

  def function(x, number):
    calls.append(1)
    return x * number

  with env:
    run = jax_jit(function)
    assert run(X.to("jax"), 2).tolist() == [0.0, 2.0, 4.0]
    assert run(X.to("jax"), 3).tolist() == [0.0, 3.0, 6.0]
  assert len(calls) == 1


def test_static_arguments_may_be_flags(env):
  with env:
    run = jax_jit(lambda x, on: x if on else -x, {"static_argnums": (1,)})
    assert run(X.to("jax"), True).tolist() == [0.0, 1.0, 2.0]
    assert run(X.to("jax"), False).tolist() == [0.0, -1.0, -2.0]


def test_gradients_go_through_a_call_with_a_flag(env):
  class Model(torch.nn.Module):
    def __init__(self):
      super().__init__()
      self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x, square: bool):
      return (x * self.weight) ** 2 if square else x * self.weight

  with env:
    model = Model().to("jax")
    run = JittableModule(model)
    run(X.to("jax"), square=True).sum().backward()
    assert model.weight.grad.tolist() == [0.0, 2.0, 8.0]
    (gradient,) = torch.autograd.grad(
      run(X.to("jax"), True).sum(), model.weight, create_graph=True
    )
    (second,) = torch.autograd.grad(gradient.sum(), model.weight)
    assert second.tolist() == [0.0, 2.0, 8.0]
