"""Functions of complex numbers that XLA computes inaccurately, or on the wrong side.

XLA computes `sinh` and `cosh` by exponentials, which cancel near zeros. On a cut, the
sign of a zero says which side a number is on: `sqrt(-1 - 0j)` is -1j. `acosh` is not
here, since torch's formula for its gradient drops that sign for one of two roots.
"""

import functools

import jax.numpy as jnp
from jax import lax


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


_sqrt, _asin, _atanh = map(_on_both_sides, (jnp.sqrt, jnp.arcsin, jnp.arctanh))

sinh = _by_kind(jnp.sinh, _turned(jnp.sin))
cosh = _by_kind(jnp.cosh, lambda z: jnp.cos(_times_i(z)))
sqrt = _by_kind(jnp.sqrt, _sqrt)
rsqrt = _by_kind(lax.rsqrt, lambda z: 1 / _sqrt(z))
acos = _by_kind(jnp.arccos, _on_both_sides(jnp.arccos))
asin = _by_kind(jnp.arcsin, _asin)
asinh = _by_kind(jnp.arcsinh, _turned(_asin))
atan = _by_kind(jnp.arctan, _turned(_atanh))
atanh = _by_kind(jnp.arctanh, _atanh)
