"""Region of interest pooling, compared with a loop over bins."""

import itertools
import math

import jax.numpy as jnp
import pytest
import torch
from ops.harness import floats
from torch.testing import assert_close

from torchax.ops import jtorchvision_pool

# (index of the image, x1, y1, x2, y2); one point, two that leave the image.
REGIONS = torch.tensor(
  [
    [0, 1.0, 2.0, 9.0, 7.0],
    [1, 0.5, 0.0, 0.9, 0.2],
    [1, -4.0, -3.0, 6.0, 5.0],
    [0, 3.0, 3.0, 40.0, 30.0],
  ]
)
BINS, SCALE = (3, 2), 0.75


def slices_of_bins(inclusive: bool):
  """Return (image, row slice, column slice) of each bin, by float32 arithmetic."""
  for image, *corners in REGIONS.tolist():
    x1, y1, x2, y2 = (
      math.floor(abs(c * SCALE) + 0.5) * (-1) ** (c < 0) for c in corners
    )
    for bin_ in itertools.product(*map(range, BINS)):
      ends = []
      for number, bins, low, high in zip(bin_, BINS, (y1, x1), (y2, x2)):
        size = torch.tensor(max(high - low + inclusive, 1.0)) / bins
        start = int((number * size).floor()) + low
        ends.append(
          slice(max(start, 0), max(int(((number + 1) * size).ceil()) + low, 0))
        )
      yield int(image), *ends


def expected(images, reduce, inclusive: bool):
  values = []
  for i, (image, rows, columns) in enumerate(slices_of_bins(inclusive)):
    part = images[image, :, rows, columns].flatten(1)
    if reduce == "mean":
      part = part[i % (BINS[0] * BINS[1]) :: BINS[0] * BINS[1]].mean(1)
    values.append((part if part.ndim == 1 else part.amax(1)) if part.numel() else None)
  values = [torch.zeros_like(values[0]) if v is None else v for v in values]
  values = torch.stack(values).view(len(REGIONS), *BINS, -1).permute(0, 3, 1, 2)
  return values.nan_to_num(0.0)


@pytest.mark.parametrize("name, reduce", [("roi_pool", "max"), ("ps_roi_pool", "mean")])
def test_pooling_and_gradient(name, reduce):
  images = floats(2, 12, 10, 8, dtype=torch.float64).requires_grad_()
  value = expected(images, reduce, reduce == "max")
  weights = floats(*value.shape, seed=1, dtype=torch.float64)
  (gradient,) = torch.autograd.grad(value, images, weights)
  if reduce == "mean":  # without the last row and column, unlike the gradient
    value = expected(images[..., :-1, :-1], reduce, inclusive=False)
  arrays = (jnp.array(t.detach().float()) for t in (images, REGIONS, weights))
  image, regions, grad = arrays
  pool = getattr(jtorchvision_pool, name)
  actual, index = pool(image, regions, SCALE, *BINS)
  assert_close(torch.tensor(actual), value.detach().float())
  backward = getattr(jtorchvision_pool, f"{name}_backward")
  actual = backward(grad, regions, index, SCALE, *BINS, *image.shape)
  assert_close(torch.tensor(actual), gradient.float())


@pytest.mark.parametrize("name", ["roi_pool", "ps_roi_pool"])
def test_no_regions(name):
  pool = getattr(jtorchvision_pool, name)
  empty, _ = pool(jnp.ones((1, 12, 4, 4)), jnp.ones((0, 5)), 1.0, 3, 2)
  assert empty.shape == (0, 12 if name == "roi_pool" else 2, 3, 2)


def test_maximum_skips_nan_and_marks_empty_bins():
  images = jnp.array([[jnp.nan, 1.0], [3.0, 3.0]])[None, None]
  regions = jnp.array([[0, 0.0, 0.0, 1.0, 1.0], [0, 7.0, 7.0, 9.0, 9.0]])
  pooled, index = jtorchvision_pool.roi_pool(images, regions, 1.0, 1, 1)
  assert pooled.ravel().tolist() == [3.0, 0.0]
  assert index.ravel().tolist() == [2, -1]


def test_channels_must_be_a_multiple_of_the_bins():
  with pytest.raises(RuntimeError, match="multiple"):
    jtorchvision_pool.ps_roi_pool(jnp.ones((1, 5, 4, 4)), REGIONS, 1.0, 2, 2)
