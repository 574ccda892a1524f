"""Region of interest pooling: `torchvision.ops.roi_pool` and `ps_roi_pool`.

The lowerings are registered by name, so torchvision may be missing or imported later.
Each bin reduces the elements that it touches, as a mask of rows and one of columns.
Regions are reduced one after another, so memory does not grow with their number.
"""

import jax
import jax.numpy as jnp
from jax import lax

from torchax.ops.builtin import op


def bin_channels(channels: int, bins: tuple[int, int]) -> jax.Array:
  """Return the input channel of each output element, of shape (channels, *bins)."""
  height, width = bins
  count = channels // (height * width) * height * width
  return jnp.arange(count, dtype=jnp.int32).reshape(-1, height, width)


def divide(size, bins: int):
  """Return the size of a bin, rounded as by torchvision.

  XLA would multiply by the reciprocal of a constant, and the number of elements or
  samples in a bin jumps where the quotient is an integer.
  """
  return size / jnp.where(jnp.isnan(size), 1, jnp.asarray(bins, size.dtype))


def require_channels(images, bins: tuple[int, int]) -> None:
  """Raise RuntimeError unless each bin has its own channels."""
  if images.shape[1] % (bins[0] * bins[1]):
    raise RuntimeError(
      f"input channels must be a multiple of pooling height * pooling width = "
      f"{bins[0] * bins[1]}, got {images.shape[1]}."
    )


def _round(x):
  """Round halves away from zero, as `round` of C does."""
  return jnp.trunc(x + jnp.copysign(0.5, x))


def _masks(low, size, bins: int, extent: int):
  """Return the mask of the elements that each bin of a region touches.

  Args:
    low, size: start and size of the regions, of shape (k,).
    bins: number of bins.
    extent: number of elements; the last bin ends there.

  Returns:
    A mask of shape (k, bins, extent).
  """
  bin_size = divide(size, bins)[:, None]
  number = jnp.arange(bins, dtype=low.dtype)
  start = jnp.floor(number * bin_size) + low[:, None]
  end = jnp.ceil((number + 1) * bin_size) + low[:, None]
  element = jnp.arange(extent)
  return (element >= start[:, :, None]) & (element < end[:, :, None])


def _region_masks(regions, scale, bins, extents, inclusive: bool):
  """Return the masks of rows and of columns; the last element counts if `inclusive`."""
  corners = _round(regions[:, 1:] * scale)
  sizes = jnp.maximum(corners[:, 2:] - corners[:, :2] + inclusive, 1)
  return tuple(
    _masks(corners[:, x_or_y], sizes[:, x_or_y], bins[dim], extents[dim])
    for dim, x_or_y in enumerate((1, 0))
  )


@op("torchvision::roi_pool")
def roi_pool(images, regions, scale, pooled_height, pooled_width):
  """Return the maximum of each bin of each region, and its index in the image.

  Args:
    images: floats of shape (n, channels, height, width).
    regions: rows (index of the image, x1, y1, x2, y2) of shape (k, 5).
    scale: factor from the coordinates of the regions to those of the images.
    pooled_height, pooled_width: number of bins.

  Returns:
    Floats and int32 indices of shape (k, channels, pooled_height, pooled_width). A bin
    without elements has the maximum zero and the index -1.

  References:
    https://docs.pytorch.org/vision/stable/generated/torchvision.ops.roi_pool.html
  """
  bins, extents = (pooled_height, pooled_width), images.shape[2:]
  lowest = jnp.finfo(images.dtype).min
  # NaN is never a maximum.
  images = jnp.where(images > lowest, images, lowest).transpose(0, 2, 3, 1)

  def of_region(operands):
    batch, rows, columns = operands
    # (height, bins, channels), then (bins, bins, channels)
    best, column = _first_maximum(images[batch][:, None], columns[..., None], lowest)
    best, row = _first_maximum(best.swapaxes(0, 1), rows[:, None, :, None], lowest)
    column = jnp.take_along_axis(column.swapaxes(0, 1)[None], row[:, :, None], 2)
    return best, row * extents[1] + column[:, :, 0]

  masks = _region_masks(regions, scale, bins, extents, inclusive=True)
  pooled, index = lax.map(of_region, (regions[:, 0].astype(jnp.int32), *masks))
  pooled, index = jnp.moveaxis(pooled, 3, 1), jnp.moveaxis(index, 3, 1)
  rows, columns = (mask.any(-1)[:, None] for mask in masks)
  is_empty = ~(rows[..., None] & columns[:, :, None])
  index = jnp.where(is_empty | (pooled == lowest), -1, index)
  return jnp.where(is_empty, 0, pooled), index


def _first_maximum(values, mask, lowest):
  """Return the maxima over the last dimension but one, and their first positions."""
  values = jnp.where(mask, values, lowest)
  best = values.max(-2)
  position = jnp.arange(values.shape[-2], dtype=jnp.int32)[:, None]
  # Faster than argmax, which XLA does not vectorize on the CPU.
  return best, jnp.where(values == best[..., None, :], position, len(position)).min(-2)


@op("torchvision::_roi_pool_backward")
def roi_pool_backward(
  grad,
  regions,
  argmax,
  scale,
  pooled_height,
  pooled_width,
  batch_size,
  channels,
  height,
  width,
):
  """Return the gradient of `roi_pool` for the images."""
  batch = regions[:, 0].astype(jnp.int32)[:, None, None, None]
  channel = jnp.arange(channels)[:, None, None]
  grad = jnp.where(argmax >= 0, grad, 0)
  images = jnp.zeros((batch_size, channels, height * width), grad.dtype)
  images = images.at[batch, channel, argmax].add(grad)
  return images.reshape(batch_size, channels, height, width)


def _elements(rows, columns):
  """Return the mask (*bins, height, width) of elements, and counts of at least 1."""
  is_inside = rows[:, None, :, None] & columns[:, None]
  return is_inside, jnp.maximum(is_inside.sum((-1, -2)), 1)


@op("torchvision::ps_roi_pool")
def ps_roi_pool(images, regions, scale, pooled_height, pooled_width):
  """Return the mean of each bin of each region, and the channels that were read.

  Args:
    images: floats of shape (n, channels * pooled_height * pooled_width, height, width).
    regions, scale, pooled_height, pooled_width: see `roi_pool`.

  Returns:
    Floats and int32 indices of shape (k, channels, pooled_height, pooled_width).

  Raises:
    RuntimeError: the number of channels is no multiple of the number of bins.

  References:
    https://docs.pytorch.org/vision/stable/generated/torchvision.ops.ps_roi_pool.html
  """
  bins = (pooled_height, pooled_width)
  require_channels(images, bins)
  extents = images.shape[2:]
  by_bin = images.reshape(len(images), -1, *bins, *extents)
  # torchvision leaves out the last row and column here, and not in the gradient.
  masks = (
    mask & (jnp.arange(extent) < extent - 1)
    for mask, extent in zip(
      _region_masks(regions, scale, bins, extents, inclusive=False), extents
    )
  )

  def of_region(operands):
    batch, rows, columns = operands
    is_inside, count = _elements(rows, columns)
    return jnp.where(is_inside, by_bin[batch], 0).sum((-1, -2)) / count

  pooled = lax.map(of_region, (regions[:, 0].astype(jnp.int32), *masks))
  pooled = pooled.astype(images.dtype)
  return pooled, jnp.broadcast_to(bin_channels(images.shape[1], bins), pooled.shape)


@op("torchvision::_ps_roi_pool_backward")
def ps_roi_pool_backward(
  grad,
  regions,
  channel_mapping,
  scale,
  pooled_height,
  pooled_width,
  batch_size,
  channels,
  height,
  width,
):
  """Return the gradient of `ps_roi_pool` for the images."""
  bins, extents = (pooled_height, pooled_width), (height, width)
  masks = _region_masks(regions, scale, bins, extents, inclusive=False)

  def add_region(images, operands):
    batch, rows, columns, grad = operands
    is_inside, count = _elements(rows, columns)
    share = (grad / count).astype(images.dtype)[..., None, None]
    return images.at[batch].add(jnp.where(is_inside, share, 0)), None

  images = jnp.zeros((batch_size, *grad.shape[1:], *extents), grad.dtype)
  operands = (regions[:, 0].astype(jnp.int32), *masks, grad)
  images, _ = lax.scan(add_region, images, operands)
  return images.reshape(batch_size, channels, *extents)
