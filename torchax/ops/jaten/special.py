"""Gamma and zeta families, error functions, and orthogonal polynomials.

Integers are computed in the default dtype, half precision in float32. Bessel functions
are in `bessel.py`; `erf`, `sinc` and `xlogy` are in `pointwise.py`.
"""

import functools
import math

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.scipy import special

from torchax.core.static_values import StaticValue
from torchax.ops.builtin import Kind, op
from torchax.ops.jaten import _incomplete_gamma
from torchax.ops.jaten._arguments import require_no_bool
from torchax.ops.promotion import promote_to_float
from torchax.registry.names import aten
from torchax.rng.special_functions import polynomial


def chebyshev(coefficients: tuple[float, ...], t: jax.Array) -> jax.Array:
  """Evaluate Σ cₖ Tₖ(t) for -1 ≤ t ≤ 1, by Clenshaw's recurrence."""
  last = before_last = jnp.zeros_like(t)
  for coefficient in reversed(coefficients[1:]):
    last, before_last = coefficient + 2 * t * last - before_last, last
  return coefficients[0] + t * last - before_last


def in_floats(function):
  """Make a function promote its operands to one float dtype, at least float32.

  The result is converted to the promoted dtype.
  """

  @functools.wraps(function)
  def with_float_operands(*operands):
    arrays = promote_to_float(*operands)
    dtype = arrays[0].dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    return function(*(array.astype(wide) for array in arrays)).astype(dtype)

  return with_float_operands


# --- Gamma and zeta -----------------------------------------------------------------


@op(aten.lgamma, aten.special_gammaln)
@in_floats
def _aten_lgamma(self):
  """Compute log |Γ|; the zeros at 1 and 2 are exact, where XLA is off by 5e-7."""
  result = lax.lgamma(self)
  is_zero = (self == 1) | (self == 2)
  return result - lax.stop_gradient(jnp.where(is_zero, result, 0))


@op(aten.digamma, aten.special_digamma, aten.special_psi)
@in_floats
def _aten_digamma(self):
  """Compute digamma; as in torch, a signed zero gives infinity of opposite sign."""
  pole = -jnp.copysign(jnp.asarray(math.inf, self.dtype), self)
  return jnp.where(self == 0, pole, lax.digamma(self))


def _cotangent(x):
  """Compute cot(πx), accurate near its poles and zeros."""
  offset = x - jnp.round(x)
  magnitude = jnp.abs(offset)
  steep = 1 / jnp.tan(math.pi * jnp.minimum(magnitude, 0.25))
  flat = jnp.tan(math.pi * (0.5 - magnitude))
  return jnp.sign(offset) * jnp.where(magnitude < 0.25, steep, flat)


def _cotangent_coefficients(n) -> list[float]:
  """Return the polynomial dⁿ/dxⁿ cot(πx) / πⁿ in c = cot(πx), from c' = -π (1 + c²).

  It is even or odd in c, so only the coefficients of c⁰, c², … or c¹, c³, … remain.
  """
  coefficients = [0, 1]
  for _ in range(n):
    slopes = [power * c for power, c in enumerate(coefficients)][1:]
    shifted = [0, 0, *slopes]
    coefficients = [-low - high for low, high in zip([*slopes, 0, 0], shifted)]
  return [float(coefficient) for coefficient in coefficients[(n + 1) % 2 :: 2]]


# Highest order computed by reflection; higher ones take too many coefficients.
HIGHEST_REFLECTED = 30
_MOST_COEFFICIENTS = HIGHEST_REFLECTED // 2 + 1


def _polygamma_parts(n: int) -> tuple:
  """Return the operands of ψ⁽ⁿ⁾: order, sign, factorial, derivative of the cotangent.

  The derivative is πⁿ, a flag for odd polynomials, and coefficients padded to one
  length for all n. It is left out above `HIGHEST_REFLECTED`.
  """
  factorial = float(math.factorial(n)) if n <= 170 else math.inf
  parts = (n + 1.0, 1.0 if n % 2 else -1.0, factorial)
  if n > HIGHEST_REFLECTED:
    return parts
  coefficients = _cotangent_coefficients(n)
  padding = [0.0] * (_MOST_COEFFICIENTS - len(coefficients))
  return (*parts, math.pi**n, 1.0 - n % 2, *coefficients, *padding)


def _derivative_of_cotangent(x, scale, is_odd, *coefficients):
  """Compute dⁿ/dxⁿ cot(πx) from the operands of `_polygamma_parts`."""
  cotangent = _cotangent(x)
  square, total = jnp.square(cotangent), 0.0
  for coefficient in reversed(coefficients):
    # The padding comes first: 0 times an infinite square would be NaN. The other
    # coefficients have one sign.
    total = jnp.where(total == 0, 0, total * square) + coefficient
  return scale * total * jnp.where(is_odd == 1, cotangent, 1)


def _prepare_polygamma(arguments: dict) -> None:
  n = arguments["n"]
  is_plain = type(n) is not int or n < 2  # 0 and 1 have other code
  arguments["n"] = StaticValue(n) if is_plain else _polygamma_parts(n)


# The Bernoulli numbers B₂, B₄, …, B₁₆.
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
_STEPS = 12


def _trigamma(x):
  """Compute ψ′(x) for x ≥ 0 by its recurrence and expansion (DLMF, 5.15.5, 5.15.8).

  It is infinite at the negative integers.
  """
  inverse = 1 / (x + _STEPS)
  square = jnp.square(inverse)
  expansion = inverse * (1 + inverse / 2 + square * polynomial(_BERNOULLI, square))
  steps = sum(1 / jnp.square(x + step) for step in reversed(range(_STEPS)))
  return jnp.where(x < 0, math.inf, expansion + steps)


@op(
  aten.polygamma,
  aten.special_polygamma,
  static=("n",),
  prepare=_prepare_polygamma,
)
def _aten_polygamma(n, self):
  """Compute the n-th derivative of digamma: (-1)^(n+1) n! ζ(n + 1, x) for n > 0.

  Negative x use reflection at 1/2 (DLMF, 5.15.6).
  """
  is_known = isinstance(n, int)
  if is_known and n == 0:
    return _aten_digamma(self)
  exponent, sign, factorial, *reflection = _polygamma_parts(n) if is_known else n

  def from_zeta(x):
    if is_known and n == 1:
      return _trigamma(x)
    return sign * factorial * _hurwitz_zeta(jnp.full_like(x, exponent), x)

  def reflected(x):
    is_left = (x < 0) & (x != jnp.floor(x))
    inside = jnp.where(is_left, x, -0.5)
    right = from_zeta(jnp.where(is_left, 1 - x, x))
    left = -math.pi * _derivative_of_cotangent(inside, *reflection) - sign * right
    return jnp.where(is_left, left, right)

  return in_floats(reflected if reflection else from_zeta)(self)


@op(aten.polygamma_.default, kind=Kind.TENSORS)
def _aten_polygamma_(self, n):
  """Call the functional variant, whose arguments have another order."""
  return torch.polygamma(n, self, out=self)


@op(aten.mvlgamma, aten.special_multigammaln)
def _aten_mvlgamma(self, p):
  """Compute log Γ_p(x) = p (p - 1)/4 log π + Σ lgamma(x - i/2), i = 0 … p - 1."""
  if p < 1:
    raise RuntimeError(f"p has to be greater than or equal to 1, but got p={p}.")
  require_no_bool("mvlgamma", self)

  def sum_of_lgamma(x):
    terms = sum(lax.lgamma(x - i / 2) for i in range(p))
    return terms + p * (p - 1) / 4 * math.log(math.pi)

  return in_floats(sum_of_lgamma)(self)


@op(aten.igamma, aten.special_gammainc)
def _aten_igamma(self, other):
  """Compute the regularized lower incomplete gamma function P(self, other)."""
  return in_floats(_incomplete_gamma.lower)(self, other)


@op(aten.igammac, aten.special_gammaincc)
def _aten_igammac(self, other):
  return in_floats(_incomplete_gamma.upper)(self, other)


def _zeta_of_positive(exponent, offset):
  """Compute ζ(s, q) for s > 1 and q > 0; use the first term if XLA overflows."""
  value = lax.zeta(exponent, offset)
  overflowed = jnp.isnan(value) & jnp.isfinite(exponent) & jnp.isfinite(offset)
  return jnp.where(overflowed, offset**-exponent, value)


def _zeta_of_negative(exponent, offset):
  """Compute ζ(s, q) for an integer s > 1 and a non-integer q < 0.

  The terms q + k on either side of 0 form a zeta function of the distance from q to a
  neighbouring integer; the terms beyond q are subtracted. So there is no loop from q to
  0, and values near a pole stay accurate.
  """
  above = offset - jnp.floor(offset)
  below = jnp.ceil(offset) - offset
  parity = jnp.where(exponent % 2 == 0, 1, -1).astype(offset.dtype)
  rest = _zeta_of_positive(exponent, below) - _zeta_of_positive(exponent, 1 - offset)
  return _zeta_of_positive(exponent, above) + parity * rest


def _hurwitz_zeta(exponent, offset):
  exponent, offset = jnp.broadcast_arrays(exponent, offset)
  is_pole = (offset <= 0) & (offset == jnp.floor(offset))
  is_negative = (offset < 0) & ~is_pole
  positive = _zeta_of_positive(exponent, jnp.where(offset > 0, offset, 1))
  # A valid argument where the value is unused keeps NaN out of gradients.
  negative = _zeta_of_negative(exponent, jnp.where(is_negative, offset, -0.5))
  negative = jnp.where(exponent == jnp.floor(exponent), negative, math.nan)
  value = jnp.where(is_pole, math.inf, jnp.where(is_negative, negative, positive))
  value = jnp.where(jnp.isnan(offset), offset, value)
  return jnp.where(exponent > 1, value, jnp.where(exponent == 1, math.inf, math.nan))


@op(aten.special_zeta)
def _aten_special_zeta(self, other):
  """Compute the Hurwitz zeta function Σ (k + other)^-self over k ≥ 0.

  It is infinite at other = 0, -1, -2, …
  """
  return in_floats(_hurwitz_zeta)(self, other)


# --- Error functions and entropies --------------------------------------------------


# Chebyshev coefficients of (1 + 2x) erfcx(x), t = (x - 3) / (x + 3), on x ≥ 0, fitted
# with mpmath at 60 digits.
# fmt: off
_ERFCX = (
  1.17756257419656, 0.005353904539615676, -0.09377550342284209, 0.05436652555744322,
  -0.018976596707845208, 0.004453426061462712, -0.0006335531710553147,
  1.7661719523171593e-05, 1.2841532864056671e-05, -2.0072285659059913e-06,
  -1.807522790414837e-07, 7.549828343825093e-08, 1.885668523838603e-09,
  -2.699519049798364e-09, -1.460079119939105e-11, 1.0361607445969489e-10,
  1.475715976623473e-12, -4.277340064396911e-12, -2.07922492859799e-13,
  1.8134502003176963e-13, 1.973425574544739e-14, -7.287943737592673e-15,
  -1.5169878690228116e-15, 2.3514112258781403e-16, 1.0006111691821667e-16,
)
# fmt: on
ERFCX_CENTRE = 3.0


def _erfcx(x):
  magnitude = jnp.abs(x)
  # (x - 3) / (x + 3) would be NaN at infinity.
  t = 1 - 2 * ERFCX_CENTRE / (magnitude + ERFCX_CENTRE)
  scaled = chebyshev(_ERFCX, t) / (1 + 2 * magnitude)
  return jnp.where(x < 0, 2 * jnp.exp(jnp.square(x)) - scaled, scaled)


@op(aten.special_erfcx)
@in_floats
def _aten_special_erfcx(self):
  """Compute exp(x²) erfc(x) without overflow of the factors."""
  return _erfcx(self)


@op(aten.erfinv, aten.special_erfinv)
@in_floats
def _aten_erfinv(self):
  """Refine XLA's approximation with one Newton step.

  Above 1/2 the step uses erfc, which keeps the digits that erf loses near ±1.
  """
  magnitude = jnp.abs(self)
  start = lax.erf_inv(magnitude)
  is_inside = magnitude < 1
  start = jnp.where(is_inside, start, 0)
  missing = jnp.where(magnitude < 0.5, magnitude - lax.erf(start), 0)
  excess = jnp.where(magnitude < 0.5, 0, lax.erfc(start) - (1 - magnitude))
  step = (missing + excess) * (math.sqrt(math.pi) / 2) * jnp.exp(jnp.square(start))
  result = jnp.where(is_inside, start + step, lax.erf_inv(magnitude))
  return jnp.where(self == 0, self, jnp.copysign(result, self))


@op(aten.special_ndtri)
@in_floats
def _aten_special_ndtri(self):
  return special.ndtri(self)


@op(aten.special_log_ndtr)
@in_floats
def _aten_special_log_ndtr(self):
  """Compute log(ndtr); below -1 from erfcx, which does not underflow."""
  half = self / math.sqrt(2)
  left = jnp.log(_erfcx(-jnp.minimum(half, 0)) / 2) - jnp.square(half)
  right = jnp.log1p(-lax.erfc(jnp.maximum(half, -1)) / 2)
  return jnp.where(self < -1, left, right)


@op(aten.special_entr)
@in_floats
def _aten_special_entr(self):
  """Compute -x log(x): 0 at 0, -inf below, NaN for NaN."""
  positive = jnp.where(self > 0, self, 1)
  entropy = jnp.where(self < 0, -math.inf, -positive * jnp.log(positive))
  return jnp.where(jnp.isnan(self), self, entropy)


@op(aten.special_xlog1py)
@in_floats
def _aten_special_xlog1py(self, other):
  """Compute x log1p(y); 0 * log1p(y) is 0 for every y except NaN."""
  product = jnp.where(self == 0, 0.0, self * jnp.log1p(other))
  return jnp.where(jnp.isnan(other), other, product)


@op(aten.logit, aten.special_logit)
def _aten_logit(self, eps=None):
  """Compute log(x / (1 - x)); with `eps`, clamp x to [eps, 1 - eps] first."""

  def log_odds(x):
    if eps is not None:
      x = jnp.clip(x, eps, 1 - eps)
    return jnp.log(x / (1 - x))

  return in_floats(log_odds)(self)


@op(aten.logit_backward)
def _aten_logit_backward(grad_output, self, eps=None):
  """Compute the gradient: NaN outside of [0, 1], or 0 outside of [eps, 1 - eps]."""

  def gradient(grad, x):
    slope = grad / (x * (1 - x))
    if eps is None:
      return jnp.where((x < 0) | (x > 1), math.nan, slope)
    return jnp.where((x < eps) | (x > 1 - eps), 0, slope)

  return in_floats(gradient)(grad_output, self)


# --- Orthogonal polynomials ---------------------------------------------------------


def _polynomial(x, n, first, step):
  """Evaluate the polynomial of degree n at x, by a three-term recurrence.

  Args:
    x: arguments, of any shape that broadcasts with `n`.
    n: degrees, truncated to integers; a negative degree gives 0.
    first: function from x to the polynomial of degree 1; degree 0 is 1.
    step: `step(k, x, current, previous)` returns degree k + 1 from k and k - 1.
  """

  def evaluate(x, n):
    x, n = jnp.broadcast_arrays(x, n)
    degree = n.astype(jnp.int32)
    one, linear = jnp.ones_like(x), first(x)
    start = jnp.where(degree == 0, one, jnp.where(degree == 1, linear, 0))

    def advance(k, state):
      previous, current, result = state
      following = step(k.astype(x.dtype), x, current, previous)
      return current, following, jnp.where(degree == k + 1, following, result)

    highest = jnp.max(degree, initial=0)
    return lax.fori_loop(1, highest, advance, (one, linear, start))[2]

  return in_floats(evaluate)(x, n)


def _chebyshev_step(k, x, current, previous):
  return 2 * x * current - previous


# Polynomial of degree 1, and polynomial of degree k + 1 from those of degrees k and
# k - 1, a and b: Abramowitz & Stegun, table 22.7.
POLYNOMIALS = {
  "chebyshev_polynomial_t": (lambda x: x, _chebyshev_step),
  "chebyshev_polynomial_u": (lambda x: 2 * x, _chebyshev_step),
  "chebyshev_polynomial_v": (lambda x: 2 * x - 1, _chebyshev_step),
  "chebyshev_polynomial_w": (lambda x: 2 * x + 1, _chebyshev_step),
  "hermite_polynomial_h": (lambda x: 2 * x, lambda k, x, a, b: 2 * (x * a - k * b)),
  "hermite_polynomial_he": (lambda x: x, lambda k, x, a, b: x * a - k * b),
  "laguerre_polynomial_l": (
    lambda x: 1 - x,
    lambda k, x, a, b: ((2 * k + 1 - x) * a - k * b) / (k + 1),
  ),
  "legendre_polynomial_p": (
    lambda x: x,
    lambda k, x, a, b: ((2 * k + 1) * x * a - k * b) / (k + 1),
  ),
}


def _register(name):
  first, step = POLYNOMIALS[name.removeprefix("shifted_")]
  is_shifted = name.startswith("shifted_")

  def lowering(x, n):
    # The shifted polynomials are defined on [0, 1].
    return _polynomial(2 * x - 1 if is_shifted else x, n, first, step)

  lowering.__name__ = lowering.__qualname__ = f"_aten_special_{name}"
  globals()[lowering.__name__] = op(getattr(aten, f"special_{name}"))(lowering)


for _name in POLYNOMIALS:
  _register(_name)
  if _name.startswith("chebyshev"):
    _register(f"shifted_{_name}")
