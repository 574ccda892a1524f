"""Region of interest alignment, compared with a loop over sample points."""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest
import torch
from ops.harness import floats
from torch.testing import assert_close

from torchax.errors import TracedStateError
from torchax.ops.jtorchvision_roi import (
  ps_roi_align,
  ps_roi_align_backward,
  roi_align,
  roi_align_backward,
)

# (index of the image, x1, y1, x2, y2); the last two leave the image.
REGIONS = torch.tensor(
  [
    [0, 1.0, 2.0, 9.0, 7.0],
    [1, 0.5, 0.0, 0.9, 0.2],
    [1, -4.0, -3.0, 6.0, 5.0],
    [0, 3.0, 3.0, 40.0, 30.0],
  ]
)
BINS, SCALE = (3, 2), 0.7


def value_at(image, y: float, x: float):
  height, width = image.shape[1:]
  if not (-1 <= y <= height and -1 <= x <= width):
    return torch.zeros(len(image), dtype=image.dtype)
  y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
  top, left = int(y), int(x)
  bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
  upper = image[:, top, left] * (1 - x + left) + image[:, top, right] * (x - left)
  lower = image[:, bottom, left] * (1 - x + left) + image[:, bottom, right] * (x - left)
  return upper * (1 - y + top) + lower * (y - top)


def expected(images, ratio: int, aligned: bool):
  rows = []
  for index, *corners in REGIONS.double().tolist():
    x1, y1, x2, y2 = (c * SCALE - 0.5 * aligned for c in corners)
    size = [(y2 - y1) / BINS[0], (x2 - x1) / BINS[1]]
    if not aligned:
      size = [max(n * s, 1) / n for n, s in zip(BINS, size)]
    count = [ratio if ratio > 0 else math.ceil(s) for s in size]
    for row, column in itertools.product(*map(range, BINS)):
      points = itertools.product(*map(range, count))
      values = [
        value_at(
          images[int(index)],
          y1 + size[0] * (row + (i + 0.5) / count[0]),
          x1 + size[1] * (column + (j + 0.5) / count[1]),
        )
        for i, j in points
      ]
      rows.append(sum(values) / len(values))
  return torch.stack(rows).view(-1, *BINS, images.shape[1]).permute(0, 3, 1, 2)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("ratio", [-1, 0, 1, 2])
def test_roi_align_and_gradient(ratio, aligned):
  images = floats(2, 3, 10, 8, dtype=torch.float64).requires_grad_()
  value = expected(images, ratio, aligned)
  weights = floats(*value.shape, seed=1, dtype=torch.float64)
  (gradient,) = torch.autograd.grad(value, images, weights)
  arrays = (jnp.array(t.detach().float()) for t in (images, REGIONS, weights))
  image, regions, grad = arrays
  options = (regions, SCALE, *BINS)
  actual = roi_align(image, *options, ratio, aligned)
  assert_close(torch.tensor(actual), value.detach().float(), rtol=1e-4, atol=1e-5)
  actual = roi_align_backward(grad, *options, *image.shape, ratio, aligned)
  assert_close(torch.tensor(actual), gradient.float(), rtol=1e-4, atol=1e-5)


def own_channels(pooled):
  """Return the channels of each bin from means of all of them."""
  bins = range(BINS[0] * BINS[1])
  parts = [pooled.flatten(2)[:, i :: len(bins), i] for i in bins]
  return torch.stack(parts, -1).unflatten(-1, BINS)


@pytest.mark.parametrize("ratio", [-1, 2])
def test_position_sensitive_roi_align_and_gradient(ratio):
  images = floats(2, 12, 10, 8, dtype=torch.float64).requires_grad_()
  value = own_channels(expected(images, ratio, aligned=True))
  weights = floats(*value.shape, seed=1, dtype=torch.float64)
  (gradient,) = torch.autograd.grad(value, images, weights)
  arrays = (jnp.array(t.detach().float()) for t in (images, REGIONS, weights))
  image, regions, grad = arrays
  actual, channels = ps_roi_align(image, regions, SCALE, *BINS, ratio)
  assert_close(torch.tensor(actual), value.detach().float(), rtol=1e-4, atol=1e-5)
  assert channels[0].tolist() == torch.arange(12).view(2, *BINS).tolist()
  options = (regions, channels, SCALE, *BINS, ratio)
  actual = ps_roi_align_backward(grad, *options, *image.shape)
  assert_close(torch.tensor(actual), gradient.float(), rtol=1e-4, atol=1e-5)


def test_position_sensitive_roi_align_of_a_point():
  point = jnp.array([[0, 2.0, 2.0, 2.0, 2.0]])
  pooled, channels = ps_roi_align(jnp.ones((1, 4, 5, 5)), point, 1.0, 2, 2, -1)
  assert jnp.isnan(pooled).all()
  grad = ps_roi_align_backward(
    pooled * 0 + 1, point, channels, 1.0, 2, 2, -1, 1, 4, 5, 5
  )
  assert not grad.any()


def test_adaptive_samples_of_a_whole_number_of_elements():
  """A reciprocal of 49 would round 49 / 49 up, to two samples in each bin."""
  images = jnp.arange(50.0).reshape(1, 1, 1, 50) ** 2
  region = jnp.array([[0, 0.0, 0.0, 49.0, 1.0]])
  pooled = roi_align(images, region, 1.0, 1, 49, -1, False)
  middle = (images[0, 0, 0, 1:] + images[0, 0, 0, :-1]) / 2
  assert_close(torch.tensor(pooled[0, 0, 0]), torch.tensor(middle))


@pytest.mark.parametrize("ratio", [-1, 2])
def test_no_regions(ratio):
  empty = roi_align(jnp.ones((1, 2, 4, 4)), jnp.ones((0, 5)), 1.0, 3, 2, ratio, True)
  assert empty.shape == (0, 2, 3, 2)


def test_compiled_function_needs_sampling_ratio():
  def align(regions, ratio):
    return roi_align(jnp.ones((2, 1, 8, 8)), regions, 1.0, 2, 2, ratio, True)

  align = jax.jit(align, static_argnums=1)
  assert align(jnp.array(REGIONS), 2).shape == (4, 1, 2, 2)
  with pytest.raises(TracedStateError, match="positive sampling_ratio"):
    align(jnp.array(REGIONS), -1)
