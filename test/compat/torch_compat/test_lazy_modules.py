"""Lazy modules, whose parameters get their shape from the first call, on jax."""

import copy

import pytest
import torch
from compare import assert_close
from torch import nn
from torch.nn.parameter import is_lazy

from torchax.tensor import Tensor

POINTS = torch.linspace(-1, 1, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4)

MODULES = {
  "linear": (nn.LazyLinear, (3,), POINTS),
  "conv": (nn.LazyConv2d, (4, 2), POINTS),
  "transposed_conv": (nn.LazyConvTranspose2d, (4, 2), POINTS),
  "batch_norm": (nn.LazyBatchNorm2d, (), POINTS),
}
WAYS = {
  "moved": lambda cls, args: cls(*args).to("jax"),
  "made": lambda cls, args: cls(*args, device="jax"),
  "copied": lambda cls, args: copy.deepcopy(cls(*args).to("jax")),
  "moved_twice": lambda cls, args: cls(*args).to("jax").cpu().to("jax"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", MODULES)
def test_lazy_module_materializes_on_jax(row, way):
  cls, args, points = MODULES[row]
  expected = cls(*args)
  expected(points)
  module = WAYS[way](cls, args)
  module.load_state_dict(expected.state_dict())
  for tensor in module.state_dict().values():
    assert isinstance(tensor, Tensor)
  actual = module(points.to("jax"))
  assert isinstance(actual, Tensor)
  assert_close(actual.cpu(), expected(points))
  actual.sum().backward()
  assert all(isinstance(p.grad, Tensor) for p in module.parameters())


def test_lazy_module_is_initialized_by_its_first_call():
  module = nn.LazyLinear(3).to("jax")
  weight = module.weight
  optimizer_parameters = list(module.parameters())
  assert is_lazy(weight) and weight.device.type == "jax"
  module(torch.ones(2, 5, device="jax"))
  assert module.weight is weight is optimizer_parameters[0]
  assert isinstance(weight, Tensor) and isinstance(weight, nn.Parameter)
  assert weight.shape == (3, 5) and weight.requires_grad
  assert weight.detach().std() > 0


def test_lazy_module_keeps_its_dtype_and_order():
  module = nn.LazyLinear(3).to("jax", torch.bfloat16)
  module(torch.ones(2, 5, device="jax", dtype=torch.bfloat16))
  assert module.weight.dtype == torch.bfloat16
  assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]


def test_lazy_module_on_the_cpu_is_torchs_own():
  module = nn.LazyLinear(3)
  module(torch.ones(2, 5))
  assert type(module.weight) is nn.Parameter and module.weight.shape == (3, 5)
