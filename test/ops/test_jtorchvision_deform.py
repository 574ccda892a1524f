"""Deformable convolution, compared with `grid_sample` and a product."""

import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from ops.harness import floats
from torch.testing import assert_close

from torchax.ops.jtorchvision_deform import deform_conv2d, deform_conv2d_backward


def expected(input, weight, offset, mask, bias, *options):
  stride, padding, dilation = (options[i : i + 2] for i in (0, 2, 4))
  groups, offset_groups, use_mask = options[6:]
  batch, channels, height, width = input.shape
  features, _, *kernel = weight.shape
  outputs = offset.shape[2:]
  offset = offset.view(batch, offset_groups, kernel[0], kernel[1], 2, *outputs)
  y = torch.arange(outputs[0])[:, None] * stride[0] - padding[0]
  y = (
    y + torch.arange(kernel[0]).view(-1, 1, 1, 1) * dilation[0] + offset[:, :, :, :, 0]
  )
  x = torch.arange(outputs[1]) * stride[1] - padding[1]
  x = x + torch.arange(kernel[1]).view(-1, 1, 1) * dilation[1] + offset[:, :, :, :, 1]
  grid = torch.stack([2 * x / (width - 1) - 1, 2 * y / (height - 1) - 1], -1)
  parts = input.view(batch * offset_groups, -1, height, width)
  grid = grid.reshape(len(parts), -1, outputs[1], 2)
  samples = F.grid_sample(parts, grid, align_corners=True)
  samples = samples.view(batch, offset_groups, -1, *kernel, *outputs)
  if use_mask:
    samples = samples * mask.view(batch, offset_groups, 1, *kernel, *outputs)
  samples = samples.reshape(batch, groups, -1, *kernel, *outputs)
  weight = weight.view(groups, features // groups, -1, *kernel)
  result = torch.einsum("ngcijyx,gfcij->ngfyx", samples, weight)
  return result.reshape(batch, features, *outputs) + bias[:, None, None]


@pytest.mark.parametrize(
  "kernel, options",
  [
    ((3, 3), (1, 1, 1, 1, 1, 1, 1, 1, False)),
    ((3, 3), (1, 1, 1, 1, 1, 1, 1, 1, True)),
    ((2, 3), (2, 1, 0, 2, 1, 2, 2, 1, True)),
    ((3, 1), (2, 2, 1, 1, 1, 1, 2, 4, True)),
    ((1, 1), (1, 1, 0, 0, 1, 1, 4, 2, False)),
  ],
)
def test_deform_conv2d_and_gradients(kernel, options):
  groups, offset_groups, use_mask = options[6:]
  stride, padding, dilation = (options[i : i + 2] for i in (0, 2, 4))
  input = floats(2, 8, 9, 7, dtype=torch.float64)
  weight = floats(4, 8 // groups, *kernel, seed=1, dtype=torch.float64)
  plain = F.conv2d(input, weight, None, stride, padding, dilation, groups)
  taps = offset_groups * kernel[0] * kernel[1]
  offset = floats(2, 2 * taps, *plain.shape[2:], seed=2, low=-3, high=3)
  mask = floats(2, taps, *plain.shape[2:], seed=3)
  bias = floats(4, seed=4)
  tensors = [t.double().requires_grad_() for t in (input, weight, offset, mask, bias)]
  value = expected(*tensors, *options)
  weights = floats(*value.shape, seed=5, dtype=torch.float64)
  gradients = torch.autograd.grad(value, tensors, weights, allow_unused=True)
  arrays = [jnp.array(t.detach().float()) for t in tensors]
  actual = deform_conv2d(*arrays, *options)
  assert_close(torch.tensor(actual), value.detach().float(), rtol=1e-4, atol=1e-4)
  actual = deform_conv2d_backward(jnp.array(weights.float()), *arrays, *options)
  for have, want in zip(actual, gradients):
    want = torch.zeros_like(tensors[3]) if want is None else want
    assert_close(torch.tensor(have), want.float(), rtol=1e-4, atol=1e-4)


def test_zero_offsets_have_the_derivative_to_the_right():
  """Points at -1, where a padded convolution starts, read the first row, too."""
  image = jnp.ones((1, 1, 1, 1))
  offset = jnp.zeros((1, 2, 3, 1))
  options = (1, 1, 1, 0, 1, 1, 1, 1, False)
  arrays = (image, jnp.ones((1, 1, 1, 1)), offset, jnp.ones((1, 1, 3, 1)), jnp.zeros(1))
  assert deform_conv2d(*arrays, *options).ravel().tolist() == [0, 1, 0]
  gradient = deform_conv2d_backward(jnp.ones((1, 1, 3, 1)), *arrays, *options)[2]
  assert gradient[0, 0].ravel().tolist() == [1, -1, 0]
