"""Resampling of images by a few taps on each axis, without anti-aliasing.

An output element is a weighted sum of its nearest input elements, one axis after the
other. Positions and weights depend on the sizes alone and are numpy constants. They
are computed in float32 (float64 for a float64 image), as in torch, so ties round to
the same side. `jax_reimplement.py` has the filters that widen when an image shrinks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
  "compute_contribs",
  "cubic_kernel",
  "gather_weights",
  "interpolate_along_axis_bchw",
  "interpolate_bicubic_no_aa",
  "triangle_kernel",
]

# Sharpness of torch's bicubic filter; the other common choice is -0.5 (Keys, 1981).
_CUBIC_A = -0.75


def cubic_kernel(x, a=_CUBIC_A):
  """Evaluate Keys' cubic convolution filter, which is zero from distance 2 on.

  Args:
    x: distances from the sampled point, in elements, of any shape.
    a: the slope at distance 1.

  Returns:
    Weights in the shape of `x`.

  References:
    R. Keys, Cubic convolution interpolation for digital image processing, 1981.
  """
  xp = jnp if isinstance(x, jax.Array) else np
  x = xp.abs(x)
  near = ((a + 2) * x - (a + 3)) * x * x + 1
  far = a * (((x - 5) * x + 8) * x - 4)
  return xp.where(x <= 1, near, xp.where(x < 2, far, 0))


def triangle_kernel(x):
  """Evaluate the filter of linear interpolation: 1 at distance 0, 0 from 1 on."""
  xp = jnp if isinstance(x, jax.Array) else np
  return xp.maximum(0, 1 - xp.abs(x))


def _source_coordinates(in_size, out_size, scale, align_corners, real):
  """Return the input coordinate of each output element, in a numpy dtype."""
  positions = np.arange(out_size, dtype=real)
  if align_corners:
    step = (in_size - 1) / (out_size - 1) if out_size > 1 else 0
    return positions * real(step)
  if isinstance(scale, tuple):
    return (positions + real(0.5)) * jnp.asarray(scale[1], real) - real(0.5)
  return (positions + real(0.5)) * real(1 / scale) - real(0.5)


def compute_contribs(
  in_size,
  out_size,
  scale,
  support=2.0,
  align_corners=False,
  dtype=None,
  *,
  kernel=cubic_kernel,
):
  """Compute the input indices and weights of each output element of an axis.

  Args:
    in_size: length of the axis.
    out_size: length of the resampled axis.
    scale: number of output elements per input element; or a pair of it and its
      reciprocal, which may be traced.
    support: radius of the kernel, which is zero beyond it.
    align_corners: align the first and the last elements; `scale` is unused.
    dtype: dtype of the weights; float32 by default.
    kernel: function from distances to weights.

  Returns:
    Indices and weights, both of shape (out_size, 2 * support). Beyond an edge the
    edge element is repeated.
  """
  real = np.float64 if dtype == np.float64 else np.float32
  position = _source_coordinates(in_size, out_size, scale, align_corners, real)
  taps = np.arange(1 - int(support), 1 + int(support))
  xp = jnp if isinstance(position, jax.Array) else np
  indices = xp.floor(position)[:, None].astype(np.int32) + taps
  weights = kernel(position[:, None] - indices.astype(real))
  return xp.clip(indices, 0, in_size - 1), weights.astype(dtype or np.float32)


def gather_weights(img, idxs, axis):
  """Gather the taps of each output element; the axes of `idxs` replace `axis`."""
  return jnp.take(img, idxs, axis, mode="clip")


def interpolate_along_axis_bchw(img, idxs, weights, axis):
  """Resample one axis of an image.

  Args:
    img: an array of any rank, such as (batch, channels, height, width).
    idxs: indices of input elements, of shape (out_size, taps).
    weights: weights of these elements, of the same shape.
    axis: the axis to resample, a non-negative integer.

  Returns:
    An array whose `axis` has `out_size` elements.
  """
  # Rows of the first axis, one tap after the other: XLA gathers those as blocks.
  rows = jnp.moveaxis(img, axis, 0)
  spread = (-1,) + (1,) * (img.ndim - 1)
  taps = [
    gather_weights(rows, idxs[:, tap], 0) * jnp.reshape(weights[:, tap], spread)
    for tap in range(np.shape(idxs)[1])
  ]
  return jnp.moveaxis(functools.reduce(jnp.add, taps), 0, axis)


def interpolate_bicubic_no_aa(img, out_h, out_w, align_corners=False):
  """Resample an image with torch's bicubic filter.

  Args:
    img: a floating-point array of shape (batch, channels, height, width).
    out_h: new height.
    out_w: new width.
    align_corners: keep the corner pixels at the corners.
  """
  for axis, out_size in ((2, out_h), (3, out_w)):
    in_size = img.shape[axis]
    idxs, weights = compute_contribs(
      in_size, out_size, out_size / in_size, 2.0, align_corners, img.dtype
    )
    img = interpolate_along_axis_bchw(img, idxs, weights, axis)
  return img
