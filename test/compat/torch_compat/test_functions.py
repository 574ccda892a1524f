"""Functions with gradients of their own."""

import pytest
import torch

from torchax.compat import torch_compat


class Twice(torch.autograd.Function):
  """Counts nothing, doubles everything."""

  generate_vmap_rule = True

  @staticmethod
  def forward(x):
    return x * 2

  @staticmethod
  def setup_context(ctx, inputs, output):
    pass

  @staticmethod
  def backward(ctx, gradient):
    return gradient * 2


def test_apply_function_equals_apply_under_transforms():
  x = torch.ones(3, requires_grad=True)

  def twice(x):
    return torch_compat.apply_function(Twice, x)

  twice(x).sum().backward()
  assert torch.equal(x.grad, torch.full((3,), 2.0))
  rows = torch.arange(6.0).view(2, 3)
  assert torch.equal(torch.func.vmap(twice)(rows), rows * 2)
  gradient = torch.func.grad(lambda x: twice(x).sum())(torch.ones(3))
  assert torch.equal(gradient, torch.full((3,), 2.0))


def test_failed_cuda_backward_names_the_ways_out():
  def fail(gradient):  # the assertion of torch's engine for any CUDA tensor
    raise RuntimeError("opt_ready_stream && opt_parent_stream INTERNAL ASSERT FAILED")

  x = torch.ones(3, requires_grad=True)
  x.register_hook(fail)
  with pytest.raises(RuntimeError, match="161129.*does not import torchax"):
    (x * 2).sum().backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_failed_backward_of_a_masked_tensor_names_the_class():
  data = torch.arange(4.0, device="jax")
  x = torch.masked.masked_tensor(data, data > 1, requires_grad=True)
  with pytest.raises(RuntimeError, match="such as a MaskedTensor.*on the CPU"):
    x.sum().backward()
