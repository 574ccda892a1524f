"""Special functions without cancellation, for samplers and their gradients.

With 64-bit types off, float32 must suffice. So differences of large logarithms (for
example of `lgamma`) are simplified by hand instead of subtracted. All functions are
elementwise on float32 or float64 arrays. `rejection.py`, `pathwise.py` and
`samplers.py` call them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Coefficients of 1/a², 1/a⁴, … in log(a) - digamma(a) - 1/(2a), and of 1/k, 1/k³, … in
# the error of Stirling's formula: B₂ₙ/2n and B₂ₙ/(2n(2n-1)) with Bernoulli numbers B
# (Abramowitz & Stegun 6.3.18 and 6.1.42).
_DIGAMMA = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360)
# Both series have float64 precision from here on.
_LARGE = 12

_SMALL_STIRLING_ERRORS = [0.0] + [
  math.lgamma(k + 1) - (k * math.log(k) - k + 0.5 * math.log(2 * math.pi * k))
  for k in range(1, _LARGE)
]


def polynomial(coefficients, x):
  """Evaluate a polynomial by Horner's rule; the constant is first."""
  value = jnp.full_like(x, coefficients[-1])
  for coefficient in reversed(coefficients[:-1]):
    value = value * x + coefficient
  return value


def _terms(x, for_float32: int, for_float64: int) -> int:
  return for_float64 if x.dtype == jnp.float64 else for_float32


def log1p_minus(x):
  """Compute log(1 + x) - x for x > -1, with full relative precision at 0.

  With y = x / (2 + x) it equals -xy + 2 (y³/3 + y⁵/5 + …).
  """
  near = jnp.abs(x) < 0.5
  y = jnp.where(near, x / (2 + x), 0)
  series = polynomial([1 / (2 * n + 3) for n in range(_terms(x, 8, 17))], y * y)
  return jnp.where(near, -x * y + 2 * y**3 * series, jnp.log1p(x) - x)


def exp_plus(s):
  """Compute s - (1 - exp(-s)) for s ≥ 0, with full relative precision at 0."""
  near = s < 0.5
  small = jnp.where(near, s, 0)
  n = _terms(s, 8, 14)
  series = polynomial([(-1) ** k / math.factorial(k + 2) for k in range(n)], small)
  return jnp.where(near, small * small * series, s + jnp.expm1(-s))


def log_minus_digamma(a):
  """Compute log(a) - digamma(a) for a > 0: positive, about 1/(2a).

  Apply the recurrence until the asymptotic series is precise; all terms are positive.
  """

  def step(i, total):
    return total - log1p_minus(1 / (a + i))

  below = lax.fori_loop(0, _LARGE, step, jnp.zeros_like(a))
  inverse = 1 / (a + _LARGE)
  square = inverse * inverse
  return below + inverse / 2 + square * polynomial(_DIGAMMA, square)


def _stirling_error(k):
  """Compute log(k!) - (k log(k) - k + log(2πk)/2) for k ≥ 1: Stirling's error."""
  large = jnp.maximum(k, _LARGE)
  series = polynomial(_STIRLING, 1 / (large * large)) / large
  table = jnp.asarray(_SMALL_STIRLING_ERRORS, k.dtype)
  exact = table[jnp.clip(k, 0, _LARGE - 1).astype(jnp.int32)]
  return jnp.where(k < _LARGE, exact, series)


def _deviance(k, mean_minus_k):
  """Compute k log(k / mean) + mean - k for k ≥ 1 (Loader 2000)."""
  return -k * log1p_minus(mean_minus_k / k)


def poisson_log_pmf(k, mean):
  """Compute the Poisson log probability of k ≥ 0 events.

  Saddle-point expansion of Loader (2000),
  https://www.r-project.org/doc/reports/CLoader-dbinom-2002.pdf.
  """
  safe = jnp.maximum(k, 1)
  value = -_stirling_error(safe) - _deviance(safe, mean - safe)
  value -= 0.5 * jnp.log(2 * np.pi * safe)
  return jnp.where(k < 1, -mean, value)


def binomial_log_pmf(k, n, p):
  """Compute the log probability of k of n successes, 0 ≤ k ≤ n and 0 < p < 1."""
  wins, losses = jnp.clip(k, 1, n - 1), jnp.clip(n - k, 1, n - 1)
  mean = n * p
  value = _stirling_error(n) - _stirling_error(wins) - _stirling_error(losses)
  value -= _deviance(wins, mean - wins) + _deviance(losses, wins - mean)
  value -= 0.5 * jnp.log(2 * np.pi * wins * (losses / n))
  value = jnp.where(k < 1, n * jnp.log1p(-p), value)
  return jnp.where(k > n - 1, n * jnp.log(p), value)


# The normal quantile ------------------------------------------------------------------

# A function of the tail probability v = P(Z > z), 0 < v ≤ 1/2. A float holds v with all
# digits, however small; the argument 1 - 2v of `erf_inv` has none left at 6 sigma.

# z / (1 - 2v) as polynomials: in w = -log(4v(1 - v)) up to `_MIDDLE`, following Giles
# (2012, "Approximating the erfinv function"); beyond it in sqrt(w), down to v = 2**-64.
# The constant is first. Interpolated at Chebyshev's points with 40 digits; the relative
# errors are below 6e-8.
_MIDDLE = 7.0
_CENTERS = (3.5, 4.6)
_NEAR = (
  *(2.46473371, 0.332846913, -0.00949939151, -0.000680400829, 0.000224281215),
  *(-2.24575e-5, -5.58759838e-7, 4.7905571e-7, -4.89451261e-8, -3.45714967e-9),
  8.25615425e-10,
)
_FAR = (
  *(6.2872823, 1.42875817, 0.000292549275, -0.00052050723, 0.000182183977),
  *(-6.39769261e-5, 1.34677522e-5, 5.3179922e-6, 4.70547167e-7, -3.19429688e-6),
  8.75762249e-7,
)

# Algorithm AS 241, PPND16 (Wichura 1988, https://doi.org/10.2307/2347330): numerators
# and denominators for the middle, the tail and the far tail; the constant is first.
_AS241 = (
  (
    *(3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3),
    *(1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4),
    *(3.3430575583588128105e4, 2.5090809287301226727e3),
  ),
  (
    *(1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3),
    *(2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4),
    5.2264952788528545610e3,
  ),
  (
    *(1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0),
    *(3.64784832476320460504e0, 1.27045825245236838258e0, 2.41780725177450611770e-1),
    *(2.27238449892691845833e-2, 7.74545014278341407640e-4),
  ),
  (
    *(1.0, 2.05319162663775882187e0, 1.67638483018380384940e0),
    *(6.89767334985100004550e-1, 1.48103976427480074590e-1, 1.51986665636164571966e-2),
    *(5.47593808499534494600e-4, 1.05075007164441684324e-9),
  ),
  (
    *(6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0),
    *(2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3),
    *(2.71155556874348757815e-5, 2.01033439929228813265e-7),
  ),
  (
    *(1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1),
    *(1.48753612908506148525e-2, 7.86869131145613259100e-4, 1.84631831751005468180e-5),
    *(1.42151175831644588870e-7, 2.04426310338993978564e-15),
  ),
)


def normal_above(v) -> jax.Array:
  """Compute z ≥ 0 with P(Z > z) = v for a standard normal Z.

  Args:
    v: probabilities from 2**-64 to 1/2, float32 or float64, of any shape.
  """
  return _quantile_in_float64(v) if v.dtype == jnp.float64 else _quantile_in_float32(v)


def _quantile_in_float32(v):
  w = -jnp.log(4 * v * (1 - v))
  near = w < _MIDDLE
  t = jnp.where(near, w - _CENTERS[0], jnp.sqrt(w) - _CENTERS[1])
  ratio = _by_region(t, [near], (_NEAR, _FAR))
  return ratio * (1 - 2 * v)


def _quantile_in_float64(v):
  q = 0.5 - v
  r = jnp.sqrt(-jnp.log(v))
  near, middle = q <= 0.425, r <= 5
  t = jnp.where(near, 0.180625 - q * q, r - jnp.where(middle, 1.6, 5.0))
  top = _by_region(t, [near, middle], _AS241[0::2])
  bottom = _by_region(t, [near, middle], _AS241[1::2])
  return jnp.where(near, q, 1) * top / bottom


def _by_region(t, regions, coefficients):
  """Evaluate per element the polynomial of its first true region.

  Args:
    t: the argument.
    regions: arrays of bools.
    coefficients: one row per region and one for the rest; the constant is first.
  """
  value = jnp.zeros_like(t)
  for column in reversed(list(zip(*coefficients))):
    *firsts, chosen = (np.asarray(c, t.dtype) for c in column)
    for region, coefficient in reversed(list(zip(regions, firsts))):
      chosen = jnp.where(region, coefficient, chosen)
    value = value * t + chosen
  return value
