"""Small special functions without cancellation, for samplers and their gradients.

Float32 has to do where 64-bit types are off, so differences of large logarithms (of
`lgamma`, say) are taken apart: what cancels does so on paper. All functions work
element by element on float32 or float64 arrays.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

# Coefficients of 1/a², 1/a⁴, … in log(a) - digamma(a) - 1/(2a), and of 1/k, 1/k³, …
# in the error of Stirling's formula: Bernoulli numbers, B₂ₙ/2n and B₂ₙ/(2n(2n-1))
# (Abramowitz & Stegun 6.3.18 and 6.1.42).
_DIGAMMA = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360)
# Both series are good to float64 from here on.
_LARGE = 12

_SMALL_STIRLING_ERRORS = [0.0] + [
  math.lgamma(k + 1) - (k * math.log(k) - k + 0.5 * math.log(2 * math.pi * k))
  for k in range(1, _LARGE)
]


def _polynomial(coefficients, x):
  """Horner's rule; the constant comes first."""
  value = jnp.full_like(x, coefficients[-1])
  for coefficient in reversed(coefficients[:-1]):
    value = value * x + coefficient
  return value


def _terms(x, for_float32: int, for_float64: int) -> int:
  return for_float64 if x.dtype == jnp.float64 else for_float32


def log1p_minus(x):
  """log(1 + x) - x for x > -1, to full relative precision at 0.

  With y = x / (2 + x) it is -xy + 2 (y³/3 + y⁵/5 + …).
  """
  near = jnp.abs(x) < 0.5
  y = jnp.where(near, x / (2 + x), 0)
  series = _polynomial([1 / (2 * n + 3) for n in range(_terms(x, 8, 17))], y * y)
  return jnp.where(near, -x * y + 2 * y**3 * series, jnp.log1p(x) - x)


def exp_plus(s):
  """s - (1 - exp(-s)) for s ≥ 0, to full relative precision at 0."""
  near = s < 0.5
  small = jnp.where(near, s, 0)
  n = _terms(s, 8, 14)
  series = _polynomial([(-1) ** k / math.factorial(k + 2) for k in range(n)], small)
  return jnp.where(near, small * small * series, s + jnp.expm1(-s))


def log_minus_digamma(a):
  """log(a) - digamma(a) for a > 0: positive, about 1/(2a).

  By its recurrence up to where the asymptotic series is good; all terms are positive.
  """

  def step(i, total):
    return total - log1p_minus(1 / (a + i))

  below = lax.fori_loop(0, _LARGE, step, jnp.zeros_like(a))
  inverse = 1 / (a + _LARGE)
  square = inverse * inverse
  return below + inverse / 2 + square * _polynomial(_DIGAMMA, square)


def _stirling_error(k):
  """log(k!) less Stirling's formula k log(k) - k + log(2πk)/2, for k ≥ 1."""
  large = jnp.maximum(k, _LARGE)
  series = _polynomial(_STIRLING, 1 / (large * large)) / large
  table = jnp.asarray(_SMALL_STIRLING_ERRORS, k.dtype)
  exact = table[jnp.clip(k, 0, _LARGE - 1).astype(jnp.int32)]
  return jnp.where(k < _LARGE, exact, series)


def _deviance(k, mean_minus_k):
  """k log(k / mean) + mean - k for k ≥ 1 (Loader 2000)."""
  return -k * log1p_minus(mean_minus_k / k)


def poisson_log_pmf(k, mean):
  """Logarithm of the probability of k ≥ 0 events; by the saddle point of Loader (2000),
  https://www.r-project.org/doc/reports/CLoader-dbinom-2002.pdf."""
  safe = jnp.maximum(k, 1)
  value = -_stirling_error(safe) - _deviance(safe, mean - safe)
  value -= 0.5 * jnp.log(2 * np.pi * safe)
  return jnp.where(k < 1, -mean, value)


def binomial_log_pmf(k, n, p):
  """Logarithm of the probability of k of n successes, 0 ≤ k ≤ n and 0 < p < 1."""
  wins, losses = jnp.clip(k, 1, n - 1), jnp.clip(n - k, 1, n - 1)
  mean = n * p
  value = _stirling_error(n) - _stirling_error(wins) - _stirling_error(losses)
  value -= _deviance(wins, mean - wins) + _deviance(losses, wins - mean)
  value -= 0.5 * jnp.log(2 * np.pi * wins * (losses / n))
  value = jnp.where(k < 1, n * jnp.log1p(-p), value)
  return jnp.where(k > n - 1, n * jnp.log(p), value)
