"""Comparison, selection, rounding, exponentials, trigonometry, complex numbers.

Operands are promoted by torch's rules first, so the JAX function gets arrays of one
dtype. An operator that JAX has too is a row of a table. Where torch and JAX differ, it
is a function whose docstring states the difference. Sums, quotients and powers are in
`arithmetic.py`, bits in `bitwise.py`, the gamma family in `special.py`, activations and
`threshold` in `activation.py`.
"""

import math
import sys

import jax.numpy as jnp
import torch
from jax import lax

from torchax.core.static_values import StaticValue
from torchax.errors import WrongDtypeError
from torchax.ops.builtin import op
from torchax.ops.casting import cast, require_fit
from torchax.ops.jaten import _complex, _on_host
from torchax.ops.jaten._arguments import require_one_dtype
from torchax.ops.jaten.arithmetic import quotient
from torchax.ops.promotion import (
  HALVES,
  in_float32,
  int64,
  is_exact,
  promote,
  promote_to_float,
  result_dtype,
  to_float,
)
from torchax.registry.names import aten


def _is_floating(value) -> bool:
  return jnp.issubdtype(jnp.result_type(value), jnp.floating)


# --- Tables -------------------------------------------------------------------------


def _register(name, lowering):
  """Register a row and define it in this module, under google/torchax's name."""
  lowering.__name__ = lowering.__qualname__ = f"_aten_{name}"
  register = op(getattr(aten, name), on_host=_on_host.POINTWISE.get(name))
  globals()[lowering.__name__] = register(lowering)


def _binary(function):
  return lambda self, other: function(*promote(self, other))


_OPERATORS = ("lt", "le", "gt", "ge")


def _ordering(name, function):
  def compare(self, other):
    left, right = promote(self, other)
    if jnp.iscomplexobj(left):
      # Python expects that its comparison operators raise no TypeError.
      error = NotImplementedError if name in _OPERATORS else WrongDtypeError
      raise error(f"{name} is not defined for complex numbers.")
    return function(left, right)

  return compare


def _erf(x):
  """Compute erf within ±1; XLA on CPUs exceeds it, and makes `Normal.cdf` negative."""
  result = lax.erf(x)
  return result - lax.stop_gradient(result - jnp.clip(result, -1, 1))


def _logarithm(base, log):
  """Make logarithms of powers of the base whole numbers, as in C; `log` rounds them."""

  @in_float32
  def logarithm(x):
    result = log(x)
    if jnp.iscomplexobj(x):
      return result
    whole = jnp.round(result)
    is_power = (x == jnp.power(base, whole)) & jnp.isfinite(result)
    return result + lax.stop_gradient(jnp.where(is_power, whole - result, 0))

  return logarithm


# Integers and bools give torch's default dtype.
FLOAT_UNARY = {
  "acos": in_float32(_complex.acos),
  "acosh": in_float32(jnp.arccosh),
  "asin": in_float32(_complex.asin),
  "asinh": in_float32(_complex.asinh),
  "atan": in_float32(_complex.atan),
  "atanh": in_float32(_complex.atanh),
  "cos": jnp.cos,
  "cosh": _complex.cosh,
  "deg2rad": in_float32(jnp.deg2rad),
  "erf": _erf,
  "erfc": lax.erfc,
  "exp": _complex.exp,
  "exp2": in_float32(_complex.exp2),
  "expm1": in_float32(jnp.expm1),
  "log": jnp.log,
  "log10": _logarithm(10, jnp.log10),
  "log1p": in_float32(jnp.log1p),
  "log2": _logarithm(2, jnp.log2),
  "rad2deg": in_float32(jnp.rad2deg),
  "reciprocal": jnp.reciprocal,
  "rsqrt": in_float32(_complex.rsqrt),
  "sigmoid": in_float32(lax.logistic),
  "sin": jnp.sin,
  "sinc": in_float32(jnp.sinc),
  "sinh": _complex.sinh,
  "sqrt": _complex.sqrt,
  "tan": in_float32(jnp.tan),
  "tanh": jnp.tanh,
}

# Integers are returned unchanged. `round`, with its decimals, is below.
EXACT_UNARY = {
  "ceil": jnp.ceil,
  "fix": jnp.trunc,
  "floor": jnp.floor,
  "frac": lambda x: x - jnp.trunc(x),
  "trunc": jnp.trunc,
}

# Any dtype is accepted; the result has the same dtype, or is bool.
PLAIN_UNARY = {
  "abs": _complex.absolute,
  "absolute": _complex.absolute,
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
  """Return log(exp(left) + exp(right)); complex numbers are on torch's branch."""
  if not jnp.iscomplexobj(left):
    return jnp.logaddexp(left, right)
  is_larger = left.real >= right.real
  larger, smaller = (
    jnp.where(is_larger, left, right),
    jnp.where(is_larger, right, left),
  )
  result = larger + jnp.log1p(_complex.exp(smaller - larger))
  # The difference of equal infinities is NaN.
  total = jnp.log(_complex.exp(smaller) + _complex.exp(larger))
  limit = jnp.where(larger.real < 0, smaller, total)
  are_equal = jnp.isinf(larger.real) & (larger.real == smaller.real)
  result = jnp.where(are_equal, limit, result)
  is_nan = jnp.isnan(left) | jnp.isnan(right)
  return jnp.where(is_nan, complex(math.nan, math.nan), result)


def _gcd(left, right):
  """Return the greatest common divisor; that of the least integer and 0 wraps."""
  if not jnp.issubdtype(left.dtype, jnp.integer):
    raise NotImplementedError(f"gcd and lcm expect integers, but got {left.dtype}.")
  # `jnp.gcd` does not end for the least integer, whose absolute value is negative.
  unsigned = f"uint{8 * left.dtype.itemsize}"
  sizes = [jnp.abs(array).astype(unsigned) for array in (left, right)]
  return jnp.gcd(*sizes).astype(left.dtype)


def _lcm(left, right):
  """Return the least common multiple, modulo 2 to the number of bits."""
  operands = left, right, _gcd(left, right)
  wide = jnp.promote_types(left.dtype, "int32")
  first, second, divisor = (array.astype(wide) for array in operands)
  multiple = first // jnp.where(divisor == 0, 1, divisor) * second
  return jnp.abs(multiple).astype(left.dtype)


BINARY = {
  "eq": jnp.equal,
  "gcd": _gcd,
  "hypot": in_float32(jnp.hypot),
  "lcm": _lcm,
  "logaddexp": in_float32(_logaddexp),
  "logaddexp2": in_float32(jnp.logaddexp2),
  "ne": jnp.not_equal,
}

FLOAT_BINARY = {
  "atan2": in_float32(jnp.arctan2),
  "copysign": jnp.copysign,
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


# Function of the table -> lowering.
TABLES = (
  (FLOAT_UNARY, lambda f: lambda self: f(to_float(self))),
  (EXACT_UNARY, lambda f: lambda self: self if is_exact(self) else f(self)),
  (PLAIN_UNARY, lambda f: lambda self: f(self)),
  (BINARY, _binary),
  (FLOAT_BINARY, lambda f: lambda self, other: f(*promote_to_float(self, other))),
  (LOGICAL, lambda f: lambda self, other: f(self, other)),
)
for _table, _wrap in TABLES:
  for _name, _function in _table.items():
    _register(_name, _wrap(_function))
for _name, _function in ORDERING.items():
  _register(_name, _ordering(_name, _function))


# --- Bounds -------------------------------------------------------------------------


def _clamp(self, lower, upper):
  dtype = result_dtype(self, lower, upper)
  self, *bounds = (
    bound if bound is None else lax.convert_element_type(bound, dtype)
    for bound in (self, lower, upper)
  )
  return jnp.clip(self, *bounds)


def _check_clamp(self, min=None, max=None):
  for bound in (min, max):
    # A float bound promotes an integer tensor to float.
    if type(bound) is int or self.dtype.is_floating_point:
      require_fit(bound, self.dtype)


def _check_bound(self, bound):
  if type(bound) is complex:
    raise NotImplementedError("clamp is not supported for complex types")
  _check_clamp(self, bound)


@op(aten.clamp, aten.clip, check=_check_clamp)
def _aten_clamp(self, min=None, max=None):
  """Clamp to [min, max]; max wins if min > max, and NaN in any operand is kept."""
  return _clamp(self, min, max)


@op(aten.clamp_min, check=lambda self, min: _check_bound(self, min))
def _aten_clamp_min(self, min):
  return _clamp(self, min, None)


@op(aten.clamp_max, check=lambda self, max: _check_bound(self, max))
def _aten_clamp_max(self, max):
  return _clamp(self, None, max)


@op(aten.nan_to_num)
def _aten_nan_to_num(self, nan=None, posinf=None, neginf=None):
  if is_exact(self):
    return self
  nan = 0.0 if nan is None else nan
  return jnp.nan_to_num(self, nan=nan, posinf=posinf, neginf=neginf)


# --- Selection ----------------------------------------------------------------------


def _selects(args, kwargs) -> bool:
  """Return False for `where(condition)`, whose shape depends on data like `nonzero`."""
  return len(args) + len(kwargs) > 1


@op(aten.where, compiled=_selects, on_host=_on_host.where)
def _aten_where(condition, self=None, other=None):
  condition = condition.astype(jnp.bool_)
  if self is None:
    indices = jnp.nonzero(jnp.atleast_1d(condition))
    return [index.astype(int64()) for index in indices[: condition.ndim or 1]]
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
  """Return the step function; torch treats NaN as negative."""
  require_one_dtype("heaviside", self, values)
  return jnp.where(self == 0, values, (self > 0).astype(self.dtype))


# --- Signs and rounding -------------------------------------------------------------


@op(aten.sign, aten.sgn)
def _aten_sign(self):
  """Return the sign: 0 for NaN, z / |z| for a complex number z."""
  if self.dtype == jnp.bool_:
    return self
  sign = jnp.sign(self)
  return jnp.where(jnp.isnan(self), 0, sign) if _is_floating(self) else sign


def _power_of_ten(decimals: int) -> tuple[float, bool]:
  """Return the power of ten, and True to keep decimals or False to drop digits."""
  return 10.0 ** abs(decimals), decimals > 0


def _prepare_decimals(arguments: dict) -> None:
  decimals = arguments.get("decimals")
  if type(decimals) is int:
    is_plain = decimals == 0 or abs(decimals) > sys.float_info.max_10_exp
    ten, keeps = (1.0, True) if is_plain else _power_of_ten(decimals)
    arguments["decimals"] = (
      StaticValue(decimals) if is_plain else (ten, StaticValue(keeps))
    )


@op(aten.round, static=("decimals",), prepare=_prepare_decimals)
def _aten_round(self, decimals=0):
  """Round half to even; negative decimals round to tens, hundreds, …

  Scaling follows torch; jnp.round scales differently and can differ in the last digit.
  """
  if is_exact(self):
    return self
  is_known = isinstance(decimals, int)
  if is_known and decimals == 0:
    return jnp.round(self)
  ten, keeps_decimals = _power_of_ten(decimals) if is_known else decimals
  if keeps_decimals:
    return in_float32(lambda x: quotient(jnp.round(x * ten), ten))(self)
  return in_float32(lambda x: jnp.round(quotient(x, ten)) * ten)(self)


@op(aten.frexp)
def _aten_frexp(self):
  mantissa, exponent = jnp.frexp(
    self.astype(jnp.promote_types(self.dtype, jnp.float32))
  )
  return mantissa.astype(self.dtype), exponent.astype(jnp.int32)


@op(aten.nextafter)
def _aten_nextafter(self, other):
  """Return the next number towards `other`.

  XLA lacks nextafter for half precision, so there the bit pattern is stepped.
  """
  start, towards = promote(self, other)
  if start.dtype not in HALVES:
    return jnp.nextafter(start, towards)
  integer = jnp.dtype(f"int{8 * start.dtype.itemsize}")
  start, towards = jnp.broadcast_arrays(start, towards)
  bits = lax.bitcast_convert_type(start, integer)
  # For either sign, a larger bit pattern is a larger magnitude.
  away = (start < towards) == (start > 0)
  stepped = lax.bitcast_convert_type(jnp.where(away, bits + 1, bits - 1), start.dtype)
  smallest = lax.bitcast_convert_type(jnp.ones_like(bits), start.dtype)
  stepped = jnp.where(start == 0, jnp.copysign(smallest, towards), stepped)
  unordered = jnp.isnan(start) | jnp.isnan(towards)
  stepped = jnp.where(unordered, jnp.asarray(math.nan, start.dtype), stepped)
  return jnp.where(start == towards, towards, stepped)


# --- Logarithms ---------------------------------------------------------------------


@in_float32
def _xlogy(left, right):
  product = jnp.where(left == 0, jnp.zeros_like(left), left * jnp.log(right))
  return jnp.where(jnp.isnan(right), right, product)


@op(aten.xlogy, aten.special_xlogy)
def _aten_xlogy(self, other):
  """Return x log(y); 0 * log(y) is 0 for every y except NaN."""
  return _xlogy(*promote_to_float(self, other))


# --- Complex numbers ----------------------------------------------------------------


@op(aten.complex)
def _aten_complex(real, imag):
  if real.dtype not in (jnp.float32, jnp.float64):
    raise NotImplementedError(
      "Expected both inputs to be Float or Double tensors, but got "
      f"{real.dtype}. JAX has no complex numbers of half precision."
    )
  return lax.complex(*jnp.broadcast_arrays(real, imag))


@op(aten.polar)
def _aten_polar(abs, angle):
  require_one_dtype("polar", abs, angle)
  return _aten_complex(abs * jnp.cos(angle), abs * jnp.sin(angle))


@op(aten.angle)
def _aten_angle(self):
  """Return the angle; for a real number it is 0, pi if negative, or NaN."""
  if jnp.iscomplexobj(self):
    return jnp.angle(self)
  value = to_float(self)
  direction = jnp.where(value < 0, math.pi, 0.0).astype(value.dtype)
  return jnp.where(jnp.isnan(value), value, direction)
