"""Pathwise gradients: derivatives of samples with respect to parameters.

For a sample x with distribution function F(x; a), dx/da = -(∂F/∂a) / (∂F/∂x) (implicit
reparameterisation, https://arxiv.org/abs/1805.08498). For gamma and beta samples the
derivative of F is an integral over one of the tails,

  ∂F/∂a = ∫₀ˣ (log t - E log T) f(t) dt = -∫ₓ (log t - E log T) f(t) dt.

We integrate over the tail where log t - E log T keeps its sign, to avoid cancellation.
Let s = exp(u) be the distance from x. As a function of u the integrand is smooth at all
scales, and the trapezoidal rule converges geometrically. The result has the dtype's
precision for parameters from 1e-6 to 1e8 and more. `rejection.py` draws the samples.
"""

import jax
import jax.numpy as jnp
from jax import lax

from torchax.rng.special_functions import exp_plus, log1p_minus, log_minus_digamma

# Bisections of [log(bound) - _SPAN, log(bound)] in `_log_upper_limit`.
_SPAN, _BISECTIONS = 60.0, 10


def _resolution(dtype) -> tuple[float, int]:
  """Return (-log of the negligible part of an integral, number of nodes)."""
  return (40.0, 320) if dtype == jnp.float64 else (18.0, 160)


def _log_upper_limit(exponent, bound, scale):
  """Return log of an s where s exp(exponent(s)) is negligible; bisect from `bound`."""
  depth = _resolution(bound.dtype)[0]

  def halve(_, interval):
    low, high = interval
    middle = (low + high) / 2
    s = jnp.exp(middle)
    is_negligible = exponent(s) + jnp.log(jnp.maximum(s / scale, 1)) < -depth
    return jnp.where(is_negligible, low, middle), jnp.where(is_negligible, middle, high)

  high = jnp.log(bound)
  return lax.fori_loop(0, _BISECTIONS, halve, (high - _SPAN, high))[1]


def _integrate(weight, exponent, bound, scale):
  """Compute ∫ weight(s) exp(exponent(s)) ds over s > 0.

  Args:
    weight, exponent: functions of s; the exponent is 0 at 0 and decreases.
    bound: an s at which the integrand is negligible.
    scale: below this s the integrand changes slowly, if it is not yet negligible.
  """
  depth, nodes = _resolution(bound.dtype)
  high = _log_upper_limit(exponent, bound, scale)
  low = jnp.minimum(high - jnp.log(depth), jnp.log(scale)) - depth
  step = (high - low) / nodes

  def add(i, total):
    s = jnp.exp(high - i * step)
    return total + weight(s) * s * jnp.exp(exponent(s))

  return step * lax.fori_loop(0, nodes + 1, add, jnp.zeros_like(bound))


def _is_tiny(x):
  """Return True where x is negligible beside 1; at 1e-38 the integrals overflow."""
  return x < jnp.finfo(x.dtype).eps ** 2


def _near_zero(alpha, x, digamma_of_total):
  """Compute dx/dα for a tiny x, where F(x; α) is proportional to a power of x."""
  log_x = jnp.log(jnp.maximum(x, jnp.finfo(x.dtype).tiny))
  return x * ((lax.digamma(alpha + 1) - digamma_of_total - log_x) / alpha)


def _log_ratio(x, y):
  """Compute log(x / y), precise even if x and y are almost equal."""
  relative = (x - y) / y
  near = jnp.abs(relative) < 0.5
  return jnp.where(near, jnp.log1p(jnp.where(near, relative, 0)), jnp.log(x / y))


def _gamma_lower_tail(alpha, x, excess):
  """Compute dx/dα by the lower tail, t = x exp(-s); excess = log x - E log T < 0."""
  exponent = lambda s: (x - alpha) * s - x * exp_plus(s)  # noqa: E731
  depth = _resolution(x.dtype)[0]
  return x * _integrate(
    lambda s: s - excess, exponent, bound=(depth + x) / alpha, scale=1 / alpha
  )


def _gamma_upper_tail(alpha, x, excess):
  """Compute dx/dα by the upper tail, t = x + s; excess > 0."""

  def exponent(s):
    ratio = s / x
    near = (alpha - x - 1) * ratio + (alpha - 1) * log1p_minus(ratio)
    return jnp.where(ratio < 1, near, (alpha - 1) * jnp.log1p(ratio) - s)

  depth = _resolution(x.dtype)[0]
  return _integrate(
    lambda s: jnp.log1p(s / x) + excess, exponent, bound=2 * depth + x, scale=x
  )


def gamma_gradient(alpha, x) -> jax.Array:
  """Compute dx/dα of a Gamma(α) sample x, in x's dtype; the arrays broadcast."""
  dtype = x.dtype
  wide = jnp.promote_types(dtype, jnp.float32)
  alpha, x = jnp.broadcast_arrays(alpha.astype(wide), x.astype(wide))
  is_tiny, near_zero = _is_tiny(x), _near_zero(alpha, x, 0)
  x = jnp.where(is_tiny, 1, x)
  excess = _log_ratio(x, alpha) + log_minus_digamma(alpha)
  is_lower = excess < 0
  # Each tail is computed for all elements; unused ones get valid dummy arguments.
  lower = _gamma_lower_tail(
    jnp.where(is_lower, alpha, 2), jnp.where(is_lower, x, 1), jnp.minimum(excess, 0)
  )
  upper = _gamma_upper_tail(
    jnp.where(is_lower, 1, alpha), jnp.where(is_lower, 1, x), jnp.maximum(excess, 0)
  )
  gradient = jnp.where(is_lower, lower, upper)
  return jnp.where(is_tiny, near_zero, gradient).astype(dtype)


def _beta_exponent(a, b, odds):
  """Return s ↦ -as + (b - 1) log(1 + odds (1 - exp(-s))), precise near 0.

  Near 0 the linear term is computed separately.
  """

  def exponent(s):
    z = odds * -jnp.expm1(-s)
    near = (b * odds - a - odds) * s - (b - 1) * odds * exp_plus(s)
    near += (b - 1) * log1p_minus(jnp.minimum(z, 1))
    return jnp.where(z < 1, near, (b - 1) * jnp.log1p(z) - a * s)

  return exponent


def _beta_tail(weight, a, b, odds):
  """Integrate weight(s) times exp of `_beta_exponent`."""
  depth = _resolution(a.dtype)[0]
  bound = (depth + jnp.maximum(b - 1, 0) * jnp.log1p(odds)) / a
  return _integrate(weight, _beta_exponent(a, b, odds), bound, scale=1 / odds)


def dirichlet_gradient(x, alpha, total) -> jax.Array:
  """Compute dx/dα / (1 - x) of a Beta(α, total - α) sample x; total - α is constant.

  x is the proportion with parameter α in a Dirichlet sample, and `total` is the sum of
  the parameters. The other proportions shrink by a common factor. The arrays broadcast;
  the result has x's dtype.
  """
  dtype = x.dtype
  wide = jnp.promote_types(dtype, jnp.float32)
  x, alpha, total = jnp.broadcast_arrays(*(v.astype(wide) for v in (x, alpha, total)))
  beta, is_one = total - alpha, x == 1
  is_tiny = _is_tiny(x * jnp.maximum(beta, 1))
  near_zero = _near_zero(alpha, x, lax.digamma(total))
  x = jnp.where(is_tiny, 0.5, x)
  odds = x / jnp.where(is_one, 1, 1 - x)
  # log(x / mean); for x near 1 from 1 - x and 1 - mean.
  near_one = jnp.log1p(beta / alpha) + jnp.log1p(-(1 - x))
  excess = jnp.where(x > 0.5, near_one, _log_ratio(x * total, alpha))
  excess += log_minus_digamma(alpha) - log_minus_digamma(total)
  is_lower = excess < 0
  if_lower = lambda value: jnp.where(is_lower, value, 1)  # noqa: E731
  if_upper = lambda value: jnp.where(is_lower, 1, value)  # noqa: E731
  lower = if_lower(odds) * _beta_tail(
    lambda s: s - jnp.minimum(excess, 0), *map(if_lower, (alpha, beta, odds))
  )
  inverse = if_upper(1 / odds)
  upper = _beta_tail(
    lambda s: jnp.log1p(-inverse * jnp.expm1(-s)) + jnp.maximum(excess, 0),
    if_upper(beta),
    if_upper(alpha),
    inverse,
  )
  gradient = jnp.where(is_one, excess / beta, jnp.where(is_lower, lower, upper))
  return jnp.where(is_tiny, near_zero, gradient).astype(dtype)


@jax.custom_jvp
def gamma_sample(alpha, sample):
  """Return `sample`; its JVP is the pathwise derivative with respect to `alpha`."""
  return sample


@gamma_sample.defjvp
def _gamma_sample_jvp(primals, tangents):
  alpha, sample = primals
  gradient = gamma_gradient(alpha, sample)
  return sample, (gradient * tangents[0]).astype(sample.dtype)


@jax.custom_jvp
def dirichlet_sample(alpha, sample):
  """Return `sample`, proportions on the last axis; its JVP is as in `gamma_sample`."""
  return sample


@dirichlet_sample.defjvp
def _dirichlet_sample_jvp(primals, tangents):
  alpha, sample = primals
  if not alpha.ndim:
    return sample, jnp.zeros_like(sample)
  gradient = dirichlet_gradient(sample, alpha, alpha.sum(-1, keepdims=True))
  tangent = gradient * tangents[0]
  tangent = tangent - sample * tangent.sum(-1, keepdims=True)
  return sample, tangent.astype(sample.dtype)
