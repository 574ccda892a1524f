"""Sampling of images at the points of a grid.

A sample is a weighted sum over a box of elements ("taps"); the weight of a tap is a
product over the dimensions. The gradient is explicit for two reasons: XLA:CPU crashes
on the transposed gather of large volumes, and torch defines its own slopes where a
position is clipped or reflected. Resizing to a fixed size is in `resize.py`.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from torchax.ops import jimage
from torchax.ops.builtin import op
from torchax.registry.names import aten

# ATen's numbers of the modes of `torch.nn.functional.grid_sample`.
_BILINEAR, _NEAREST, _BICUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)


class _Taps(NamedTuple):
  """Taps of one dimension: positions, as floats, and weights, all (taps, *out)."""

  positions: jax.Array
  weights: jax.Array
  slopes: jax.Array  # derivatives of the weights with respect to the grid


# --- positions -------------------------------------------------------------------


def _reflect(position, low, high):
  """Reflect positions into [low, high]; return them and the sign of their slope."""
  span = high - low
  if span <= 0:
    return jnp.zeros_like(position), jnp.zeros_like(position)
  distance = jnp.abs(position - low)
  sign = jnp.where(position < low, -1, 1)
  within = distance % span
  is_even = jnp.floor(distance / span) % 2 == 0
  folded = jnp.where(is_even, within, span - within) + low
  return folded, jnp.where(is_even, sign, -sign).astype(position.dtype)


def _pad(position, size, padding, align_corners):
  """Apply `padding` to positions outside the image; return them and their slope."""
  slope = jnp.ones_like(position)
  if padding == _ZEROS:
    return position, slope
  if padding == _REFLECTION:
    low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
    position, slope = _reflect(position, low, high)
  # In torch the slope at the border itself is zero too.
  is_inside = (position > 0) & (position < size - 1)
  return jnp.clip(position, 0, size - 1), jnp.where(is_inside, slope, 0)


# --- taps of a dimension ---------------------------------------------------------


def _linear_taps(position, slope):
  first = jnp.floor(position)
  share = position - first
  return _Taps(
    jnp.stack([first, first + 1]),
    jnp.stack([1 - share, share]),
    jnp.stack([-slope, slope]),
  )


def _cubic_taps(position, slope, pad):
  """Return the taps of bicubic interpolation; padding applies to them, as in torch."""
  taps = jnp.stack([jnp.floor(position) + step for step in (-1, 0, 1, 2)])
  distance = position - taps
  weights, tangents = jax.jvp(
    jimage.cubic_kernel, (distance,), (jnp.broadcast_to(slope, distance.shape),)
  )
  return _Taps(pad(taps)[0], weights, tangents)


def _taps(share, size, mode, padding, align_corners) -> _Taps:
  """Return the taps for coordinates of one dimension of the grid, from -1 to 1."""
  scale = (size - 1 if align_corners else size) / 2
  start = 0.0 if align_corners else 0.5
  position = (share + 1) * scale - start

  def pad(positions):
    return _pad(positions, size, padding, align_corners)

  if mode == _BICUBIC:
    return _cubic_taps(position, jnp.full_like(position, scale), pad)
  position, slope = pad(position)
  if mode == _NEAREST:
    nearest = jnp.rint(position)[None]
    return _Taps(nearest, jnp.ones_like(nearest), jnp.zeros_like(nearest))
  return _linear_taps(position, slope * scale)


# --- boxes of taps ---------------------------------------------------------------


def _spread(taps, axis, rank):
  """Reshape (taps, *out) to (1, …, taps, …, 1, *out), with the taps at `axis`."""
  box = [1] * rank
  box[axis] = len(taps)
  return taps.reshape(*box, *taps.shape[1:])


def _product(factors):
  rank = len(factors)
  return math.prod(_spread(taps, axis, rank) for axis, taps in enumerate(factors))


def _indices(taps, sizes):
  """Return the indices of a box of flattened elements, and the mask of those inside."""
  indices, is_inside = 0, True
  for axis, (tap, size) in enumerate(zip(taps, sizes)):
    position = _spread(tap.positions, axis, len(taps))
    is_inside &= (position >= 0) & (position < size)
    indices = indices * size + jnp.clip(position, 0, size - 1).astype(jnp.int32)
  return indices, is_inside


def _gather(image, indices):
  """Gather the channels of flattened elements, (*indices, C)."""
  rows = jnp.moveaxis(image, 0, -1).reshape(-1, len(image))
  return jnp.take(rows, indices, 0, mode="clip")


def _weights(taps, is_inside):
  weights = _product([tap.weights for tap in taps])
  return jnp.where(is_inside, weights, 0)[..., None]


# XLA fuses a loop over the taps, and reduces an array of all of them slowly.


def _sample(image, taps):
  """Sample an image (C, *space)."""
  indices, is_inside = _indices(taps, image.shape[1:])
  weights = _weights(taps, is_inside)
  boxes = np.ndindex(*indices.shape[: len(taps)])
  terms = [_gather(image, indices[box]) * weights[box] for box in boxes]
  return jnp.moveaxis(functools.reduce(jnp.add, terms), -1, 0)


def _image_gradient(grad, image, taps):
  channels, *space = image.shape
  indices, is_inside = _indices(taps, space)
  rows = _weights(taps, is_inside) * jnp.moveaxis(grad, 0, -1)
  zeros = jnp.zeros((math.prod(space), channels), rows.dtype)
  sums = zeros.at[indices.ravel()].add(rows.reshape(-1, channels), mode="clip")
  return jnp.moveaxis(sums.reshape(*space, channels), -1, 0)


def _grid_gradient(grad, image, taps):
  """Return the gradient of the points; the last axis is their dims, last dim first."""
  rank = len(taps)
  indices, is_inside = _indices(taps, image.shape[1:])
  grad = jnp.moveaxis(grad, 0, -1)
  boxes = np.ndindex(*indices.shape[:rank])
  elements = [jnp.sum(_gather(image, indices[box]) * grad, -1) for box in boxes]
  elements = jnp.where(is_inside, jnp.stack(elements).reshape(indices.shape), 0)
  slopes = []
  for axis in range(rank):
    factors = [t.slopes if a == axis else t.weights for a, t in enumerate(taps)]
    slopes.append(jnp.sum(elements * _product(factors), range(rank)))
  return jnp.stack(slopes[::-1], -1)


def _map_images(function: Callable, input, grid, mode, padding, align_corners, *more):
  """Apply `function(image, taps, …)` to each image of a batch, in float32 or wider."""
  wide = jnp.promote_types(input.dtype, jnp.float32)

  def of_one(image, points, *rest):
    sizes = image.shape[1:]
    taps = [
      _taps(points[..., dim], size, mode, padding, align_corners)
      for size, dim in zip(sizes, reversed(range(len(sizes))))
    ]
    return function(image, taps, *rest)

  return jax.vmap(of_one)(*(array.astype(wide) for array in (input, grid, *more)))


@op(aten.grid_sampler_2d, aten.grid_sampler_3d)
def _aten_grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners):
  """Sample (N, C, *space) at the points of `grid`, (N, *out, dimensions)."""
  modes = (interpolation_mode, padding_mode, align_corners)
  return _map_images(_sample, input, grid, *modes).astype(input.dtype)


@op(aten.grid_sampler_2d_backward, aten.grid_sampler_3d_backward)
def _aten_grid_sampler_backward(
  grad_output,
  input,
  grid,
  interpolation_mode,
  padding_mode,
  align_corners,
  output_mask,
):
  """Return the gradients of `input`, or None by `output_mask`, and of `grid`."""

  def gradients(image, taps, grad):
    return (
      _image_gradient(grad, image, taps) if output_mask[0] else None,
      _grid_gradient(grad, image, taps),
    )

  modes = (interpolation_mode, padding_mode, align_corners)
  of_input, of_grid = _map_images(gradients, input, grid, *modes, grad_output)
  return (
    of_input.astype(input.dtype) if output_mask[0] else None,
    of_grid.astype(grid.dtype),
  )
