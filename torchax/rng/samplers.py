"""Samplers: pure functions `(key, shape, dtype, parameters) -> array`.

Numbers are drawn in the dtype that is asked for: 53 bits fill a float64, a uniform
bfloat16 or float16 is drawn as such, and a complex normal has variance 1 as in torch.
What is computed from a uniform number starts from a float32 at least and is rounded
once: from 7 random bits, a normal would take 128 values and have another mean.
Parameters may be arrays that broadcast to `shape`. What is drawn by rejection is in
`rejection.py`.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from torchax.rng.threefry import unrolled


@unrolled
def uniform(key, shape, dtype, low=0.0, high=1.0) -> jax.Array:
  """Uniform over [low, high). Complex: both parts are uniform, as in torch."""
  if jnp.issubdtype(dtype, jnp.complexfloating):
    real = _real_dtype(dtype)
    parts = uniform(key, (*shape, 2), real, low, high)
    return lax.complex(parts[..., 0], parts[..., 1])
  if _is_number(low, 0.0) and _is_number(high, 1.0):
    return jax.random.uniform(key, shape, dtype)
  wide = _wide(dtype)
  low, high = (lax.stop_gradient(jnp.asarray(bound, dtype)) for bound in (low, high))
  # Rounding must not reach the excluded bound, unless the interval is empty.
  below = jnp.maximum(jnp.nextafter(high, low), low)
  unit = jax.random.uniform(key, shape, wide)
  scaled = unit * (high.astype(wide) - low.astype(wide)) + low.astype(wide)
  return jnp.minimum(scaled.astype(dtype), below)


@unrolled
def fine_uniform(key, shape, dtype) -> jax.Array:
  """Uniform over [0, 1) in float32 or float64, with all digits also near 0.

  `uniform` has an absolute spacing, eps. Where small numbers decide (the least of many,
  a rare event) each gap between its numbers has to be filled.
  """
  coarse_key, fine_key = jax.random.split(key)
  coarse = jax.random.uniform(coarse_key, shape, dtype)
  step = jnp.finfo(dtype).eps
  fine = jax.random.uniform(fine_key, shape, dtype) * step
  # Above 1/2 the sum would round up to 1.
  return jnp.where(coarse < 0.5, coarse + fine, coarse)


@unrolled
def normal(key, shape, dtype, mean=0.0, std=1.0) -> jax.Array:
  """Normal; complex: variance `std`² split over both parts."""
  wide = _wide(dtype)
  drawn = jax.random.normal(key, shape, wide)
  if not (_is_number(mean, 0.0) and _is_number(std, 1.0)):
    drawn = drawn * jnp.asarray(std, wide) + jnp.asarray(mean, wide)
  return drawn.astype(dtype)


def log_normal(key, shape, dtype, mean=0.0, std=1.0) -> jax.Array:
  """The exponential of a normal with the given mean and standard deviation."""
  return jnp.exp(normal(key, shape, _wide(dtype), mean, std)).astype(dtype)


@unrolled
def bernoulli(key, shape, p) -> jax.Array:
  """True with probability p; bool."""
  dtype = jnp.float64 if getattr(p, "dtype", None) == jnp.float64 else jnp.float32
  return jax.random.uniform(key, shape, dtype) < jnp.asarray(p, dtype)


@unrolled
def integers(key, shape, dtype, low, high) -> jax.Array:
  """Integers uniform over [low, high), in any real dtype that holds them.

  The bounds are Python ints, which need not fit in the dtype, or arrays.
  """
  if dtype == jnp.bool_ or not jnp.issubdtype(dtype, jnp.integer):
    return integers(key, shape, _widest(), low, high).astype(dtype)
  if jnp.iinfo(dtype).bits < 32:
    # The remainder of 16 or 32 random bits would prefer the lower numbers.
    return integers(key, shape, jnp.int32, low, high).astype(dtype)
  if isinstance(high, int) and high > jnp.iinfo(dtype).max:
    # The bound itself does not fit in the dtype.
    if low == jnp.iinfo(dtype).min:
      return jax.random.bits(key, shape, _unsigned(dtype)).view(dtype)
    return low + integers(key, shape, _unsigned(dtype), 0, high - low).astype(dtype)
  return jax.random.randint(
    key, shape, jnp.asarray(low, dtype), jnp.asarray(high, dtype), dtype
  )


@unrolled
def permutation(key, n: int, dtype) -> jax.Array:
  """A random order of 0 … n-1."""
  return jax.random.permutation(key, n).astype(dtype)


def exponential(key, shape, dtype, rate=1.0) -> jax.Array:
  """Exponential with the given rate; never zero, as torch's.

  The least of many decides where `(p / q.exponential_()).argmax()` samples a token, so
  small numbers have all their digits.
  """
  wide = _wide(dtype)
  unit = fine_uniform(key, shape, wide)
  # 1 - u lies in (0, 1]; its logarithm's zero becomes the smallest positive number.
  drawn = -jnp.log1p(-unit) / jnp.asarray(rate, wide)
  return jnp.maximum(drawn.astype(dtype), jnp.finfo(dtype).tiny)


@unrolled
def cauchy(key, shape, dtype, median=0.0, sigma=1.0) -> jax.Array:
  """Cauchy with the given median and half width."""
  wide = _wide(dtype)
  unit = jax.random.cauchy(key, shape, wide)
  return (unit * jnp.asarray(sigma, wide) + jnp.asarray(median, wide)).astype(dtype)


def geometric(key, shape, dtype, p) -> jax.Array:
  """Number of trials up to the first success: 1, 2, …"""
  wide = _wide(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.float32
  unit = fine_uniform(key, shape, wide)
  trials = jnp.ceil(jnp.log1p(-unit) / jnp.log1p(-jnp.asarray(p, wide)))
  return jnp.maximum(trials, 1).astype(dtype)


@unrolled
def multinomial(key, weights, num_samples: int, replacement: bool) -> jax.Array:
  """Indices drawn in proportion to weights along the last axis, int32.

  With replacement by inversion of the cumulative weights. Without, the categories are
  in a race of exponential clocks and the first `num_samples` win
  (https://arxiv.org/abs/1903.06059).
  """
  weights = lax.stop_gradient(weights)  # indices have none, and XLA's steps no rule
  weights = weights.astype(jnp.promote_types(weights.dtype, jnp.float32))
  if not replacement:
    unit = fine_uniform(key, weights.shape, weights.dtype)
    arrival = jnp.where(weights > 0, jnp.log1p(-unit) / weights, -jnp.inf)
    return lax.top_k(arrival, num_samples)[1]
  rows = weights.reshape(-1, weights.shape[-1])
  drawn = _invert(key, rows, num_samples)
  return drawn.reshape(*weights.shape[:-1], num_samples)


# With more categories a float32 could not tell the cumulative weights of two apart.
_MOST_IN_A_BLOCK = 2048


def _invert(key, weights, num_samples: int) -> jax.Array:
  """Categories of weights (rows, n), as (rows, num_samples), with replacement.

  Many categories are drawn in two steps, a block of them and one of the block, each
  with a number of its own: one uniform number has too few digits for both.
  """
  rows, n = weights.shape
  if n <= _MOST_IN_A_BLOCK:
    return _find(key, weights, num_samples)
  size = math.isqrt(n - 1) + 1
  padded = jnp.pad(weights, ((0, 0), (0, size * size - n)))
  blocks = padded.reshape(rows, size, size)
  block_key, key = jax.random.split(key)
  block = _find(block_key, blocks.sum(-1), num_samples)
  cumulative = jnp.cumsum(blocks, axis=-1).reshape(rows, -1)
  start = block * size
  total = jnp.take_along_axis(cumulative, start + size - 1, axis=-1)
  points = _below(jax.random.uniform(key, total.shape, total.dtype), total)
  return _search(cumulative, points, start, size)


def _find(key, weights, num_samples: int) -> jax.Array:
  """Categories by inversion in one step."""
  cumulative = jnp.cumsum(weights, axis=-1)
  shape = (len(weights), num_samples)
  unit = jax.random.uniform(key, shape, weights.dtype)
  search = lambda row, at: jnp.searchsorted(row, at, side="right")  # noqa: E731
  return jax.vmap(search)(cumulative, _below(unit, cumulative[:, -1:]))


def _below(unit, total):
  """Points strictly below the total: no trailing category of weight 0 is hit."""
  return jnp.minimum(unit * total, jnp.nextafter(total, jnp.zeros_like(total)))


def _search(cumulative, points, start, size: int) -> jax.Array:
  """The first place from `start` on whose cumulative weight exceeds the point."""
  low, high = start, start + size - 1
  for _ in range(math.ceil(math.log2(size))):
    middle = (low + high) // 2
    exceeds = jnp.take_along_axis(cumulative, middle, axis=-1) > points
    low, high = jnp.where(exceeds, low, middle + 1), jnp.where(exceeds, middle, high)
  return low


def _is_number(value, expected: float) -> bool:
  return isinstance(value, int | float) and value == expected


def _wide(dtype):
  return jnp.promote_types(dtype, jnp.float32)


def _real_dtype(dtype):
  return jnp.finfo(dtype).dtype


def _widest():
  return jnp.int64 if jax.config.jax_enable_x64 else jnp.int32


def _unsigned(dtype):
  return jnp.dtype(f"uint{jnp.iinfo(dtype).bits}")
