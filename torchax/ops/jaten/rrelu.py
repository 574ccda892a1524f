"""Randomized leaky ReLU: in training, each negative number gets its own random slope.

The backward pass needs the slopes. Most variants write them to `noise`;
`rrelu_with_noise_functional` returns them, and the other variants call it. Without
training, the slope is the mean of the bounds and nothing is drawn.
"""

import math

import jax.numpy as jnp

from torchax.core.static_values import StaticValue
from torchax.ops.builtin import Kind, op
from torchax.ops.jaten._random_checks import require_float
from torchax.ops.promotion import in_opmath
from torchax.registry.names import aten
from torchax.rng import samplers

_FUNCTIONAL = aten.rrelu_with_noise_functional.default


def _check_rrelu(self, noise, lower=1 / 8, upper=1 / 3, *args, **_):
  if self.shape != noise.shape:
    raise RuntimeError(
      f"noise tensor shape must match self tensor shape. Got self.shape = "
      f"{list(self.shape)} noise.shape = {list(noise.shape)}"
    )
  for name, bound in (("lower", lower), ("upper", upper)):
    if not math.isfinite(bound):
      raise RuntimeError(f"rrelu: {name} bound must be finite, got {bound}")
  if lower > upper:
    raise RuntimeError(
      f"Lower bound should be less than or equal to the upper bound, but got {lower} "
      f"and {upper}."
    )


@op(_FUNCTIONAL, kind=Kind.SAMPLER, check=_check_rrelu)
def _aten_rrelu_with_noise_functional(
  key, self, noise, lower=1 / 8, upper=1 / 3, training=False
):
  """Return the result and the slopes, 1 for positive numbers.

  Without training, return `noise` for the slopes.
  """
  require_float("rrelu", self.dtype)
  if not training:
    slope = jnp.asarray((lower + upper) / 2, self.dtype)
    return jnp.where(self > 0, self, self * slope), noise
  drawn = samplers.uniform(key, self.shape, self.dtype, lower, upper)
  slopes = jnp.where(self <= 0, drawn, 1)
  return self * slopes, slopes.astype(noise.dtype)


# If the bounds are closer than this, torch uses their mean as the only slope.
LEAST_WIDTH = 1e-6


def _prepare_bounds(arguments: dict) -> None:
  """Put the mean of the bounds into `lower`; into `upper`, True if any was drawn."""
  lower, upper = arguments["lower"], arguments["upper"]
  is_drawn = arguments["training"] and upper - lower > LEAST_WIDTH
  arguments["lower"] = (lower + upper) / 2
  arguments["upper"] = StaticValue(is_drawn)


@op(
  aten.rrelu_with_noise_backward,
  static=("lower", "upper"),
  prepare=_prepare_bounds,
)
@in_opmath
def _aten_rrelu_with_noise_backward(
  grad_output, self, noise, lower, upper, training, self_is_result
):
  """Multiply by the slopes; see `_prepare_bounds` for prepared bounds."""
  is_drawn, slope = upper, lower
  if not isinstance(upper, bool):
    is_drawn, slope = training and upper - lower > LEAST_WIDTH, (lower + upper) / 2
  if is_drawn:
    return grad_output * noise
  return jnp.where(self > 0, grad_output, grad_output * slope)


@op(aten.rrelu_with_noise.default, kind=Kind.TENSORS)
def _aten_rrelu_with_noise(
  self, noise, lower=1 / 8, upper=1 / 3, training=False, generator=None
):
  if not training:
    _check_rrelu(self, noise, lower, upper)
    return aten.leaky_relu(self, (lower + upper) / 2)
  result, slopes = _FUNCTIONAL(self, noise, lower, upper, True, generator)
  noise.copy_(slopes)
  return result


@op(aten.rrelu_with_noise_.default, kind=Kind.TENSORS)
def _aten_rrelu_with_noise_(self, noise, *args):
  return self.copy_(_aten_rrelu_with_noise(self, noise, *args))


@op(aten.rrelu_with_noise.out, kind=Kind.TENSORS)
def _aten_rrelu_with_noise_out(self, noise, *args, out):
  return out.copy_(_aten_rrelu_with_noise(self, noise, *args))
