"""Grid sampling, through `torch.nn.functional`: values and both gradients."""

import pytest
import torch
import torch.nn.functional as F
from ops.harness import Case, check, floats

import torchax

PLANE, SPACE = floats(1, 2, 7, 6), floats(1, 2, 4, 5, 3)
GRID = floats(1, 4, 5, 2, low=-1.3, high=1.3)
FAR = floats(1, 4, 5, 2, low=-9.0, high=9.0)
VOLUME_GRID = floats(1, 2, 3, 4, 3, low=-1.2, high=1.2)


def sampled(image, grid, mode, padding, align_corners, **options):
  name = f"{mode}-{padding}-{align_corners}"
  args = (image, grid, mode, padding, align_corners)
  return Case(F.grid_sample, *args, name=name, **options)


SUMS = {
  "grad": True,
  "rtol": 1e-5,
  "atol": 2e-5,
  "why": "sums of products of weights in another order",
}
CASES = (
  sampled(PLANE, GRID, "bilinear", "zeros", False, **SUMS),
  sampled(PLANE, GRID, "bilinear", "border", True, **SUMS),
  sampled(PLANE, FAR, "bilinear", "reflection", False, **SUMS),
  sampled(PLANE, GRID, "nearest", "zeros", True, **SUMS),
  sampled(PLANE, GRID, "bicubic", "zeros", False, **SUMS),
  sampled(PLANE, GRID, "bicubic", "reflection", True, **SUMS),
  sampled(SPACE, VOLUME_GRID, "bilinear", "zeros", False, **SUMS),
  sampled(SPACE, VOLUME_GRID, "bilinear", "reflection", True, **SUMS),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_samples_equal_cpu_torch(case):
  check(case)


@pytest.mark.parametrize("padding", ["border", "reflection"])
def test_grid_gradient_is_zero_where_positions_are_clipped(padding):
  corners = torch.tensor([[[[-1.0, 1.0], [1.0, -1.0], [0.1, 3.0]]]])
  gradients = []
  for device in ("cpu", "jax"):
    with torchax.default_env():
      grid = corners.clone().to(device).requires_grad_()
      image = PLANE.to(device)
      out = F.grid_sample(image, grid, padding_mode=padding, align_corners=True)
      gradients.append(torch.autograd.grad(out.sum(), grid)[0].cpu())
  torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)


def test_gradient_of_a_large_volume_runs():
  """The transposed gather of this size made XLA:CPU crash."""
  image, grid = floats(4, 21, 22, 23, 24), floats(4, 12, 11, 10, 3, low=-1.2, high=1.2)
  gradients = []
  for device in ("cpu", "jax"):
    with torchax.default_env():
      points = grid.clone().to(device).requires_grad_()
      out = F.grid_sample(image.to(device), points, align_corners=True)
      gradients.append(torch.autograd.grad(out.sum(), points)[0].cpu())
  torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)


def test_half_precision_is_rounded_once():
  """CPU torch rounds positions too, which moves samples by hundredths of an element."""
  image, grid = PLANE.bfloat16(), GRID.bfloat16()
  exact = F.grid_sample(image.double(), grid.double(), align_corners=False)
  with torchax.default_env():
    actual = F.grid_sample(image.to("jax"), grid.to("jax"), align_corners=False)
  torch.testing.assert_close(actual.cpu(), exact.bfloat16(), rtol=8e-3, atol=1e-3)
