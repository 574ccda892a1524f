"""Resampling of one axis with filters that can widen (anti-aliasing).

An axis is multiplied by a matrix of weights, computed from scale and translation, which
may be traced. `jaten/resize.py` and programs written for google/torchax call it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torchax.ops.jimage import cubic_kernel, triangle_kernel

__all__ = ["KERNELS", "apply_weight_mat", "compute_weight_mat", "scale_and_translate"]


def _lanczos3(x):
  return jnp.where(jnp.abs(x) < 3, jnp.sinc(x) * jnp.sinc(x / 3), 0)


KERNELS = {
  "linear": triangle_kernel,
  # torch's anti-aliased bicubic filter is Pillow's, with a = -0.5.
  "cubic": functools.partial(cubic_kernel, a=-0.5),
  "lanczos3": _lanczos3,
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


# google/torchax has a copy of JAX's function under this name.
scale_and_translate = jax.image.scale_and_translate
