"""Scaling and translation of arrays, with filters that can widen (anti-aliasing).

It has the semantics of `jax.image.scale_and_translate`: each axis is multiplied by a
matrix of weights, computed from scale and translation. Both may be traced. The callers
are `jaten/resize.py` and programs written for google/torchax.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from torchax.ops.jimage import cubic_kernel, triangle_kernel

__all__ = ["KERNELS", "apply_weight_mat", "compute_weight_mat", "scale_and_translate"]


def _lanczos(radius):
  def kernel(x):
    inside = jnp.sinc(x) * jnp.sinc(x / radius)
    return jnp.where(jnp.abs(x) < radius, inside, 0)

  return kernel


# torch's anti-aliased bicubic filter is Pillow's, with a = -0.5.
_keys = functools.partial(cubic_kernel, a=-0.5)

KERNELS = {
  "linear": triangle_kernel,
  "bilinear": triangle_kernel,
  "trilinear": triangle_kernel,
  "triangle": triangle_kernel,
  "cubic": _keys,
  "bicubic": _keys,
  "tricubic": _keys,
  "lanczos3": _lanczos(3),
  "lanczos5": _lanczos(5),
}


def compute_weight_mat(
  input_size: int | Any,
  output_size: int | Any,
  scale,
  translation,
  kernel: Callable,
  antialias: bool,
  *,
  extrapolate: bool = False,
):
  """Compute the weight of each input element in each output element of an axis.

  Args:
    input_size: length of the axis.
    output_size: length of the resampled axis.
    scale: number of output elements per input element.
    translation: position of the input's start in the output, in output elements.
    kernel: function from distances in input elements to weights.
    antialias: widen the kernel if the axis shrinks.
    extrapolate: also weight output elements outside of the input, by the input
      elements within reach of the kernel.

  Returns:
    A float array of shape (input_size, output_size). Each column sums to 1, or to 0
    if its output element is outside of the input.
  """
  scale = jnp.asarray(scale, jnp.promote_types(jnp.result_type(scale), jnp.float32))
  width = jnp.maximum(1 / scale, 1) if antialias else 1
  centre = (jnp.arange(output_size) + 0.5 - translation) / scale
  distance = (jnp.arange(input_size)[:, None] + 0.5 - centre) / width
  weights = kernel(distance)
  total = jnp.sum(weights, 0, keepdims=True)
  is_covered = jnp.abs(total) > 1000 * jnp.finfo(weights.dtype).eps
  weights = weights / jnp.where(is_covered, total, 1)
  is_inside = extrapolate | ((centre >= 0) & (centre <= input_size))
  return jnp.where(is_covered & is_inside, weights, 0)


def apply_weight_mat(x, weights, axis: int, precision=lax.Precision.HIGHEST):
  """Multiply one axis by weights of shape (input_size, output_size)."""
  weights = weights.astype(x.dtype)
  resized = lax.dot_general(x, weights, (((axis,), (0,)), ((), ())), precision)
  return jnp.moveaxis(resized, -1, axis)


def scale_and_translate(
  image,
  shape: Sequence[int | Any],
  spatial_dims: Sequence[int],
  scale,
  translation,
  method: str,
  antialias: bool = True,
  precision=lax.Precision.HIGHEST,
):
  """Resample some axes of an image at `(i + 0.5 - translation) / scale`.

  Args:
    image: an array of any rank; integers are converted to float32.
    shape: the shape of the result.
    spatial_dims: the axes to resample; the other axes keep their sizes.
    scale: number of output elements per input element, for each resampled axis.
    translation: position of the input's start in the output, for each resampled axis.
    method: linear, cubic, lanczos3 or lanczos5, or another name that jax.image has
      for one of these.
    antialias: widen the filter on axes that shrink.
    precision: precision of the matrix products.

  Returns:
    A floating-point array of the given shape; zero outside of the image.

  Raises:
    ValueError: the method is unknown, or `shape` and `image` differ in rank.
  """
  if method not in KERNELS:
    raise ValueError(
      f"scale_and_translate expects a method of {', '.join(KERNELS)}, but got "
      f"{method!r}."
    )
  if len(shape) != image.ndim:
    raise ValueError(
      f"scale_and_translate expects a shape of rank {image.ndim}, but got {shape}."
    )
  if not jnp.issubdtype(image.dtype, jnp.inexact):
    image = image.astype(jnp.float32)
  kernel = KERNELS[method]
  for index, dim in enumerate(spatial_dims):
    axis = dim % image.ndim
    weights = compute_weight_mat(
      image.shape[axis],
      shape[axis],
      scale[index],
      translation[index],
      kernel,
      antialias,
    )
    image = apply_weight_mat(image, weights, axis, precision)
  return image
