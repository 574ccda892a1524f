"""Deformable convolution: `torchvision.ops.deform_conv2d`, and its gradient.

The lowerings are registered by name, so torchvision may be missing or imported later.
"""

import itertools

import jax
import jax.numpy as jnp

from torchax.ops.builtin import op
from torchax.ops.jtorchvision_roi import neighbors

# Zeros around the images. A point at -1 is not at the edge of these, where the
# derivative for an offset is another one.
_BEFORE, _AFTER = 2, 1


def _points(offset, kernel, stride, padding, dilation):
  """Return the rows and columns of the samples, of shape (n, groups, kernel, y, x)."""
  batch, _, *outputs = offset.shape
  offset = offset.reshape(batch, -1, *kernel, 2, *outputs)
  points = []
  for dim in range(2):
    tap = jnp.arange(kernel[dim], dtype=offset.dtype) * dilation[dim] - padding[dim]
    output = jnp.arange(outputs[dim], dtype=offset.dtype) * stride[dim]
    tap = tap.reshape((-1, 1, 1, 1) if dim == 0 else (-1, 1, 1))
    output = output.reshape((-1, 1) if dim == 0 else (-1,))
    points.append(offset[:, :, :, :, dim] + (tap + output))
  return points


def _sample(images, points):
  """Return bilinear samples; elements outside of the images are zero.

  Args:
    images: floats of shape (n, groups, channels, height, width).
    points: rows and columns, each of shape (n, groups, ...).

  Returns:
    An array of shape (n, groups, ..., channels).
  """
  images = jnp.pad(images, ((0, 0),) * 3 + ((_BEFORE, _AFTER),) * 2)
  around = [
    neighbors(part + _BEFORE, jnp.full(part.shape, True), extent)
    for part, extent in zip(points, images.shape[3:])
  ]
  channels_last = jnp.moveaxis(images, 2, 4)
  shape = points[0].shape
  batch = jnp.arange(shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
  group = jnp.arange(shape[1]).reshape(-1, *(1,) * (len(shape) - 2))
  corners = itertools.product(*(zip(*dim) for dim in around))
  return sum(
    channels_last[batch, group, row, column] * (row_weight * column_weight)[..., None]
    for (row, row_weight), (column, column_weight) in corners
  )


@op("torchvision::deform_conv2d")
def deform_conv2d(
  input,
  weight,
  offset,
  mask,
  bias,
  stride_h,
  stride_w,
  pad_h,
  pad_w,
  dilation_h,
  dilation_w,
  groups,
  offset_groups,
  use_mask,
):
  """Return a convolution whose samples are moved by offsets and scaled by a mask.

  Args:
    input: floats of shape (n, channels, height, width).
    weight: floats of shape (features, channels // groups, *kernel).
    offset: floats of shape (n, offset_groups * kernel elements * 2, y, x).
    mask: floats of shape (n, offset_groups * kernel elements, y, x), if `use_mask`.
    bias: floats of shape (features,).
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups: as in a
      convolution.
    offset_groups: number of groups of channels that have offsets of their own.
    use_mask: read the mask.

  Returns:
    An array of shape (n, features, y, x).

  References:
    https://docs.pytorch.org/vision/stable/generated/torchvision.ops.deform_conv2d.html
  """
  batch, channels, *extents = input.shape
  features, _, *kernel = weight.shape
  outputs = offset.shape[2:]
  points = _points(
    offset, kernel, (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w)
  )
  samples = _sample(input.reshape(batch, offset_groups, -1, *extents), points)
  if use_mask:
    samples *= mask.reshape(*samples.shape[:-1], 1)
  # (n, offset groups, *kernel, y, x, channels) to (n, groups, channels, *kernel, y, x)
  samples = jnp.moveaxis(samples, -1, 2)
  samples = samples.reshape(batch, groups, -1, *kernel, *outputs)
  weight = weight.reshape(groups, -1, *weight.shape[1:])
  result = jnp.einsum("ngcijyx,gfcij->ngfyx", samples, weight)
  return result.reshape(batch, features, *outputs) + bias[:, None, None]


@op("torchvision::_deform_conv2d_backward")
def deform_conv2d_backward(grad, input, weight, offset, mask, bias, *options):
  """Return the gradients of `deform_conv2d` for its five arrays."""
  arrays = (input, weight, offset, mask, bias)
  _, pullback = jax.vjp(lambda *arrays: deform_conv2d(*arrays, *options), *arrays)
  return pullback(grad)
