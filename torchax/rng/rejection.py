"""Samplers by rejection or counting: Poisson, binomial, gamma and Dirichlet.

Like `samplers.py` these are pure functions of a key. Each attempt has its own key and
draws for the whole array, until every element has accepted a proposal. No 64-bit types
are needed: `special_functions.py` computes acceptance to float32's last bits, at means
of 10 as of 10⁷. Outside of a distribution's domain the result is NaN. `pathwise.py` has
the gradients of gamma and Dirichlet samples.
"""

import jax
import jax.numpy as jnp
from jax import lax

from torchax.rng import pathwise
from torchax.rng.samplers import normal, standard_exponential
from torchax.rng.special_functions import binomial_log_pmf, log1p_minus, poisson_log_pmf
from torchax.rng.threefry import with_unrolled_key
from torchax.rng.uniform import halves

# Below this mean counting is faster, and the rejection methods do not apply.
_FEW = 10.0


def _until_accepted(key, like, propose):
  """Return the first accepted proposal of each element.

  Args:
    key: key of the whole draw; attempt i has the key `fold_in(key, i)`.
    like: an array with the shape and dtype of the result.
    propose: `key -> (values, accepted)`.
  """

  def attempt(state):
    tries, values, done = state
    proposed, accepted = propose(jax.random.fold_in(key, tries))
    return tries + 1, jnp.where(done, values, proposed), done | accepted

  start = (jnp.uint32(0), jnp.zeros_like(like), jnp.zeros(like.shape, bool))
  return lax.while_loop(lambda state: ~state[2].all(), attempt, start)[1]


def _count_arrivals(key, limit, gap):
  """Count arrivals up to `limit`; `gap` maps an Exp(1) sample to a distance."""

  def arrive(state):
    arrivals, position, count = state
    arrival_key = jax.random.fold_in(key, arrivals)
    drawn = standard_exponential(arrival_key, limit.shape, limit.dtype)
    position = position + gap(drawn)
    return arrivals + 1, position, count + (position <= limit)

  start = (jnp.uint32(0), jnp.zeros_like(limit), jnp.zeros_like(limit))
  return lax.while_loop(lambda state: (state[1] <= limit).any(), arrive, start)[2]


def _transformed_rejection(key, log_pmf, center, slope, bend, log_scale, limit):
  """Sample a count from a bell-shaped distribution (Hörmann 1993).

  The proposals of this transformed rejection are (2 bend / (1/2 - |u|) + slope) u +
  center, with u uniform over (-1/2, 1/2). A proposal is accepted with a probability
  proportional to its probability mass.
  """

  def propose(key):
    upper, room = halves(jax.random.fold_in(key, 0), center.shape, center.dtype)
    u = jnp.where(upper, 0.5 - room, room - 0.5)
    log_v = -standard_exponential(
      jax.random.fold_in(key, 1), center.shape, center.dtype
    )
    k = jnp.floor((2 * bend / room + slope) * u + center)
    possible = (k >= 0) & (k <= limit)
    chance = log_pmf(jnp.where(possible, k, jnp.floor(center)))
    hat = log_v + log_scale - jnp.log(bend / (room * room) + slope)
    return k, possible & (hat <= chance)

  return _until_accepted(key, center, propose)


def _many_events(key, mean):
  """Sample Poisson with mean ≥ 10 (https://doi.org/10.1016/0167-6687(93)90997-4)."""
  slope = 0.931 + 2.53 * jnp.sqrt(mean)
  return _transformed_rejection(
    key,
    lambda k: poisson_log_pmf(k, mean),
    center=mean + 0.43,
    slope=slope,
    bend=-0.059 + 0.02483 * slope,
    log_scale=jnp.log(1.1239 + 1.1328 / (slope - 3.4)),
    limit=jnp.inf,
  )


@with_unrolled_key
def poisson(key, rate, dtype) -> jax.Array:
  """Sample the Poisson distribution; NaN for a rate below 0.

  For small rates, count arrivals in a unit of time.
  """
  wide = jnp.promote_types(dtype, jnp.float32)
  rate = lax.stop_gradient(rate).astype(wide)
  finite = (rate >= 0) & (rate < jnp.inf)
  is_small = rate < _FEW
  few_key, many_key = jax.random.split(key)
  small = jnp.where(finite & is_small, rate, 0)
  few = _count_arrivals(few_key, small, lambda drawn: drawn)
  many = _many_events(many_key, jnp.where(finite & ~is_small, rate, _FEW))
  counted = jnp.where(is_small, few, many)
  outside = jnp.where(rate >= 0, rate, jnp.nan)
  return jnp.where(finite, counted, outside).astype(dtype)


def _many_successes(key, n, p):
  """Sample binomial, np ≥ 10, p ≤ 1/2 (https://doi.org/10.1080/00949659308811496)."""
  deviation = jnp.sqrt(n * p * (1 - p))
  slope = 1.15 + 2.53 * deviation
  mode = jnp.floor((n + 1) * p)
  log_pmf = lambda k: binomial_log_pmf(k, n, p)  # noqa: E731
  return _transformed_rejection(
    key,
    log_pmf,
    center=n * p + 0.5,
    slope=slope,
    bend=-0.0873 + 0.0248 * slope + 0.01 * p,
    log_scale=jnp.log((2.83 + 5.1 / slope) * deviation) + log_pmf(mode),
    limit=n,
  )


@with_unrolled_key
def binomial(key, count, prob, dtype) -> jax.Array:
  """Sample the number of successes in `count` trials.

  The result is NaN for a count below 0 or a probability outside of [0, 1]; torch on the
  CPU clamps both. For few successes, count by the gaps between them.
  """
  wide = jnp.promote_types(dtype, jnp.float32)
  count, prob = jnp.broadcast_arrays(*lax.stop_gradient((count, prob)))
  count, prob = count.astype(wide), prob.astype(wide)
  flipped = prob > 0.5
  rare = jnp.where(flipped, 1 - prob, prob)
  proper = (count > 0) & (count < jnp.inf) & (prob > 0) & (prob < 1)
  is_small = count * rare < _FEW
  n = jnp.where(proper & is_small, count, 0)
  p = jnp.where(proper & is_small, rare, 0.5)
  few_key, many_key = jax.random.split(key)
  gap = lambda drawn: jnp.floor(drawn / -jnp.log1p(-p)) + 1  # noqa: E731
  few = _count_arrivals(few_key, n, gap)
  n = jnp.where(proper & ~is_small, count, 4 * _FEW)
  many = _many_successes(many_key, n, jnp.where(proper & ~is_small, rare, 0.5))
  counted = jnp.where(is_small, few, many)
  counted = jnp.where(flipped, count - counted, counted)
  sure = jnp.where((count > 0) & (prob > 0), count, 0)
  is_possible = (count >= 0) & (prob >= 0) & (prob <= 1)
  sure = jnp.where(is_possible, sure, jnp.nan)
  return jnp.where(proper, counted, sure).astype(dtype)


def _gamma_parts(key, alpha):
  """Return g and l such that g exp(l) is Gamma(alpha).

  g is Gamma(alpha) for alpha ≥ 1, else Gamma(alpha + 1). l corrects the latter without
  underflow (Marsaglia & Tsang 2000, https://doi.org/10.1145/358407.358414).
  """
  boost_key, key = jax.random.split(key)
  valid = (alpha >= 0) & (alpha < jnp.inf)
  is_small = alpha < 1
  shifted = jnp.where(valid, alpha + is_small, 1) - 1 / 3
  scale = 1 / (3 * jnp.sqrt(shifted))

  def propose(key):
    x = normal(jax.random.fold_in(key, 0), alpha.shape, alpha.dtype)
    log_u = -standard_exponential(jax.random.fold_in(key, 1), alpha.shape, alpha.dtype)
    t = jnp.maximum(scale * x, -1)
    # x²/2 + d (1 - v + log v) with v = (1 + t)³
    chance = 0.5 * x * x + shifted * (3 * log1p_minus(t) - t * t * (3 + t))
    return shifted * (1 + t) ** 3, (t > -1) & (log_u < chance)

  base = _until_accepted(key, alpha, propose)
  base = jnp.where(valid, base, jnp.where(alpha > 0, alpha, jnp.nan))
  drawn = standard_exponential(boost_key, alpha.shape, alpha.dtype)
  boost = jnp.maximum(-drawn / alpha, jnp.finfo(alpha.dtype).min / 2)
  return base, jnp.where(is_small, boost, 0)


@with_unrolled_key
def standard_gamma(key, alpha, dtype) -> jax.Array:
  """Sample Gamma(alpha) with rate 1, never zero, as torch does.

  The result is differentiable in alpha; it is NaN for an alpha below 0.
  """
  wide = alpha.astype(jnp.promote_types(dtype, jnp.float32))
  base, boost = _gamma_parts(key, lax.stop_gradient(wide))
  tiny = jnp.finfo(dtype).tiny
  drawn = jnp.maximum((base * jnp.exp(boost)).astype(dtype), tiny)
  return pathwise.gamma_sample(wide, drawn)


@with_unrolled_key
def dirichlet(key, alpha, dtype) -> jax.Array:
  """Sample proportions along the last axis, differentiable in alpha.

  They are between 0 and 1, never equal, so their logarithms are finite, as in torch.
  """
  wide = alpha.astype(jnp.promote_types(dtype, jnp.float32))
  base, boost = _gamma_parts(key, lax.stop_gradient(jnp.atleast_1d(wide)))
  weights = base * jnp.exp(boost - boost.max(-1, keepdims=True, initial=-jnp.inf))
  drawn = weights / weights.sum(-1, keepdims=True)
  limits = jnp.finfo(dtype)
  drawn = jnp.clip(drawn.astype(dtype), limits.tiny, 1 - limits.epsneg)
  return pathwise.dirichlet_sample(wide, drawn.reshape(alpha.shape))
