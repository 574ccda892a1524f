"""Quantization-aware training: floats rounded to the grid of an integer dtype.

The gradient passes unchanged inside the range of the grid, and is zero outside of it.
The mask that each operation returns is True inside.
"""

import jax.numpy as jnp
from jax import lax

from torchax.ops.builtin import Kind, op
from torchax.ops.jaten._extrema import highest, lowest
from torchax.ops.promotion import widen
from torchax.registry.names import aten

# Scales below it are raised to it (`kSmallScaleThreshold` of torch's quantization).
_SMALLEST_SCALE = 6.1e-5


def _round_to_grid(self, scale, zero_point, quant_min, quant_max):
  """Return the rounded numbers, and the mask of those inside the range."""
  scale = jnp.asarray(scale).astype(jnp.float32)
  scaled = widen(self) * (1 / scale)
  if jnp.issubdtype(jnp.result_type(zero_point), jnp.inexact):
    numbers = jnp.round(scaled + zero_point)
  else:
    numbers = jnp.round(scaled) + zero_point
  inside = (numbers >= quant_min) & (numbers <= quant_max)
  rounded = (jnp.clip(numbers, quant_min, quant_max) - zero_point) * scale
  # Zero, with the derivative of the result: JAX's derivative of rounding is zero.
  passed = jnp.where(inside, self, 0)
  passed = passed - lax.stop_gradient(passed)
  return lax.stop_gradient(rounded).astype(self.dtype) + passed, inside


@op(aten.fake_quantize_per_tensor_affine_cachemask, dynamic=("zero_point",))
def _aten_fake_quantize_per_tensor_affine_cachemask(
  self, scale, zero_point, quant_min, quant_max
):
  return _round_to_grid(self, scale, zero_point, quant_min, quant_max)


def _is_on(flag):
  return flag.reshape(-1)[0] != 0


def _or_unchanged(flag, self, rounded, inside):
  return jnp.where(_is_on(flag), rounded, self), inside | ~_is_on(flag)


@op(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams)
def _aten__fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
  self, scale, zero_point, fake_quant_enabled, quant_min, quant_max
):
  grid = scale.reshape(()), zero_point.reshape(()).astype(jnp.int32)
  found = _round_to_grid(self, *grid, quant_min, quant_max)
  return _or_unchanged(fake_quant_enabled, self, *found)


@op(aten.fake_quantize_per_channel_affine_cachemask)
def _aten_fake_quantize_per_channel_affine_cachemask(
  self, scale, zero_point, axis, quant_min, quant_max
):
  shape = [1] * self.ndim
  shape[axis] = -1
  grid = scale.reshape(shape), zero_point.reshape(shape)
  return _round_to_grid(self, *grid, quant_min, quant_max)


def _choose_grid(low, high, quant_min, quant_max, is_symmetric):
  """Return the scale and zero point for numbers from `low` to `high`."""
  is_symmetric &= (low < 0) & (high > 0)
  half = (quant_max - quant_min) // 2
  widest = jnp.maximum(jnp.abs(low / -(half + 1)), jnp.abs(high / half))
  low = jnp.where(is_symmetric, widest * -(half + 1), low)
  high = jnp.where(is_symmetric, widest * half, high)
  low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
  scale = (high - low) / (quant_max - quant_min)
  scale = jnp.where((scale == 0) | jnp.isinf(1 / scale), 0.1, scale)
  growth = jnp.maximum(_SMALLEST_SCALE / scale, 1)
  low, high, scale = low * growth, high * growth, scale * growth
  of_low, of_high = quant_min - low / scale, quant_max - high / scale
  error_low = abs(quant_min) - jnp.abs(low / scale)
  error_high = abs(quant_max) - jnp.abs(high / scale)
  zero = jnp.where(error_low < error_high, of_low, of_high)
  zero = jnp.where(is_symmetric, (quant_min + quant_max) / 2, zero)
  return scale, jnp.round(jnp.clip(zero, quant_min, quant_max))


@op(aten._fused_moving_avg_obs_fq_helper_functional)
def _aten__fused_moving_avg_obs_fq_helper_functional(
  self,
  observer_on,
  fake_quant_on,
  running_min,
  running_max,
  scale,
  zero_point,
  averaging_const,
  quant_min,
  quant_max,
  ch_axis,
  per_row_fake_quant=False,
  symmetric_quant=False,
):
  """Average the range of the input, and round to its grid, as the flags say."""
  if per_row_fake_quant and ch_axis != 0:
    raise NotImplementedError(
      "fused_moving_avg_obs_fake_quant rounds per channel along dimension 0 alone, but "
      f"got ch_axis={ch_axis}."
    )
  axes = tuple(range(int(per_row_fake_quant), self.ndim))
  if per_row_fake_quant and not running_min.size:
    running_min = jnp.full(self.shape[:1], jnp.inf, running_min.dtype)
    running_max = -running_min
    scale, zero_point = (jnp.ones(self.shape[:1], t.dtype) for t in (scale, zero_point))

  def averaged(running, found):
    found = found.reshape(running.shape)
    mixed = running + averaging_const * (found - running)
    mixed = jnp.where(jnp.isinf(running), found, mixed).astype(running.dtype)
    return jnp.where(_is_on(observer_on), mixed, running)

  running_min = averaged(running_min, lowest(self, axes))
  running_max = averaged(running_max, highest(self, axes))
  grid = _choose_grid(running_min, running_max, quant_min, quant_max, symmetric_quant)
  scale, zero_point = (
    jnp.where(_is_on(fake_quant_on), new.reshape(old.shape).astype(old.dtype), old)
    for new, old in zip(grid, (scale, zero_point))
  )
  shape = (-1, *[1] * (self.ndim - 1)) if per_row_fake_quant else ()
  grid = scale.reshape(shape), zero_point.reshape(shape)
  found = _round_to_grid(self, *grid, quant_min, quant_max)
  found = _or_unchanged(fake_quant_on, self, *found)
  return *found, running_min, running_max, scale, zero_point


@op(aten._fused_moving_avg_obs_fq_helper.default, kind=Kind.TENSORS)
def _aten__fused_moving_avg_obs_fq_helper(
  self, observer_on, fake_quant_on, running_min, running_max, scale, zero_point, *rest
):
  """Write the new range and grid to the caller's tensors; return output and mask."""
  states = running_min, running_max, scale, zero_point
  output, mask, *new = aten._fused_moving_avg_obs_fq_helper_functional(
    self, observer_on, fake_quant_on, *states, *rest
  )
  for old, value in zip(states, new):
    if old.shape != value.shape:
      old.resize_(value.shape)
    old.copy_(value)
  return output, mask
