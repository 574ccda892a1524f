"""Region of interest alignment: `torchvision.ops.roi_align` and `ps_roi_align`.

The lowerings are registered by name, so torchvision may be missing or imported later.
Maximum and mean over the elements of a region are in `jtorchvision_pool.py`.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from torchax.errors import TracedStateError
from torchax.ops.builtin import op
from torchax.ops.jtorchvision_pool import bin_channels, divide, require_channels


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
  size = divide(length, bins)
  count = jnp.ceil(size) if adaptive else jnp.full_like(size, most)
  position = jnp.arange(most, dtype=low.dtype)
  inside = (position + 0.5) * (size / count)[:, None]
  start = low[:, None] + jnp.arange(bins, dtype=low.dtype) * size[:, None]
  points = start[:, :, None] + inside[:, None]
  is_real = jnp.broadcast_to(position < count[:, None, None], points.shape)
  return points, is_real, count


def neighbors(points, is_real, extent: int):
  """Return the two input elements around each point, and their weights."""
  is_real &= (points >= -1) & (points <= extent)
  points = jnp.clip(points, 0, extent - 1)
  low = jnp.floor(points).astype(jnp.int32)
  high = jnp.minimum(low + 1, extent - 1)
  part = points - low
  weights = jnp.where(is_real, jnp.stack([1 - part, part]), 0)
  return jnp.stack([low, high]), weights


_OPTIONS = ("bins", "most", "adaptive", "aligned", "by_bin")


@functools.partial(jax.jit, static_argnames=_OPTIONS)
def _align(images, regions, scale, *, bins, most, adaptive, aligned, by_bin):
  """Return the means of bilinear samples, of shape (k, channels, *bins).

  With `by_bin` each bin reads channels of its own, and the mean of no samples is NaN.
  """
  batch = regions[:, 0].astype(jnp.int32)
  corners = regions[:, 1:] * scale - (0.5 if aligned else 0.0)
  sizes = corners[:, 2:] - corners[:, :2]
  sizes = sizes if aligned else jnp.maximum(sizes, 1)
  around, total, empty = [], 1.0, jnp.nan if by_bin else 0
  for dim, (x_or_y, extent) in enumerate(zip((1, 0), images.shape[2:])):
    points, is_real, count = _samples(
      corners[:, x_or_y], sizes[:, x_or_y], bins[dim], most[dim], adaptive
    )
    around.append(neighbors(points, is_real, extent))
    total = total * count
  (rows, row_weights), (columns, column_weights) = around
  channels_last = images.transpose(0, 2, 3, 1)
  # (bins of rows, 1, bins of columns, 1, channels)
  channels = bin_channels(images.shape[1], bins).transpose(1, 2, 0)[:, None, :, None]
  pooled = 0.0
  for row, row_weight in zip(rows, row_weights):
    for column, column_weight in zip(columns, column_weights):
      # (k, bins of rows, samples, bins of columns, samples, channels)
      index = (batch[:, None, None, None, None], row[:, :, :, None, None])
      index += (column[:, None, None, :, :],)
      if by_bin:
        index = (*(part[..., None] for part in index), channels)
      values = channels_last[index]
      weights = (row_weight[:, :, :, None, None], column_weight[:, None, None, :, :])
      pooled += jnp.einsum("kymxnc,kymxn->kcyx", values, math.prod(weights))
  total = total[:, None, None, None]
  pooled = pooled / jnp.where(total == 0, 1, total)
  return jnp.where(total == 0, empty, pooled).astype(images.dtype)


def _options(regions, scale, bins, ratio: int, aligned: bool, by_bin=False) -> dict:
  """Return the static arguments of `_align`.

  Raises:
    TracedStateError: the number of samples depends on regions inside a compiled
      function.
  """
  adaptive = ratio <= 0
  options = {"bins": bins, "adaptive": adaptive, "aligned": aligned, "by_bin": by_bin}
  if ratio > 0 or not len(regions):
    return options | {"most": (max(ratio, 1),) * 2}
  if isinstance(regions, jax.core.Tracer):
    raise TracedStateError(
      "The number of samples of roi_align and ps_roi_align with sampling_ratio=-1 "
      "depends on the numbers of the boxes, so they cannot run inside a compiled "
      "function. Pass a positive sampling_ratio."
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


@op("torchvision::ps_roi_align", compiled=False)
def ps_roi_align(images, regions, scale, pooled_height, pooled_width, sampling_ratio):
  """Return `roi_align` with channels for each bin, and the channels that were read.

  Args:
    images: floats of shape (n, channels * pooled_height * pooled_width, height, width).
    regions, scale, pooled_height, pooled_width, sampling_ratio: see `roi_align`.

  Returns:
    Floats and int32 indices of shape (k, channels, pooled_height, pooled_width).

  Raises:
    RuntimeError: the number of channels is no multiple of the number of bins.
    TracedStateError: see `roi_align`.

  References:
    https://docs.pytorch.org/vision/stable/generated/torchvision.ops.ps_roi_align.html
  """
  bins = (pooled_height, pooled_width)
  require_channels(images, bins)
  options = _options(regions, scale, bins, sampling_ratio, aligned=True, by_bin=True)
  pooled = _align(images, regions, scale, **options)
  return pooled, jnp.broadcast_to(bin_channels(images.shape[1], bins), pooled.shape)


@op("torchvision::_ps_roi_align_backward", compiled=False)
def ps_roi_align_backward(
  grad,
  regions,
  channel_mapping,
  scale,
  pooled_height,
  pooled_width,
  sampling_ratio,
  batch_size,
  channels,
  height,
  width,
):
  """Return the gradient of `ps_roi_align` for the images."""
  bins = (pooled_height, pooled_width)
  options = _options(regions, scale, bins, sampling_ratio, aligned=True, by_bin=True)
  images = jax.ShapeDtypeStruct((batch_size, channels, height, width), grad.dtype)
  return _transpose(images, grad, regions, scale, tuple(options.items()))
