"""Sums, products, quotients and powers of elements.

Operands are promoted by torch's rules first, so each JAX function gets arrays of one
dtype.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from torchax.ops.builtin import op
from torchax.ops.casting import convert
from torchax.ops.jaten import _complex, _numbers, _on_host
from torchax.ops.jaten._arguments import factor_in, require_factor
from torchax.ops.promotion import (
  in_float32,
  is_exact,
  is_tensor,
  promote,
  promote_to_float,
  result_dtype,
  widen,
  with_exact_numbers,
)
from torchax.registry.names import aten


def _times_alpha(value: jax.Array, factor) -> jax.Array:
  """Return `factor * value` in the dtype of `value`; a factor 1 costs nothing."""
  require_factor("alpha", value.dtype, factor)
  if isinstance(factor, int) and factor == 1:
    return value
  return value * factor_in(value.dtype, factor)


# --- Sums and products --------------------------------------------------------------


@op(aten.add, on_host=_on_host.POINTWISE["add"])
def _aten_add(self, other, alpha=1):
  left, right = promote(self, other)
  return left + _times_alpha(right, alpha)


@op(aten.sub, on_host=_on_host.POINTWISE["sub"])
def _aten_sub(self, other, alpha=1):
  if jnp.result_type(self) == jnp.bool_ or jnp.result_type(other) == jnp.bool_:
    raise NotImplementedError(
      "Subtraction with a bool tensor is not supported. Use `^` or `logical_not()`, or "
      "convert the bool tensor first."
    )
  left, right = promote(self, other)
  return left - _times_alpha(right, alpha)


@op(aten.rsub)
def _aten_rsub(self, other, alpha=1):
  return _aten_sub(other, self, alpha)


@op(aten.mul, on_host=_on_host.POINTWISE["mul"])
def _aten_mul(self, other):
  return with_exact_numbers(jnp.multiply)(self, other)


@op(aten.neg, aten.negative, on_host=_on_host.POINTWISE["neg"])
def _aten_neg(self):
  return -self


@op(aten.addcmul)
def _aten_addcmul(self, tensor1, tensor2, value=1):
  dtype = result_dtype(self, tensor1, tensor2)
  start, left, right = (convert(array, dtype) for array in (self, tensor1, tensor2))

  def add(start, left, right):
    return start + left * right * factor_in(left.dtype, value)

  return in_float32(add)(start, left, right)


@op(aten.addcdiv)
def _aten_addcdiv(self, tensor1, tensor2, value=1):
  if is_exact(tensor1) and is_exact(tensor2):
    raise RuntimeError(
      "Integer division with addcdiv is not supported. Use (input + value * "
      "torch.trunc(tensor1 / tensor2)) or convert the tensors to a floating dtype."
    )
  start, left, right = promote(self, tensor1, tensor2)

  def add(start, left, right):
    return start + left / right * factor_in(left.dtype, value)

  return in_float32(add)(start, left, right)


@in_float32
def _lerp(start, end, weight):
  # Interpolating from the nearer end makes both ends exact.
  span = end - start
  near_start = jnp.abs(weight) < 0.5
  return jnp.where(near_start, start + weight * span, end - span * (1 - weight))


@op(aten.lerp)
def _aten_lerp(self, end, weight):
  if is_exact(self):
    raise NotImplementedError(
      f"lerp expects floating-point tensors, but got {self.dtype}. Call `.float()`."
    )
  start, end = promote(self, end)
  dtype = start.dtype if is_tensor(weight) else widen(start).dtype
  return _lerp(start, end, factor_in(dtype, weight))


# --- Division -----------------------------------------------------------------------


@in_float32
def _floor_divide_floats(numerator, denominator):
  """Round the exact quotient down, as Python's float `//`; x / 0 is not NaN.

  Uses an exact remainder, since floor(a / b) is wrong if a / b rounds up to an integer.
  """
  remainder = jnp.fmod(numerator, denominator)
  quotient = (numerator - remainder) / denominator
  borrow = (remainder != 0) & ((denominator < 0) != (remainder < 0))
  quotient = jnp.round(jnp.where(borrow, quotient - 1, quotient))
  plain = numerator / denominator
  signed_zero = jnp.copysign(jnp.zeros_like(plain), plain)
  quotient = jnp.where(quotient == 0, signed_zero, quotient)
  return jnp.where(denominator == 0, plain, quotient)


def _reject_bools(name, array):
  """Raise NotImplementedError for bools, as torch does; JAX would return integers."""
  if array.dtype == jnp.bool_:
    raise NotImplementedError(
      f"{name} is not implemented for bools. Convert one operand with `.int()` first."
    )


def quotient(numerator, denominator):
  """Divide floats, and round once.

  XLA would multiply by the rounded reciprocal of a broadcast denominator.
  """
  return _divide_once(
    numerator, jnp.asarray(denominator, jnp.finfo(numerator.dtype).dtype)
  )


@jax.custom_jvp
def _divide_once(numerator, denominator):
  is_number = numerator == numerator
  return numerator / jnp.where(is_number, denominator, numerator)


@_divide_once.defjvp
def _divide_once_jvp(primals, tangents):
  """Differentiate the division itself: where it is NaN, its derivative is not."""
  _, tangent = jax.jvp(jnp.divide, primals, tangents)
  return _divide_once(*primals), tangent


# In float32: XLA multiplies by the reciprocal of a broadcast divisor, which float16 may
# lack.
_divide_floats = in_float32(jnp.divide)


def _divide(left, right):
  if is_exact(result_dtype(left, right)):
    return _divide_floats(*promote_to_float(left, right))
  return with_exact_numbers(_divide_floats)(left, right)


@with_exact_numbers
def _floor_divide(left, right):
  if is_exact(left):
    return jnp.floor_divide(left, right)
  return _floor_divide_floats(left, right)


@with_exact_numbers
def _truncating_divide(left, right):
  if is_exact(left):
    return lax.div(*jnp.broadcast_arrays(left, right))
  return in_float32(lambda a, b: jnp.trunc(quotient(a, b)))(left, right)


_ROUNDED_DIVISIONS = {"floor": _floor_divide, "trunc": _truncating_divide}


@op(aten.div, aten.divide, aten.true_divide, on_host=_on_host.POINTWISE["div"])
def _aten_div(self, other, rounding_mode=None):
  """Divide; the quotient of integers is a float unless there is a rounding mode."""
  if rounding_mode is None:
    return _divide(self, other)
  # A step function: in torch its derivative is 0 everywhere, also at the steps.
  return lax.stop_gradient(_ROUNDED_DIVISIONS[rounding_mode](self, other))


@op(aten.floor_divide)
def _aten_floor_divide(self, other):
  return _floor_divide(self, other)


@op(aten.remainder)
def _aten_remainder(self, other):
  """Return the remainder with the sign of the divisor, as in Python."""
  left, right = promote(self, other)
  _reject_bools("remainder", left)
  return in_float32(jnp.remainder)(left, right)


@op(aten.fmod)
def _aten_fmod(self, other):
  """Return the remainder with the sign of the dividend, as in C."""
  left, right = promote(self, other)
  _reject_bools("fmod", left)
  return in_float32(jnp.fmod)(left, right)


# --- Powers -------------------------------------------------------------------------


def float_power(base, exponent):
  """Raise floats or complex numbers of one dtype to powers; 0 ** positive is 0."""
  if not (jnp.iscomplexobj(base) or jnp.iscomplexobj(exponent)):
    return jnp.power(base, exponent)
  # XLA's complex power has two factors, which may overflow or underflow.
  is_zero = (base == 0) & (exponent.real > 0)
  power = _complex.exp(exponent * jnp.log(jnp.where(is_zero, 1, base)))
  return jnp.where(is_zero, 0, power)


def _integer_power(base, exponent):
  """Raise integers to non-negative powers, modulo 2 to the number of bits, by squaring.

  `jnp.power` ignores all but the lowest six bits of the exponent.
  """
  base, exponent = jnp.broadcast_arrays(base, exponent)
  bits = jnp.iinfo(exponent.dtype).bits

  def times(bit, powers):
    power, square = powers
    has_bit = (exponent >> bit.astype(exponent.dtype)) & 1
    return jnp.where(has_bit, power * square, power), square * square

  return lax.fori_loop(0, bits, times, (jnp.ones_like(base), base))[0]


def _power(base, exponent):
  """Compute powers in one dtype; a negative power of an integer truncates to 0."""
  if not is_exact(base):
    return in_float32(float_power)(base, exponent)
  if jnp.issubdtype(base.dtype, jnp.unsignedinteger):
    return _integer_power(base, exponent)
  power = _integer_power(base, jnp.maximum(exponent, 0))
  sign = jnp.where(exponent % 2 == 0, 1, base).astype(base.dtype)
  inverse = jnp.where(jnp.abs(base) == 1, sign, 0).astype(base.dtype)
  return jnp.where(exponent < 0, inverse, power)


@op(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def _aten_pow(self, exponent):
  dtype = result_dtype(self, exponent)
  if dtype == jnp.bool_:
    return jnp.logical_or(self, jnp.logical_not(exponent))
  return _power(convert(self, dtype), convert(exponent, dtype))


# Exponents that torch computes by products and roots instead of `pow`; `_numbers.power`
# has the same list.
_SIMPLE_POWERS = {
  0.5: _complex.sqrt,
  1: lambda x: x,
  2: jnp.square,
  3: lambda x: x * x * x,
  -0.5: _complex.rsqrt,
  -1: jnp.reciprocal,
  -2: lambda x: jnp.reciprocal(jnp.square(x)),
}


@op(aten.pow.Tensor_Scalar, prepare=_numbers.power, **_on_host.POWER)
def _aten_pow_scalar(self, exponent):
  dtype = result_dtype(self, exponent)
  base = lax.convert_element_type(self, dtype)
  is_known = not isinstance(exponent, jax.Array)
  if is_known and is_exact(base) and exponent < 0:
    raise RuntimeError("Integers to negative integer powers are not allowed.")
  if is_known and exponent in _SIMPLE_POWERS:
    return in_float32(_SIMPLE_POWERS[exponent])(base)
  if is_exact(base):  # int32 arithmetic is exact modulo 2**8 and 2**16 as well
    power = lax.integer_pow if is_known else _integer_power
    return power(base.astype(jnp.promote_types(dtype, "int32")), exponent).astype(dtype)
  return in_float32(lambda x: float_power(x, jnp.asarray(exponent, x.dtype)))(base)


@op(aten.ldexp)
def _aten_ldexp(self, other):
  """Multiply by 2.0 ** other; two integers give a float."""
  dtype = result_dtype(self, other, 2.0)
  exponents = (other,)
  if is_exact(other):
    # The power itself may be too large or too small for the dtype.
    limit = -3 * int(jnp.finfo(jnp.promote_types(dtype, "float32")).minexp)
    exponent = other.astype(jnp.promote_types(other.dtype, "int32"))
    exponent = jnp.clip(exponent, -limit, limit)
    third, rest = exponent // 3, exponent - exponent // 3
    exponents = (third, rest // 2, rest - rest // 2)

  def product(value, *exponents):
    return math.prod(map(_complex.exp2, exponents), start=value)

  # Rounding the powers to half precision would lose half of the digits.
  operands = [array.astype(dtype) for array in (self, *exponents)]
  return in_float32(product)(*operands)
