"""Regularized incomplete gamma functions P(a, x) and Q(a, x) = 1 - P(a, x).

JAX sums a series with a limit of terms: for a = 10^7 and x = a it gives P = 3522. For
large a near x, the functions here use the uniform expansion of Temme (NIST's Digital
Library of Mathematical Functions, 8.12).
"""

import functools
import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax.rng.special_functions import polynomial

_LEAST, _DISTANCE = 200, 0.3  # expand if a >= _LEAST and |x - a| < _DISTANCE * a
_ORDERS, _TERMS = 7, 16  # enough for float64


@functools.cache
def _coefficients() -> np.ndarray:
  """Return d[k, n], the factors of ηⁿ / aᵏ."""
  count = 2 * _ORDERS + _TERMS + 2
  # x / a = 1 + Σ alpha[n] ηⁿ, where η² / 2 = x / a - 1 - log(x / a)
  alpha = [Fraction(0), Fraction(1)]
  for n in range(2, count):
    products = (alpha[i] * (n + 1 - i) * alpha[n + 1 - i] for i in range(2, n))
    alpha.append((alpha[n - 1] - sum(products)) / (n + 1))
  first = [Fraction(-1, 3), *[(n + 2) * alpha[n + 2] for n in range(1, count - 2)]]
  rows, stirling = [first], Fraction(1)
  for k in range(1, _ORDERS):
    stirling *= -(2 * k + 1)
    factor = stirling * alpha[2 * k + 1]
    rows.append([factor * first[n] + (n + 2) * d for n, d in enumerate(rows[-1][2:])])
  return np.array([row[:_TERMS] for row in rows], np.float64)


def _expand(a, distance, sign):
  """Compute P (sign -1) or Q (sign 1) for x = a (1 + distance)."""
  inverse = 1 / (2 + distance)
  ratio = distance * inverse
  series = polynomial([1 / (2 * n + 3) for n in range(12)], ratio * ratio)
  # distance - log1p(distance) = η² / 2, without cancellation near 0
  eta = distance * jnp.sqrt(2 * inverse * (1 - 2 * ratio * inverse * series))
  terms = [polynomial([float(d) for d in row], eta) for row in _coefficients()]
  rest = jnp.exp(-a * eta * eta / 2) * polynomial(terms, 1 / a)
  tail = lax.erfc(sign * eta * jnp.sqrt(a / 2)) / 2
  return tail + sign * rest / jnp.sqrt(2 * math.pi * a)


def _with_expansion(function, sign):
  def incomplete_gamma(a, x):
    a, x = jnp.broadcast_arrays(a, x)
    is_near = (a >= _LEAST) & (jnp.abs(x - a) < _DISTANCE * a)
    others = function(jnp.where(is_near, 1, a), jnp.where(is_near, 1, x))
    distance = jnp.where(is_near, (x - a) / a, 0)
    limit = jnp.where(x < math.inf, (1 + sign) / 2, math.nan)
    result = jnp.where(is_near, _expand(a, distance, sign), others)
    result = jnp.where((a == 0) & (x > 0), (1 - sign) / 2, result)
    return jnp.where(a == math.inf, limit, result)

  return incomplete_gamma


lower = _with_expansion(lax.igamma, -1)
upper = _with_expansion(lax.igammac, 1)
