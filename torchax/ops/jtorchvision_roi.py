"""Region of interest alignment: `torchvision.ops.roi_align`, and its gradient.

The lowerings are registered by name, so torchvision may be missing or imported later.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from torchax.errors import TracedStateError
from torchax.ops.builtin import op


def _samples(low, length, bins: int, most: int, adaptive: bool):
  """Return the sample points of a dimension, and the mask of real ones.

  Args:
    low, length: start and size of the regions, of shape (k,).
    bins: number of output elements.
    most: number of samples in a bin, or the largest one if `adaptive`.
    adaptive: each region has one sample per input element, rounded up.

  Returns:
    Points and masks of shape (k, bins, most), and the number of samples per bin (k,).
  """
  size = length / bins
  count = jnp.ceil(size) if adaptive else jnp.full_like(size, most)
  position = jnp.arange(most, dtype=low.dtype)
  inside = (position + 0.5) * (size / count)[:, None]
  start = low[:, None] + jnp.arange(bins, dtype=low.dtype) * size[:, None]
  points = start[:, :, None] + inside[:, None]
  is_real = jnp.broadcast_to(position < count[:, None, None], points.shape)
  return points, is_real, count


def _neighbors(points, is_real, extent: int):
  """Return the two input elements around each point, and their weights."""
  is_real &= (points >= -1) & (points <= extent)
  points = jnp.clip(points, 0, extent - 1)
  low = jnp.floor(points).astype(jnp.int32)
  high = jnp.minimum(low + 1, extent - 1)
  part = points - low
  weights = jnp.where(is_real, jnp.stack([1 - part, part]), 0)
  return jnp.stack([low, high]), weights


@functools.partial(jax.jit, static_argnames=("bins", "most", "adaptive", "aligned"))
def _align(images, regions, scale, *, bins, most, adaptive, aligned):
  """Return the means of bilinear samples, of shape (k, channels, *bins)."""
  batch = regions[:, 0].astype(jnp.int32)
  corners = regions[:, 1:] * scale - (0.5 if aligned else 0.0)
  sizes = corners[:, 2:] - corners[:, :2]
  sizes = sizes if aligned else jnp.maximum(sizes, 1)
  around, total = [], 1.0
  for dim, (x_or_y, extent) in enumerate(zip((1, 0), images.shape[2:])):
    points, is_real, count = _samples(
      corners[:, x_or_y], sizes[:, x_or_y], bins[dim], most[dim], adaptive
    )
    around.append(_neighbors(points, is_real, extent))
    total = total * jnp.maximum(count, 1)
  (rows, row_weights), (columns, column_weights) = around
  channels_last = images.transpose(0, 2, 3, 1)
  pooled = 0.0
  for row, row_weight in zip(rows, row_weights):
    for column, column_weight in zip(columns, column_weights):
      # (k, bins of rows, samples, bins of columns, samples, channels)
      index = (row[:, :, :, None, None], column[:, None, None, :, :])
      values = channels_last[batch[:, None, None, None, None], *index]
      weights = (row_weight[:, :, :, None, None], column_weight[:, None, None, :, :])
      pooled += jnp.einsum("kymxnc,kymxn->kcyx", values, math.prod(weights))
  return (pooled / total[:, None, None, None]).astype(images.dtype)


def _options(regions, scale, bins: tuple[int, int], ratio: int, aligned: bool) -> dict:
  """Return the static arguments of `_align`.

  Raises:
    TracedStateError: the number of samples depends on regions inside a compiled
      function.
  """
  options = {"bins": bins, "adaptive": ratio <= 0, "aligned": aligned}
  if ratio > 0 or not len(regions):
    return options | {"most": (max(ratio, 1),) * 2}
  if isinstance(regions, jax.core.Tracer):
    raise TracedStateError(
      "The number of samples of roi_align with sampling_ratio=-1 depends on the "
      "numbers of its boxes, so it cannot run inside a compiled function. Pass a "
      "positive sampling_ratio."
    )
  corners = np.asarray(regions)[:, 1:] * scale
  sizes = (corners[:, 2:] - corners[:, :2]).max(axis=0)[::-1]
  # Powers of two, so that few programs are compiled.
  most = [max(math.ceil(size / n) + 1, 1) for size, n in zip(sizes, bins)]
  return options | {"most": tuple(1 << (n - 1).bit_length() for n in most)}


@op("torchvision::roi_align", compiled=False)
def roi_align(
  images, regions, scale, pooled_height, pooled_width, sampling_ratio, aligned
):
  """Return the mean of bilinear samples in each bin of each region.

  Args:
    images: floats of shape (n, channels, height, width).
    regions: rows (index of the image, x1, y1, x2, y2) of shape (k, 5).
    scale: factor from the coordinates of the regions to those of the images.
    pooled_height, pooled_width: number of bins.
    sampling_ratio: samples per bin and dimension; by the region's size if not positive.
    aligned: shift the coordinates by half an element.

  Returns:
    An array of shape (k, channels, pooled_height, pooled_width).

  Raises:
    TracedStateError: called inside a compiled function with `sampling_ratio` <= 0.

  References:
    https://docs.pytorch.org/vision/stable/generated/torchvision.ops.roi_align.html
  """
  bins = (pooled_height, pooled_width)
  options = _options(regions, scale, bins, sampling_ratio, aligned)
  return _align(images, regions, scale, **options)


@op("torchvision::_roi_align_backward", compiled=False)
def roi_align_backward(
  grad,
  regions,
  scale,
  pooled_height,
  pooled_width,
  batch_size,
  channels,
  height,
  width,
  sampling_ratio,
  aligned,
):
  """Return the gradient of `roi_align` for the images."""
  bins = (pooled_height, pooled_width)
  options = _options(regions, scale, bins, sampling_ratio, aligned)
  images = jax.ShapeDtypeStruct((batch_size, channels, height, width), grad.dtype)
  return _transpose(images, grad, regions, scale, tuple(options.items()))


@functools.partial(jax.jit, static_argnums=(0, 4))
def _transpose(images, grad, regions, scale, options):
  align = functools.partial(_align, regions=regions, scale=scale, **dict(options))
  return jax.linear_transpose(align, images)(grad)[0]
