"""Elementwise arithmetic, comparison, rounding, exponentials and trigonometry.

Operands are promoted by torch's rules before JAX sees them, so the JAX function always
gets arrays of one dtype. Thin operators are rows of a table; those whose meaning
differs between torch and JAX are functions with the reason in their docstring.
Bits are in `bitwise.py`, the gamma and Bessel families in `special.py`, activations
and `threshold` in `activation.py`.
"""

import functools
import math
import sys

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torchax.core import mappings
from torchax.core.static_values import StaticValue
from torchax.errors import WrongDtypeError
from torchax.ops.builtin import op
from torchax.ops.casting import cast, convert, require_fit
from torchax.ops.jaten import _numbers, _on_host
from torchax.ops.jaten._arguments import factor_in, require_one_dtype
from torchax.ops.promotion import promote, result_dtype, to_float
from torchax.registry.names import aten

HALF_DTYPES = (jnp.bfloat16, jnp.float16)


def _is_complex(value) -> bool:
  return jnp.issubdtype(jnp.result_type(value), jnp.complexfloating)


def _is_floating(value) -> bool:
  return jnp.issubdtype(jnp.result_type(value), jnp.floating)


def _is_exact(value) -> bool:
  """Integer or bool."""
  return not jnp.issubdtype(jnp.result_type(value), jnp.inexact)


def _in_float32(function):
  """Computes half precision in float32 and rounds once, as torch's CPU kernels do."""

  @functools.wraps(function)
  def with_wide_operands(*arrays):
    dtype = arrays[0].dtype
    if dtype not in HALF_DTYPES:
      return function(*arrays)
    wide = [array.astype(jnp.float32) for array in arrays]
    return function(*wide).astype(dtype)

  return with_wide_operands


def _scaled(value: jax.Array, factor) -> jax.Array:
  """`factor * value` in the dtype of `value`; the default factor 1 costs nothing."""
  if isinstance(factor, int) and factor == 1:
    return value
  if _is_exact(value) and not _is_exact(factor):
    raise RuntimeError(
      "For integral input tensors, argument alpha must not be a floating point "
      f"number, but the operands have dtype {value.dtype}."
    )
  return value * factor_in(value.dtype, factor)


# --- Tables -------------------------------------------------------------------------


def _named(name, lowering):
  """Registers a row under upstream's function name and puts it into this module."""
  lowering.__name__ = lowering.__qualname__ = f"_aten_{name}"
  register = op(getattr(aten, name), on_host=_on_host.POINTWISE.get(name))
  globals()[lowering.__name__] = register(lowering)


def _float_unary(function):
  return lambda self: function(to_float(self))


def _exact_unary(function):
  """Rounding: integers are already round."""
  return lambda self: self if _is_exact(self) else function(self)


def _binary(function):
  return lambda self, other: function(*promote(self, other))


def _float_binary(function):
  return lambda self, other: function(*map(to_float, promote(self, other)))


def _integer_binary(function):
  def lowering(self, other):
    left, right = promote(self, other)
    if not jnp.issubdtype(left.dtype, jnp.integer):
      raise NotImplementedError(
        f"{function.__name__} expects integers, but got {left.dtype}. Convert the "
        "tensors with `.to(torch.int64)` first."
      )
    return function(left, right)

  return lowering


_OPERATORS = ("lt", "le", "gt", "ge")


def _ordering(name, function):
  def compare(self, other):
    left, right = promote(self, other)
    if _is_complex(left):
      # Of operators Python expects that they raise no TypeError.
      error = NotImplementedError if name in _OPERATORS else WrongDtypeError
      raise error(f"{name} is not defined for complex numbers.")
    return function(left, right)

  return compare


# torch gives these in the default dtype for integers and bools.
FLOAT_UNARY = {
  "acos": jnp.arccos,
  "acosh": jnp.arccosh,
  "asin": jnp.arcsin,
  "asinh": jnp.arcsinh,
  "atan": jnp.arctan,
  "atanh": jnp.arctanh,
  "cos": jnp.cos,
  "cosh": jnp.cosh,
  "deg2rad": _in_float32(jnp.deg2rad),
  "erf": lax.erf,
  "erfc": lax.erfc,
  "exp": jnp.exp,
  "exp2": jnp.exp2,
  "expm1": jnp.expm1,
  "log": jnp.log,
  "log10": _in_float32(jnp.log10),
  "log1p": jnp.log1p,
  "log2": _in_float32(jnp.log2),
  "rad2deg": _in_float32(jnp.rad2deg),
  "reciprocal": jnp.reciprocal,
  "rsqrt": lax.rsqrt,
  "sigmoid": lax.logistic,
  "sin": jnp.sin,
  "sinc": _in_float32(jnp.sinc),
  "sinh": jnp.sinh,
  "sqrt": jnp.sqrt,
  "tan": jnp.tan,
  "tanh": jnp.tanh,
}

# Rounding leaves integers alone. `round`, with its decimals, is below.
EXACT_UNARY = {
  "ceil": jnp.ceil,
  "fix": jnp.trunc,
  "floor": jnp.floor,
  "frac": lambda x: x - jnp.trunc(x),
  "trunc": jnp.trunc,
}

# Any dtype in; the dtype out is the input's, or bool.
PLAIN_UNARY = {
  "abs": jnp.abs,
  "absolute": jnp.abs,
  "conj_physical": jnp.conj,
  "_conj_physical": jnp.conj,
  "_conj": jnp.conj,
  "conj": jnp.conj,
  "isfinite": jnp.isfinite,
  "isinf": jnp.isinf,
  "isnan": jnp.isnan,
  "isneginf": jnp.isneginf,
  "isposinf": jnp.isposinf,
  "isreal": jnp.isreal,
  "logical_not": jnp.logical_not,
  "positive": lambda x: x,
  "signbit": lambda x: jnp.signbit(x) if _is_floating(x) else x < jnp.zeros_like(x),
  "square": jnp.square,
}


def _logaddexp(left, right):
  """log(exp(left) + exp(right)); of complex numbers on torch's branch."""
  if not _is_complex(left):
    return jnp.logaddexp(left, right)
  is_larger = left.real >= right.real
  larger, smaller = (
    jnp.where(is_larger, left, right),
    jnp.where(is_larger, right, left),
  )
  return larger + jnp.log1p(jnp.exp(smaller - larger))


BINARY = {
  "eq": jnp.equal,
  "hypot": _in_float32(jnp.hypot),
  "logaddexp": _in_float32(_logaddexp),
  "logaddexp2": _in_float32(jnp.logaddexp2),
  "mul": jnp.multiply,
  "ne": jnp.not_equal,
}

INTEGER_BINARY = {"gcd": jnp.gcd, "lcm": jnp.lcm}

FLOAT_BINARY = {
  "atan2": _in_float32(jnp.arctan2),
  "copysign": jnp.copysign,
  "true_divide": jnp.divide,
}

ORDERING = {
  "fmax": jnp.fmax,
  "fmin": jnp.fmin,
  "ge": jnp.greater_equal,
  "gt": jnp.greater,
  "le": jnp.less_equal,
  "lt": jnp.less,
  "maximum": jnp.maximum,
  "minimum": jnp.minimum,
}

# torch tests each operand against zero, so nothing is promoted.
LOGICAL = {
  "logical_and": jnp.logical_and,
  "logical_or": jnp.logical_or,
  "logical_xor": jnp.logical_xor,
}


def _plain_unary(function):
  return lambda self: function(self)


def _plain_binary(function):
  return lambda self, other: function(self, other)


TABLES = (
  (FLOAT_UNARY, _float_unary),
  (EXACT_UNARY, _exact_unary),
  (PLAIN_UNARY, _plain_unary),
  (BINARY, _binary),
  (INTEGER_BINARY, _integer_binary),
  (FLOAT_BINARY, _float_binary),
  (LOGICAL, _plain_binary),
)
for _table, _wrap in TABLES:
  for _name, _function in _table.items():
    _named(_name, _wrap(_function))
for _name, _function in ORDERING.items():
  _named(_name, _ordering(_name, _function))


# --- Sums and products --------------------------------------------------------------


@op(aten.add, on_host=_on_host.POINTWISE["add"])
def _aten_add(self, other, alpha=1):
  left, right = promote(self, other)
  return left + _scaled(right, alpha)


def _reject_bool_subtraction(*values):
  if any(jnp.result_type(value) == jnp.bool_ for value in values):
    raise NotImplementedError(
      "Subtraction with a bool tensor is not supported. Use `^` or `logical_not()`, or "
      "convert the bool tensor first."
    )


@op(aten.sub, on_host=_on_host.POINTWISE["sub"])
def _aten_sub(self, other, alpha=1):
  _reject_bool_subtraction(self, other)
  left, right = promote(self, other)
  return left - _scaled(right, alpha)


@op(aten.rsub)
def _aten_rsub(self, other, alpha=1):
  return _aten_sub(other, self, alpha)


@op(aten.neg, aten.negative, on_host=_on_host.POINTWISE["neg"])
def _aten_neg(self):
  if self.dtype == jnp.bool_:
    raise NotImplementedError(
      "Negation of a bool tensor is not supported. Use `~` or `logical_not()` instead."
    )
  return -self


@op(aten.addcmul)
def _aten_addcmul(self, tensor1, tensor2, value=1):
  dtype = result_dtype(self, tensor1, tensor2)
  start, left, right = (convert(array, dtype) for array in (self, tensor1, tensor2))

  def add(start, left, right):
    return start + left * right * factor_in(left.dtype, value)

  return _in_float32(add)(start, left, right)


@op(aten.addcdiv)
def _aten_addcdiv(self, tensor1, tensor2, value=1):
  if _is_exact(tensor1) and _is_exact(tensor2):
    raise RuntimeError(
      "Integer division with addcdiv is not supported. Use (input + value * "
      "torch.trunc(tensor1 / tensor2)) or convert the tensors to a floating dtype."
    )
  start, left, right = promote(self, tensor1, tensor2)
  return _in_float32(lambda s, a, b: s + _scaled(a / b, value))(start, left, right)


@_in_float32
def _lerp(start, end, weight):
  # From the nearer end, so that both ends come out exactly.
  span = end - start
  near_start = jnp.abs(weight) < 0.5
  return jnp.where(near_start, start + weight * span, end - span * (1 - weight))


@op(aten.lerp)
def _aten_lerp(self, end, weight):
  if _is_exact(self):
    raise NotImplementedError(
      f"lerp expects floating-point tensors, but got {self.dtype}. Call `.float()`."
    )
  start, end = promote(self, end)
  return _lerp(start, end, factor_in(start.dtype, weight))


# --- Division -----------------------------------------------------------------------


@_in_float32
def _floor_divide_floats(numerator, denominator):
  """Rounds the exact quotient down, after Python's float `//`; x / 0 is not NaN.

  The quotient comes from an exact remainder: floor(a / b) is wrong where a / b rounds
  up to an integer.
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
  """torch has no quotient or remainder of two bools; JAX would give integers."""
  if array.dtype == jnp.bool_:
    raise NotImplementedError(
      f"{name} is not implemented for bools. Convert one operand with `.int()` first."
    )


def _floor_divide(left, right):
  _reject_bools("floor division", left)
  if _is_exact(left):
    return jnp.floor_divide(left, right)
  return _floor_divide_floats(left, right)


def _truncating_divide(left, right):
  _reject_bools("truncating division", left)
  if _is_exact(left):
    return lax.div(*jnp.broadcast_arrays(left, right))
  return _in_float32(lambda a, b: jnp.trunc(a / b))(left, right)


_ROUNDED_DIVISIONS = {"floor": _floor_divide, "trunc": _truncating_divide}


@op(aten.div, aten.divide, on_host=_on_host.POINTWISE["div"])
def _aten_div(self, other, rounding_mode=None):
  """True division gives floats; with a rounding mode integers stay integers."""
  left, right = promote(self, other)
  if rounding_mode is None:
    return jnp.divide(to_float(left), to_float(right))
  if rounding_mode not in _ROUNDED_DIVISIONS:
    raise RuntimeError(
      "div expects rounding_mode to be one of None, 'trunc' or 'floor', but got "
      f"{rounding_mode!r}."
    )
  # In steps, whose derivative torch has as 0 at the steps too.
  return lax.stop_gradient(_ROUNDED_DIVISIONS[rounding_mode](left, right))


@op(aten.floor_divide)
def _aten_floor_divide(self, other):
  return _floor_divide(*promote(self, other))


@op(aten.remainder)
def _aten_remainder(self, other):
  """The sign is the divisor's, as in Python."""
  left, right = promote(self, other)
  _reject_bools("remainder", left)
  return _in_float32(jnp.remainder)(left, right)


@op(aten.fmod)
def _aten_fmod(self, other):
  """The sign is the dividend's, as in C."""
  left, right = promote(self, other)
  _reject_bools("fmod", left)
  return _in_float32(jnp.fmod)(left, right)


# --- Powers -------------------------------------------------------------------------


def _float_power(base, exponent):
  power = jnp.power(base, exponent)
  if not _is_complex(power):
    return power
  # By way of the logarithm of 0, a power of 0 would be NaN.
  return jnp.where((base == 0) & (exponent.real > 0), 0, power)


def _integer_power(base, exponent):
  """An integer to a power that is not negative, modulo 2 to the bits of its dtype.

  By squares: `jnp.power` looks at the lowest six bits of the exponent.
  """
  base, exponent = jnp.broadcast_arrays(base, exponent)
  bits = jnp.iinfo(exponent.dtype).bits

  def times(bit, powers):
    power, square = powers
    has_bit = (exponent >> bit.astype(exponent.dtype)) & 1
    return jnp.where(has_bit, power * square, power), square * square

  return lax.fori_loop(0, bits, times, (jnp.ones_like(base), base))[0]


def _power(base, exponent):
  """Powers of arrays of one dtype; an integer to a negative power truncates to 0."""
  if not _is_exact(base):
    return _in_float32(_float_power)(base, exponent)
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


# Exponents that torch computes by products and roots rather than by `pow`.
_SIMPLE_POWERS = {
  0.5: jnp.sqrt,
  1: lambda x: x,
  2: jnp.square,
  3: lambda x: x * x * x,
  -0.5: lax.rsqrt,
  -1: jnp.reciprocal,
  -2: lambda x: jnp.reciprocal(jnp.square(x)),
}  # `_numbers.power` knows them


@op(aten.pow.Tensor_Scalar, prepare=_numbers.power, **_on_host.POWER)
def _aten_pow_scalar(self, exponent):
  dtype = result_dtype(self, exponent)
  base = lax.convert_element_type(self, dtype)
  is_known = not isinstance(exponent, jax.Array)
  if is_known and _is_exact(base) and exponent < 0:
    raise RuntimeError("Integers to negative integer powers are not allowed.")
  if is_known and exponent in _SIMPLE_POWERS:
    return _in_float32(_SIMPLE_POWERS[exponent])(base)
  if _is_exact(base):  # modulo 2**32, and so in bytes
    power = lax.integer_pow if is_known else _integer_power
    return power(base.astype(jnp.promote_types(dtype, "int32")), exponent).astype(dtype)
  return _in_float32(lambda x: _float_power(x, jnp.asarray(exponent, x.dtype)))(base)


@op(aten.ldexp)
def _aten_ldexp(self, other):
  """torch multiplies by 2.0 ** other, so two integers give a float."""
  scale = to_float(lax.convert_element_type(other, result_dtype(other, 2.0)))
  value, scale = promote(self, scale)
  # In half precision the power alone would cost half of the digits.
  return _in_float32(lambda v, s: v * jnp.exp2(s))(value, scale)


# --- Bounds -------------------------------------------------------------------------


def _clamp(self, lower, upper):
  dtype = result_dtype(self, lower, upper)
  if jnp.issubdtype(dtype, jnp.complexfloating):
    raise NotImplementedError("clamp is not supported for complex types.")
  self, *bounds = (
    bound if bound is None else lax.convert_element_type(bound, dtype)
    for bound in (self, lower, upper)
  )
  return jnp.clip(self, *bounds)


def _check_clamp(self, min=None, max=None):
  for bound in (min, max):
    # Floats make floats of integers.
    if type(bound) is int or self.dtype.is_floating_point:
      require_fit(bound, self.dtype)


@op(aten.clamp, aten.clip, check=_check_clamp)
def _aten_clamp(self, min=None, max=None):
  """Where min > max the result is max; a NaN in any operand is kept."""
  if min is None and max is None:
    raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None.")
  return _clamp(self, min, max)


@op(aten.clamp_min)
def _aten_clamp_min(self, min):
  return _clamp(self, min, None)


@op(aten.clamp_max)
def _aten_clamp_max(self, max):
  return _clamp(self, None, max)


@op(aten.nan_to_num)
def _aten_nan_to_num(self, nan=None, posinf=None, neginf=None):
  if _is_exact(self):
    return self
  nan = 0.0 if nan is None else nan
  return jnp.nan_to_num(self, nan=nan, posinf=posinf, neginf=neginf)


# --- Selection ----------------------------------------------------------------------


def _selects(args, kwargs) -> bool:
  """`where(condition)` alone is `nonzero`: its shape depends on the data."""
  return len(args) + len(kwargs) > 1


@op(aten.where, compiled=_selects, on_host=_on_host.where)
def _aten_where(condition, self=None, other=None):
  if self is not None and condition.dtype not in (jnp.bool_, jnp.uint8):
    raise RuntimeError(
      "where expected condition to be a boolean tensor, but got one of dtype "
      f"{condition.dtype}. Compare it with a number, or call `.bool()`."
    )
  condition = condition.astype(jnp.bool_)
  if self is None:
    index_dtype = mappings.t2j_dtype(torch.int64)
    indices = jnp.nonzero(jnp.atleast_1d(condition))
    return [index.astype(index_dtype) for index in indices[: condition.ndim or 1]]
  left, right = promote(self, other)
  return jnp.where(condition, left, right)


def _check_masked_fill(self, mask, value):
  is_tensor = isinstance(value, torch.Tensor)
  if is_tensor and value.is_complex() and not self.dtype.is_complex:
    raise RuntimeError(
      f"value cannot be converted to type {self.dtype} without overflow: it is complex."
    )
  if is_tensor and value.dim():
    raise RuntimeError(
      "masked_fill only supports a 0-dimensional value tensor, but got tensor with "
      f"{value.dim()} dimension(s)."
    )
  require_fit(value, self.dtype)


@op(aten.masked_fill, check=_check_masked_fill, on_host=_on_host.masked_fill)
def _aten_masked_fill(self, mask, value):
  return jnp.where(mask.astype(jnp.bool_), cast(value, self.dtype), self)


def _check_fill(self, value):
  require_fit(value, self.dtype, self.numel())


@op(aten.fill, check=_check_fill, overwrites=True, on_host=_on_host.full_like)
def _aten_fill(self, value):
  return jnp.broadcast_to(cast(value, self.dtype), self.shape)


@op(aten.heaviside)
def _aten_heaviside(self, values):
  """NaN counts as negative in torch."""
  require_one_dtype("heaviside", self, values)
  return jnp.where(self == 0, values, (self > 0).astype(self.dtype))


# --- Signs and rounding -------------------------------------------------------------


@op(aten.sign, aten.sgn)
def _aten_sign(self):
  """0 for NaN; the sign of a complex number is the unit number of its direction."""
  if self.dtype == jnp.bool_:
    return self
  sign = jnp.sign(self)
  return jnp.where(jnp.isnan(self), 0, sign) if _is_floating(self) else sign


def _power_of_ten(decimals: int) -> tuple[float, bool]:
  """What is multiplied or divided by, and whether decimals are kept."""
  return 10.0 ** abs(decimals), decimals > 0


def _prepare_decimals(given: dict) -> None:
  decimals = given.get("decimals")
  if type(decimals) is int:
    is_plain = decimals == 0 or abs(decimals) > sys.float_info.max_10_exp
    ten, keeps = (1.0, True) if is_plain else _power_of_ten(decimals)
    given["decimals"] = StaticValue(decimals) if is_plain else (ten, StaticValue(keeps))


@op(aten.round, static=("decimals",), prepare=_prepare_decimals)
def _aten_round(self, decimals=0):
  """Half to even; negative decimals round to tens, hundreds, ...

  The power of ten is applied by torch's two steps, not by jnp.round's, which differ in
  the last digit.
  """
  if _is_exact(self):
    return self
  is_known = isinstance(decimals, int)
  if is_known and decimals == 0:
    return jnp.round(self)
  ten, keeps_decimals = _power_of_ten(decimals) if is_known else decimals
  if keeps_decimals:
    return _in_float32(lambda x: jnp.round(x * ten) / ten)(self)
  return _in_float32(lambda x: jnp.round(x / ten) * ten)(self)


@op(aten.frexp)
def _aten_frexp(self):
  mantissa, exponent = jnp.frexp(
    self.astype(jnp.promote_types(self.dtype, jnp.float32))
  )
  return mantissa.astype(self.dtype), exponent.astype(jnp.int32)


def _integer_of_width(dtype):
  return jnp.dtype(f"int{8 * jnp.dtype(dtype).itemsize}")


@op(aten.nextafter)
def _aten_nextafter(self, other):
  """XLA lacks nextafter for half precision, so there the bits are stepped."""
  start, towards = promote(self, other)
  if start.dtype not in HALF_DTYPES:
    return jnp.nextafter(start, towards)
  integer = _integer_of_width(start.dtype)
  start, towards = jnp.broadcast_arrays(start, towards)
  bits = lax.bitcast_convert_type(start, integer)
  # Away from zero the bit pattern grows with the magnitude, whatever the sign.
  away = (start < towards) == (start > 0)
  stepped = lax.bitcast_convert_type(jnp.where(away, bits + 1, bits - 1), start.dtype)
  smallest = lax.bitcast_convert_type(jnp.ones_like(bits), start.dtype)
  stepped = jnp.where(start == 0, jnp.copysign(smallest, towards), stepped)
  unordered = jnp.isnan(start) | jnp.isnan(towards)
  stepped = jnp.where(unordered, jnp.asarray(math.nan, start.dtype), stepped)
  return jnp.where(start == towards, towards, stepped)


# --- Logarithms ---------------------------------------------------------------------


@_in_float32
def _xlogy(left, right):
  product = jnp.where(left == 0, jnp.zeros_like(left), left * jnp.log(right))
  return jnp.where(jnp.isnan(right), right, product)


@op(aten.xlogy, aten.special_xlogy)
def _aten_xlogy(self, other):
  """0 * log(y) is 0 for every y except NaN."""
  return _xlogy(*map(to_float, promote(self, other)))
