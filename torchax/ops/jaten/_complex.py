"""Functions that XLA computes inaccurately, or on the wrong side of a cut.

Most are of complex numbers. XLA computes `sinh` and `cosh` by exponentials, which
cancel near zeros. On a cut, the sign of a zero says which side a number is on:
`sqrt(-1 - 0j)` is -1j. `acosh` is not here, since torch's formula for its gradient
drops that sign for one of two roots. Infinities and NaN follow annex G of the C
standard, as torch does.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from torchax.ops.promotion import in_float32


def _by_kind(real, of_complex):
  """Return a function that calls `of_complex` for complex arrays, else `real`."""

  @functools.wraps(real)
  def function(x):
    return of_complex(x) if jnp.iscomplexobj(x) else real(x)

  return function


def _times_i(z):
  return lax.complex(-z.imag, z.real)


def _turned(function):
  """Return z -> -i f(i z)."""
  return lambda z: -_times_i(function(_times_i(z)))


def _on_both_sides(function):
  """Return f whose values below the real axis mirror those above it."""

  def mirrored(z):
    is_below = jnp.signbit(z.imag)
    result = function(jnp.where(is_below, z.conj(), z))
    return jnp.where(is_below, result.conj(), result)

  return mirrored


@jax.custom_jvp
def _real_cosh(x):
  half = jnp.exp(jnp.abs(x) / 2)  # XLA's `exp(x + log(1 / 2))` rounds the sum
  return half / 2 * half + 1 / (2 * half) / half


@jax.custom_jvp
def _real_sinh(x):
  size = jnp.abs(x)
  half, less_one = jnp.exp(size / 2), jnp.expm1(jnp.minimum(size, 1))
  small = (less_one + less_one / (less_one + 1)) / 2
  large = half / 2 * half - 1 / (2 * half) / half
  return jnp.sign(x) * jnp.where(size < 1, small, large)


_real_cosh.defjvps(lambda tangent, _, x: tangent * _real_sinh(x))
_real_sinh.defjvps(lambda tangent, _, x: tangent * _real_cosh(x))


def _exp(z):
  result = jnp.exp(z)
  limit = jnp.where(z.real < 0, 0, complex(math.inf, math.nan))
  is_limit = jnp.isinf(z.real) & ~jnp.isfinite(z.imag)
  return jnp.where(is_limit, limit.astype(result.dtype), result)


def exp2(x):
  """Return 2 ** x, which is exact for whole numbers; `jnp.exp2` takes exp(x log 2)."""
  if not jnp.iscomplexobj(x):
    return jnp.power(2, x)
  log2 = math.log(2)
  return _exp(lax.complex(x.real * log2, x.imag * log2))


def _sqrt_above(z):
  """Compute the root of a number that is not below the real axis."""
  result, is_tall = jnp.sqrt(z), jnp.isinf(z.imag)
  is_long = jnp.isinf(z.real) & jnp.isnan(z.imag)
  real = jnp.where(is_tall | (is_long & (z.real > 0)), math.inf, result.real)
  return lax.complex(
    real, jnp.where(is_tall | (is_long & (z.real < 0)), math.inf, result.imag)
  )


def _atanh_above(z):
  """Compute the inverse of tanh for a number that is not below the real axis."""
  result, is_nan = jnp.arctanh(z), jnp.isnan(z.imag)
  is_lost = is_nan | (jnp.isnan(z.real) & ~jnp.isinf(z.imag))
  real = jnp.where(is_nan & (z.real == 0), z.real, result.real)
  return lax.complex(real, jnp.where(is_lost, math.nan, result.imag))


def _absolute(z):
  is_infinite = jnp.isinf(z.real) | jnp.isinf(z.imag)
  return jnp.where(is_infinite, math.inf, jnp.abs(z))


_sqrt, _asin, _atanh = map(_on_both_sides, (_sqrt_above, jnp.arcsin, _atanh_above))

absolute = _by_kind(jnp.abs, _absolute)
exp = _by_kind(jnp.exp, _exp)
sinh = _by_kind(in_float32(_real_sinh), _turned(jnp.sin))
cosh = _by_kind(in_float32(_real_cosh), lambda z: jnp.cos(_times_i(z)))
sqrt = _by_kind(jnp.sqrt, _sqrt)
rsqrt = _by_kind(lax.rsqrt, lambda z: 1 / _sqrt(z))
acos = _by_kind(jnp.arccos, _on_both_sides(jnp.arccos))
asin = _by_kind(jnp.arcsin, _asin)
asinh = _by_kind(jnp.arcsinh, _turned(_asin))
atan = _by_kind(jnp.arctan, _turned(_atanh))
atanh = _by_kind(jnp.arctanh, _atanh)
