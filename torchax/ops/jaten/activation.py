"""Activation functions, softmax, and their backward operations.

Gradients at a kink are torch's, both in the `*_backward` operations and where JAX
differentiates the forward lowering. Hence `where` instead of `maximum`, whose gradient
in JAX is one half at a tie. `sigmoid` and `tanh` are in `pointwise.py`.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from torchax.core import mappings
from torchax.ops.builtin import op
from torchax.ops.jaten import _numbers
from torchax.ops.jaten._arguments import dim_of, require_no_bool
from torchax.ops.promotion import HALVES, in_opmath, promote, widen
from torchax.registry.names import aten

# Klambauer et al. 2017, "Self-Normalizing Neural Networks", equation 14.
SELU_ALPHA = 1.6732632423543772848170429916717
SELU_SCALE = 1.0507009873554804934193349852946
# Cubic coefficient of the tanh approximation: Hendrycks & Gimpel 2016.
GELU_CUBIC = 0.044715


def _clip(self, min_val, max_val):
  return jnp.where(self <= min_val, min_val, jnp.where(self >= max_val, max_val, self))


def _relu6(self):
  return _clip(self, 0, 6)


def _axis(self, dim):
  """Return `dim` counted from the front; None for a 0-d array."""
  axis = dim_of(dim, self.ndim)
  return axis if self.ndim else None


# ---- rectifiers


@op(aten.relu)
def _aten_relu(self):
  require_no_bool("relu", self)
  return jnp.where(self <= 0, jnp.zeros((), self.dtype), self)


@op(aten.relu6)
def _aten_relu6(self):
  return _relu6(self).astype(self.dtype)


@op(aten.threshold)
def _aten_threshold(self, threshold, value):
  return jnp.where(self <= threshold, value, self).astype(self.dtype)


@op(aten.threshold_backward)
def _aten_threshold_backward(grad_output, self, threshold):
  grad_output, self = promote(grad_output, self)
  return jnp.where(self <= threshold, jnp.zeros((), self.dtype), grad_output)


@op(aten.leaky_relu)
@in_opmath
def _aten_leaky_relu(self, negative_slope=0.01):
  return jnp.where(self > 0, self, self * negative_slope)


def _check_leaky_relu_backward(grad_output, self, negative_slope, self_is_result):
  if self_is_result and negative_slope < 0:
    raise RuntimeError(
      "In-place leaky_relu keeps no input to differentiate at when the slope is "
      f"negative, but got {negative_slope}: use the out-of-place variant."
    )


@op(aten.leaky_relu_backward, check=_check_leaky_relu_backward)
@in_opmath
def _aten_leaky_relu_backward(grad_output, self, negative_slope, self_is_result):
  return jnp.where(self > 0, grad_output, grad_output * negative_slope)


@op(aten._prelu_kernel)
@in_opmath
def _aten__prelu_kernel(self, weight):
  """Apply PReLU; `prelu` reshaped `weight` to broadcast against `self`."""
  return jnp.where(self > 0, self, weight * self)


@op(aten._prelu_kernel_backward)
@in_opmath
def _aten__prelu_kernel_backward(grad_output, self, weight):
  grad_self = jnp.where(self > 0, grad_output, weight * grad_output)
  grad_weight = jnp.where(self > 0, 0, self * grad_output)
  return grad_self, grad_weight


@op(aten.prelu)
def _aten_prelu(self, weight):
  """Apply PReLU with one weight, or one per channel (dimension 1)."""
  if weight.size == 1 or self.ndim < 2:
    return _aten__prelu_kernel(self, weight.reshape((-1,) if self.ndim else ()))
  return _aten__prelu_kernel(self, weight.reshape((-1,) + (1,) * (self.ndim - 2)))


@op(aten.hardtanh)
def _aten_hardtanh(self, min_val=-1, max_val=1):
  return _clip(self, min_val, max_val).astype(self.dtype)


@op(aten.hardtanh_backward)
def _aten_hardtanh_backward(grad_output, self, min_val, max_val):
  grad_output, self = promote(grad_output, self)
  outside = (self <= min_val) | (self >= max_val)
  return jnp.where(outside, jnp.zeros((), self.dtype), grad_output)


@op(aten.hardsigmoid)
@in_opmath
def _aten_hardsigmoid(self):
  return _relu6(self + 3) / 6


@op(aten.hardsigmoid_backward)
@in_opmath
def _aten_hardsigmoid_backward(grad_output, self):
  return jnp.where((self > -3) & (self < 3), grad_output / 6, 0)


@op(aten.hardswish)
@in_opmath
def _aten_hardswish(self):
  return self * _relu6(self + 3) / 6


@op(aten.hardswish_backward)
@in_opmath
def _aten_hardswish_backward(grad_output, self):
  inside = grad_output * (self / 3 + 0.5)
  return jnp.where(self <= -3, 0, jnp.where(self < 3, inside, grad_output))


@op(aten.hardshrink)
@in_opmath
def _aten_hardshrink(self, lambd=0.5):
  return jnp.where((self >= -lambd) & (self <= lambd), 0, self)


def _check_softshrink(self, lambd=0.5):
  if lambd < 0:
    raise RuntimeError(f"softshrink expects lambd >= 0, but got {lambd}.")


@op(aten.softshrink, check=_check_softshrink)
@in_opmath
def _aten_softshrink(self, lambd=0.5):
  # `self * 0` instead of 0 propagates NaN.
  inside = self * 0
  return jnp.where(
    self > lambd, self - lambd, jnp.where(self < -lambd, self + lambd, inside)
  )


@op(aten.softshrink_backward, aten.hardshrink_backward)
@in_opmath
def _aten_shrink_backward(grad_output, self, lambd):
  return jnp.where((self >= -lambd) & (self <= lambd), 0, grad_output)


# ---- exponential units


def _elu(self, alpha, scale, input_scale):
  # The unselected branch must be finite: JAX's gradient multiplies it by 0.
  # `<=`, as in torch: the gradient at NaN is the slope of the positive numbers.
  is_negative = self <= 0
  negative = jnp.where(is_negative, self, 0)
  return jnp.where(
    is_negative, scale * alpha * jnp.expm1(negative * input_scale), scale * self
  )


@op(aten.elu)
@in_opmath
def _aten_elu(self, alpha=1, scale=1, input_scale=1):
  return _elu(self, alpha, scale, input_scale)


def _check_elu_backward(
  grad_output, alpha, scale, input_scale, is_result, self_or_result
):
  if is_result and alpha < 0:
    raise RuntimeError(
      "In-place elu keeps no input to differentiate at when alpha is negative, but "
      f"got {alpha}: use the out-of-place variant."
    )


@op(aten.elu_backward, check=_check_elu_backward)
@in_opmath
def _aten_elu_backward(
  grad_output, alpha, scale, input_scale, is_result, self_or_result
):
  is_negative = self_or_result <= 0
  if is_result:
    negative = input_scale * (self_or_result + alpha * scale)
  else:
    exponent = jnp.where(is_negative, self_or_result, 0) * input_scale
    negative = input_scale * alpha * scale * jnp.exp(exponent)
  return grad_output * jnp.where(is_negative, negative, scale)


def _check_celu(self, alpha=1.0):
  if alpha == 0:
    raise RuntimeError("ZeroDivisionError: alpha cannot be 0 for CELU")


def _prepare_celu(arguments: dict) -> None:
  if "alpha" in arguments:
    arguments["alpha"] = (arguments["alpha"], 1 / arguments["alpha"])


@op(aten.celu, check=_check_celu, static=("alpha",), prepare=_prepare_celu)
@in_opmath
def _aten_celu(self, alpha=1.0):
  alpha, inverse = _numbers.parts(alpha)
  return _elu(self, alpha, 1, inverse)


@op(aten.selu)
@in_opmath
def _aten_selu(self):
  return _elu(self, SELU_ALPHA, SELU_SCALE, 1)


@op(aten.softplus)
@in_opmath
def _aten_softplus(self, beta=1, threshold=20):
  scaled = self * beta
  return jnp.where(scaled > threshold, self, jax.nn.softplus(scaled) / beta)


@op(aten.softplus_backward)
@in_opmath
def _aten_softplus_backward(grad_output, self, beta, threshold):
  scaled = self * beta
  return jnp.where(scaled > threshold, grad_output, grad_output * lax.logistic(scaled))


@op(aten.mish)
@in_opmath
def _aten_mish(self):
  return self * jnp.tanh(jax.nn.softplus(self))


@op(aten.mish_backward)
@in_opmath
def _aten_mish_backward(grad_output, self):
  tanh = jnp.tanh(jax.nn.softplus(self))
  slope = tanh + self * lax.logistic(self) * (1 - tanh * tanh)
  return grad_output * slope


@op(aten.log_sigmoid)
@in_opmath
def _aten_log_sigmoid(self):
  return jax.nn.log_sigmoid(self)


@op(aten.log_sigmoid_forward.default)
def _aten_log_sigmoid_forward(self):
  """Return an empty buffer, as CUDA does: the backward pass recomputes from `self`."""
  return _aten_log_sigmoid(self), jnp.zeros((0,), self.dtype)


@op(aten.log_sigmoid_backward)
@in_opmath
def _aten_log_sigmoid_backward(grad_output, self, buffer):
  return grad_output * lax.logistic(-self)


# ---- sigmoid and Gauss units


@op(aten.sigmoid_backward)
@in_opmath
def _aten_sigmoid_backward(grad_output, output):
  return grad_output * jnp.conj((1 - output) * output)


@op(aten.tanh_backward)
@in_opmath
def _aten_tanh_backward(grad_output, output):
  return grad_output * jnp.conj(1 - output * output)


def _logistic(self):
  # Some backends have lax.logistic for real numbers only.
  return 1 / (1 + jnp.exp(-self)) if jnp.iscomplexobj(self) else lax.logistic(self)


@op(aten.silu)
@in_opmath
def _aten_silu(self):
  return self * _logistic(self)


@op(aten.silu_backward)
@in_opmath
def _aten_silu_backward(grad_output, self):
  gate = _logistic(self)
  return grad_output * jnp.conj(gate * (1 + self * (1 - gate)))


def _tanh_argument(self):
  return math.sqrt(2 / math.pi) * (self + GELU_CUBIC * self * self * self)


def _is_tanh(approximate) -> bool:
  if approximate not in ("none", "tanh"):
    raise RuntimeError(
      f"approximate argument must be either none or tanh, but got {approximate!r}."
    )
  return approximate == "tanh"


@op(aten.gelu)
@in_opmath
def _aten_gelu(self, *, approximate="none"):
  if _is_tanh(approximate):
    return 0.5 * self * (1 + jnp.tanh(_tanh_argument(self)))
  return 0.5 * self * (1 + lax.erf(self * math.sqrt(0.5)))


@op(aten.gelu_backward)
@in_opmath
def _aten_gelu_backward(grad_output, self, *, approximate="none"):
  if _is_tanh(approximate):
    tanh = jnp.tanh(_tanh_argument(self))
    inner_slope = math.sqrt(2 / math.pi) * (1 + 3 * GELU_CUBIC * self * self)
    slope = (1 + tanh) + self * (1 - tanh * tanh) * inner_slope
    return grad_output * 0.5 * slope
  distribution = 0.5 * (1 + lax.erf(self * math.sqrt(0.5)))
  density = jnp.exp(-0.5 * self * self) / math.sqrt(2 * math.pi)
  return grad_output * (distribution + self * density)


def _split_gate(self, dim):
  axis = _axis(self, dim)
  return axis, *jnp.split(self, 2, axis=axis)


@op(aten.glu)
@in_opmath
def _aten_glu(self, dim=-1):
  _, value, gate = _split_gate(self, dim)
  return value * lax.logistic(gate)


@op(aten.glu_backward)
@in_opmath
def _aten_glu_backward(grad_output, self, dim):
  axis, value, gate = _split_gate(self, dim)
  sigmoid = lax.logistic(gate)
  grad_value = grad_output * sigmoid
  return jnp.concatenate([grad_value, grad_value * (1 - sigmoid) * value], axis=axis)


# ---- softmax


def _subtract_max(self, axis):
  # `initial` is the maximum of an empty dimension, which is unused.
  peak = jnp.max(self, axis=axis, keepdims=True, initial=-jnp.inf)
  return self - lax.stop_gradient(peak)


def _softmax(self, axis):
  weights = jnp.exp(_subtract_max(self, axis))
  return weights / jnp.sum(weights, axis=axis, keepdims=True)


def _log_softmax(self, axis):
  shifted = _subtract_max(self, axis)
  return shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis=axis, keepdims=True))


def _normalize(function, self, dim, half_to_float):
  wide = half_to_float and self.dtype in HALVES
  self = widen(self) if wide else self
  return in_opmath(function)(self, _axis(self, dim))


def _to_dtype(self, dtype):
  return self if dtype is None else self.astype(mappings.t2j_dtype(dtype))


@op(aten._softmax)
def _aten_softmax(self, dim, half_to_float=False):
  return _normalize(_softmax, self, dim, half_to_float)


@op(aten.softmax)
def _aten_softmax_int(self, dim, dtype=None):
  return _normalize(_softmax, _to_dtype(self, dtype), dim, False)


@op(aten._log_softmax)
def _aten_log_softmax(self, dim, half_to_float=False):
  return _normalize(_log_softmax, self, dim, half_to_float)


@op(aten.log_softmax)
def _aten_log_softmax_int(self, dim, dtype=None):
  return _normalize(_log_softmax, _to_dtype(self, dtype), dim, False)


def _require_same_size(grad_output, output) -> None:
  if grad_output.shape != output.shape:
    raise RuntimeError(
      "Expected tensor for argument #1 'grad' to have same size as tensor for argument "
      f"#2 'output', but got {list(grad_output.shape)} and {list(output.shape)}."
    )


@op(aten._softmax_backward_data)
def _aten__softmax_backward_data(grad_output, output, dim, input_dtype):
  _require_same_size(grad_output, output)
  grad_output, output = widen(grad_output), widen(output)
  weighted = grad_output * output
  total = jnp.sum(weighted, axis=_axis(output, dim), keepdims=True)
  return _to_dtype(weighted - output * total, input_dtype)


@op(aten._log_softmax_backward_data)
def _aten__log_softmax_backward_data(grad_output, output, dim, input_dtype):
  _require_same_size(grad_output, output)
  grad_output, output = widen(grad_output), widen(output)
  total = jnp.sum(grad_output, axis=_axis(output, dim), keepdims=True)
  return _to_dtype(grad_output - jnp.exp(output) * total, input_dtype)
