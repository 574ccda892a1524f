"""Resizing of images.

Shapes are (batch, channels, *space). Half precision is computed in float32, uint8 is
rounded. Resampling is linear in the image, so each backward is a transpose. The filters
are in `ops/jimage.py` and `ops/jax_reimplement.py`, sampling at a grid of points in
`grid_sample.py`.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax.ops import jax_reimplement, jimage
from torchax.ops.builtin import op
from torchax.ops.jaten import _numbers
from torchax.registry.names import aten

# ATen's names of the scales for 1, 2 and 3 spatial dimensions.
_SCALE_NAMES = {
  1: ("scales",),
  2: ("scales_h", "scales_w"),
  3: ("scales_d", "scales_h", "scales_w"),
}

_NAMES = ("scales", "scales_d", "scales_h", "scales_w")


def _check_image(self, *args, **kwargs):
  if not self.dtype.is_floating_point and self.dtype is not torch.uint8:
    raise NotImplementedError(
      f"Resizing is not implemented for {self.dtype}: expected an image of a "
      "floating-point dtype or of torch.uint8. Convert it first."
    )


_SCALES: dict = {
  "static": _NAMES,
  "prepare": _numbers.scales(_NAMES),
  "check": _check_image,
}


def _scales(self, positional, named):
  """Return the given scale of each spatial dimension, or None."""
  names = _SCALE_NAMES[self.ndim - 2]
  arguments = dict(zip(names, positional)) | named
  return [arguments.get(name) for name in names]


def _scale(in_size, out_size, scale):
  """Return the output elements per input element; a prepared scale stays a pair."""
  if isinstance(scale, tuple):
    return scale
  return scale if scale is not None and scale > 0 else out_size / in_size


def _check_sizes(self, output_size):
  if len(output_size) != self.ndim - 2 or min(*output_size, *self.shape[1:]) <= 0:
    raise RuntimeError(
      f"Resizing expects an image (N, C, …) and a positive size for each spatial "
      f"dimension, but got shape {self.shape} and output_size={output_size}."
    )


def _in_float(resample):
  """Make a resampling compute in at least float32 and return the image's dtype."""

  @functools.wraps(resample)
  def with_float_image(self, *args, **kwargs):
    dtype = self.dtype
    if not jnp.issubdtype(dtype, jnp.integer):
      wide = jnp.promote_types(dtype, jnp.float32)
      return resample(self.astype(wide), *args, **kwargs).astype(dtype)
    resized = jnp.rint(resample(self.astype(jnp.float32), *args, **kwargs))
    limits = jnp.iinfo(dtype)
    return jnp.clip(resized, limits.min, limits.max).astype(dtype)

  return with_float_image


def _scale_size(size, factor: float):
  """Multiply a size by a factor; a symbolic size needs an integral factor."""
  return size * int(factor) if factor == int(factor) else math.floor(size * factor)


def _resampling(*names):
  """Register a lowering for ATen's operations, their `vec` overloads and backwards."""
  packets = [getattr(aten, name) for name in names]
  gradients = [getattr(aten, f"{name}_backward") for name in names]

  def register(lowering):
    op(*(packet.default for packet in packets), **_SCALES)(lowering)

    @op(*(packet.vec for packet in packets), static=("scale_factors",))
    def resize_by(input, output_size, *options):
      *align_corners, factors = options
      if output_size is None:
        output_size = list(map(_scale_size, input.shape[2:], factors))
      return lowering(input, output_size, *align_corners, *(factors or ()))

    @op(*(packet.default for packet in gradients), **_SCALES)
    def backward(grad_output, output_size, input_size, *args, **kwargs):
      image = jax.ShapeDtypeStruct(tuple(input_size), grad_output.dtype)
      transpose = jax.linear_transpose(
        lambda x: _in_float(lowering)(x, output_size, *args, **kwargs), image
      )
      return transpose(grad_output)[0]

    return lowering

  return register


# --- Nearest ---------------------------------------------------------------------


def _nearest_indices(in_size, out_size, scale, offset):
  """Return input indices, computed in float32, since torch's rounding decides ties.

  They are traced if the scale is.
  """
  if isinstance(scale, tuple):
    indices = jnp.arange(out_size, dtype=np.float32) + offset
    indices = jnp.floor(indices * jnp.asarray(scale[1], np.float32))
    return jnp.minimum(indices.astype(np.int32), in_size - 1)
  step = np.float32(1 / _scale(in_size, out_size, scale))
  if scale is None:
    step = np.float32(in_size) / np.float32(out_size)
  indices = np.floor((np.arange(out_size, dtype=np.float32) + offset) * step)
  return np.minimum(indices.astype(np.int64), in_size - 1)


def _take_indices(self, indices, axis):
  size = self.shape[axis]
  factor = len(indices) // size
  is_known = isinstance(indices, np.ndarray) and len(indices) == factor * size
  if is_known and (indices == np.arange(len(indices)) // factor).all():
    return jnp.repeat(self, factor, axis)  # no gather, and a sum as its transpose
  return jnp.take(self, indices, axis, mode="clip")


def _nearest(self, output_size, scales, offset):
  _check_sizes(self, output_size)
  for axis, (out_size, scale) in enumerate(zip(output_size, scales), 2):
    indices = _nearest_indices(self.shape[axis], out_size, scale, np.float32(offset))
    self = _take_indices(self, indices, axis)
  return self


@_resampling("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
def _aten_upsample_nearest(self, output_size, *scales, **named_scales):
  return _nearest(self, output_size, _scales(self, scales, named_scales), 0.0)


@_resampling(
  "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"
)
def _aten_upsample_nearest_exact(self, output_size, *scales, **named_scales):
  """Resize by the input element nearest to the centre of each output element."""
  return _nearest(self, output_size, _scales(self, scales, named_scales), 0.5)


# --- Linear and cubic ------------------------------------------------------------

_LINEAR, _CUBIC = jimage.triangle_kernel, jimage.cubic_kernel


def _interpolate(self, output_size, scales, align_corners, kernel, support):
  _check_sizes(self, output_size)
  for axis, (out_size, scale) in enumerate(zip(output_size, scales), 2):
    in_size = self.shape[axis]
    if in_size == out_size and (scale in (None, 1.0) or kernel is not _CUBIC):
      continue  # torch's linear kernels ignore the scale here, its cubic one does not
    indices, weights = jimage.compute_contribs(
      in_size,
      out_size,
      _scale(in_size, out_size, scale),
      support,
      align_corners,
      self.dtype,
      kernel=kernel,
    )
    self = jimage.interpolate_along_axis_bchw(self, indices, weights, axis)
  return self


@_resampling("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
@_in_float
def _aten_upsample_linear(self, output_size, align_corners, *scales, **named_scales):
  scales = _scales(self, scales, named_scales)
  return _interpolate(self, output_size, scales, align_corners, _LINEAR, 1)


@_resampling("upsample_bicubic2d")
@_in_float
def _aten_upsample_bicubic2d(
  self, output_size, align_corners, scales_h=None, scales_w=None
):
  scales = (scales_h, scales_w)
  return _interpolate(self, output_size, scales, align_corners, _CUBIC, 2)


# --- Anti-aliased ----------------------------------------------------------------


def _resize_antialiased(self, output_size, align_corners, scales, method):
  """Resize with anti-aliasing; `align_corners` changes the scale only, as in torch.

  It does not move the first sample.
  """
  _check_sizes(self, output_size)
  kernel = jax_reimplement.KERNELS[method]
  for axis, (out_size, scale) in enumerate(zip(output_size, scales), 2):
    in_size = self.shape[axis]
    if in_size == out_size:
      continue
    factor = _scale(in_size, out_size, scale)
    if isinstance(factor, tuple):
      factor, _ = factor
    if align_corners:
      both_long = min(in_size, out_size) > 1
      factor = (out_size - 1) / (in_size - 1) if both_long else math.inf
    weights = jax_reimplement.compute_weight_mat(
      in_size, out_size, factor, 0.0, kernel, True, extrapolate=True
    )
    self = jax_reimplement.apply_weight_mat(self, weights, axis)
  return self


@_resampling("_upsample_bilinear2d_aa")
@_in_float
def _aten_upsample_billinear_aa(
  self, output_size, align_corners, scales_h=None, scales_w=None
):
  scales = (scales_h, scales_w)
  return _resize_antialiased(self, output_size, align_corners, scales, "linear")


@_resampling("_upsample_bicubic2d_aa")
@_in_float
def _aten_upsample_bicubic2d_aa(
  self, output_size, align_corners, scales_h=None, scales_w=None
):
  scales = (scales_h, scales_w)
  return _resize_antialiased(self, output_size, align_corners, scales, "cubic")


@_resampling("_upsample_lanczos2d_aa")
@_in_float
def _aten_upsample_lanczos2d_aa(
  self, output_size, align_corners, scales_h=None, scales_w=None
):
  scales = (scales_h, scales_w)
  return _resize_antialiased(self, output_size, align_corners, scales, "lanczos3")
