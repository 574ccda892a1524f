"""Missing features of docs/faq.md are missing; a feature that works fails here."""

import pytest
import torch

from torchax import errors
from torchax.interop import jax_jit, jax_value_and_grad

pytestmark = pytest.mark.usefixtures("env")


def _numbers() -> torch.Tensor:
  return torch.arange(6.0, device="jax")


@pytest.mark.parametrize(
  "part",
  [
    lambda x, start: x[start : start + 2],
    lambda x, start: torch.narrow(x, 0, start, 2),
  ],
  ids=["slice", "narrow"],
)
def test_a_compiled_function_refuses_traced_bounds(part):
  start = torch.tensor(1, device="jax")
  with pytest.raises(errors.TracedStateError, match="item"):
    jax_jit(part)(_numbers(), start)
  assert jax_jit(lambda x, place: x[place])(_numbers(), start) == 1


class Scaled(torch.autograd.Function):
  """Identity whose gradient is 100, so that the caller sees which one was used."""

  @staticmethod
  def forward(ctx, x):
    return x * 1

  @staticmethod
  def backward(ctx, gradient):
    return gradient * 100


def _loss(x):
  return Scaled.apply(x).sum()


def _gradient(loss):
  return jax_value_and_grad(loss)(_numbers())[1][0]


def test_torch_compile_inside_value_and_grad_ignores_backward():
  assert _gradient(torch.compile(_loss, backend="jax")) == 1
  assert _gradient(_loss) == 100
  assert torch.compile(_gradient, backend="jax")(_loss) == 100


def test_a_transform_of_torch_func_has_the_device_lazy():
  devices = []

  def record(x):
    devices.append(x.device.type)
    return (x * torch.full_like(x, 3.0, device=x.device)).sum()

  gradient = torch.func.grad(record)(_numbers())
  assert devices == ["lazy"]
  assert gradient.device.type == "jax" and gradient.tolist() == [3.0] * 6


def test_memory_formats_have_no_effect_on_strides():
  image = torch.ones(1, 2, 3, 3, device="jax").to(memory_format=torch.channels_last)
  assert image.is_contiguous()
  assert (torch.ones(2, 3, device="jax").T + 1).is_contiguous()
  assert not (torch.ones(2, 3, device="cpu").T + 1).is_contiguous()
