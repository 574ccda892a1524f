"""Samplers: pure functions `(key, shape, dtype, parameters) -> array`.

Each sample is computed from 64 random bits, in float32 or wider, and rounded once. So
integers are uniform for any span, and tails reach probabilities of 2**-64. Parameters
may be arrays that broadcast to `shape`. Outside of a distribution's domain a float is
NaN and an integer is `no_integer`. `uniform.py` converts bits to numbers;
`rejection.py` has the samplers by rejection.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax.core.stable_sort import sort_with_positions
from torchax.rng.special_functions import normal_above
from torchax.rng.threefry import with_unrolled_key
from torchax.rng.uniform import halves, is_below, scale_to_integer, unit


@with_unrolled_key
def uniform(key, shape, dtype, low=0.0, high=1.0) -> jax.Array:
  """Sample uniformly over [low, high); complex: both parts, as in torch."""
  if jnp.issubdtype(dtype, jnp.complexfloating):
    real = _real_dtype(dtype)
    parts = uniform(key, (*shape, 2), real, low, high)
    return lax.complex(parts[..., 0], parts[..., 1])
  if _is_number(low, 0.0) and _is_number(high, 1.0):
    return unit(key, shape, dtype)
  wide = _wide(dtype)
  low, high = (lax.stop_gradient(jnp.asarray(bound, dtype)) for bound in (low, high))
  # Rounding must not give the excluded bound, unless the interval is empty.
  below = jnp.maximum(jnp.nextafter(high, low), low)
  drawn = unit(key, shape, wide)
  drawn = drawn * (high.astype(wide) - low.astype(wide)) + low.astype(wide)
  return jnp.minimum(drawn.astype(dtype), below)


@with_unrolled_key
def normal(key, shape, dtype, mean=0.0, std=1.0) -> jax.Array:
  """Sample the normal distribution; complex: variance `std`² split over both parts."""
  if jnp.issubdtype(dtype, jnp.complexfloating):
    parts = normal(key, (*shape, 2), _wide(_real_dtype(dtype))) * math.sqrt(0.5)
    drawn = lax.complex(parts[..., 0], parts[..., 1])
  else:
    upper, tail = halves(key, shape, _wide(dtype))
    drawn = normal_above(tail)
    drawn = jnp.where(upper, drawn, -drawn)
  if not (_is_number(mean, 0.0) and _is_number(std, 1.0)):
    std = jnp.asarray(std, _wide(_real_dtype(dtype)))
    drawn = drawn * jnp.where(std >= 0, std, jnp.nan) + jnp.asarray(mean, drawn.dtype)
  return drawn.astype(dtype)


def log_normal(key, shape, dtype, mean=0.0, std=1.0) -> jax.Array:
  """Sample the exponential of a normal with the given mean and standard deviation."""
  return jnp.exp(normal(key, shape, _wide(dtype), mean, std)).astype(dtype)


@with_unrolled_key
def bernoulli(key, shape, p) -> jax.Array:
  """Sample bools, True with probability p.

  p is clamped to [0, 1]; NaN is 0. It has the precision of Python's float or of its
  array's dtype.
  """
  return is_below(key, shape, p)


@with_unrolled_key
def integers(key, shape, dtype, low, high) -> jax.Array:
  """Sample integers uniformly over [low, high), in any real dtype.

  The bounds are arrays, or Python ints, which need not fit in the dtype.
  """
  if isinstance(low, int) and isinstance(high, int):
    return integers_from(key, shape, dtype, low, high - low)
  if dtype == jnp.bool_ or not jnp.issubdtype(dtype, jnp.integer):
    drawn = integers(key, shape, _widest(), low, high).astype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
      return drawn
    return jnp.where(jnp.asarray(low) < high, drawn, jnp.nan)
  if jnp.iinfo(dtype).bits < 32:
    return integers(key, shape, jnp.int32, low, high).astype(dtype)
  unsigned = _unsigned_dtype(dtype)
  low, high = jnp.asarray(low, dtype), jnp.asarray(high, dtype)
  drawn = scale_to_integer(key, shape, (high - low).astype(unsigned), unsigned).astype(
    dtype
  )
  return jnp.where(low < high, drawn + low, no_integer(dtype))


@with_unrolled_key
def integers_from(key, shape, dtype, low, span) -> jax.Array:
  """Sample the same integers as `integers` over [low, low + span).

  Args:
    low: a Python int, or a scalar array.
    span: an int of at least 1, or an int32 array with the bits of a uint32.
  """
  if dtype == jnp.bool_ or not jnp.issubdtype(dtype, jnp.integer):
    return integers_from(key, shape, _widest(), low, span).astype(dtype)
  bits = jnp.iinfo(dtype).bits
  if bits < 32:
    return integers_from(key, shape, jnp.int32, low, span).astype(dtype)
  if isinstance(span, int):
    word = jnp.uint32 if span <= 2**32 else _unsigned_dtype(dtype)
  else:
    word, span = jnp.uint32, span.astype(jnp.uint32)
  if isinstance(low, int):
    low = np.asarray(low % 2**bits)
  # Sums wrap around, so the lower bound modulo 2**bits gives the right result.
  return scale_to_integer(key, shape, span, word).astype(dtype) + low.astype(dtype)


def no_integer(dtype):
  """Return the integer used as NaN: the smallest one, or the largest unsigned one."""
  limits = jnp.iinfo(dtype)
  return np.asarray(limits.min or limits.max, dtype)


@with_unrolled_key
def permutation(key, n: int, dtype) -> jax.Array:
  """Sample a random permutation of 0 … n-1, the one of `jax.random.permutation`.

  Each round sorts by 32 random bits. Equal bits keep their order, so there are enough
  rounds that two elements rarely have equal bits in all of them.
  """
  order = jnp.arange(n)
  for _ in range(math.ceil(3 * math.log(max(1, n)) / math.log(2**32 - 1))):
    key, subkey = jax.random.split(key)
    _, positions = sort_with_positions(jax.random.bits(subkey, (n,)), 0)
    order = order[positions]
  return order.astype(dtype)


@with_unrolled_key
def standard_exponential(key, shape, dtype) -> jax.Array:
  """Sample the exponential with rate 1 in float32 or float64: in (0, 64 log(2)].

  Small samples have full relative precision, and so has the tail of large ones.
  """
  upper, tail = halves(key, shape, dtype)
  return -jnp.where(upper, jnp.log(tail), jnp.log1p(-tail))


def exponential(key, shape, dtype, rate=1.0) -> jax.Array:
  """Sample the exponential: zero for an infinite rate only, as in torch.

  Small samples have full relative precision: in `(p / q.exponential_()).argmax()`,
  which samples a token, the smallest of many decides.
  """
  wide = _wide(dtype)
  drawn = standard_exponential(key, shape, wide) * (1 / jnp.asarray(rate, wide))
  limits = jnp.finfo(dtype)
  # The smallest positive number that is not flushed to 0; float16 uses float32.
  least = limits.smallest_subnormal if dtype == jnp.float16 else limits.tiny
  return jnp.maximum(drawn.astype(dtype), jnp.where(jnp.isinf(rate), 0, least))


@with_unrolled_key
def cauchy(key, shape, dtype, median=0.0, sigma=1.0) -> jax.Array:
  """Sample the Cauchy distribution with the given median and half width."""
  wide = _wide(dtype)
  upper, tail = halves(key, shape, wide)
  drawn = 1 / jnp.tan(np.asarray(np.pi, wide) * tail)
  drawn = jnp.where(upper, drawn, -drawn)
  return (drawn * jnp.asarray(sigma, wide) + jnp.asarray(median, wide)).astype(dtype)


def geometric(key, shape, dtype, p) -> jax.Array:
  """Sample the number of trials up to the first success: 1, 2, …

  Integers are computed in the widest float dtype available.
  """
  is_float = jnp.issubdtype(dtype, jnp.floating)
  wide = _wide(dtype) if is_float else jnp.result_type(float)
  rate = -jnp.log1p(-jnp.asarray(p, wide))
  trials = jnp.maximum(jnp.ceil(standard_exponential(key, shape, wide) * (1 / rate)), 1)
  if not is_float:
    # The largest integer of the dtype that is exact in the float dtype.
    limit = jnp.iinfo(dtype).max
    most = np.asarray(limit, wide)
    most = most if int(most) <= limit else np.nextafter(most, np.asarray(0, wide))
    trials = jnp.minimum(trials, most)
  return trials.astype(dtype)


@with_unrolled_key
def multinomial(key, weights, num_samples: int, replacement: bool) -> jax.Array:
  """Sample indices with probabilities proportional to weights along the last axis.

  With replacement, invert the cumulative weights. Without, take the first
  `num_samples` arrivals in a race of exponential clocks, one per category
  (https://arxiv.org/abs/1903.06059).

  The result is int32 (..., num_samples), `no_integer` for rows of improper weights.
  """
  weights = lax.stop_gradient(weights)  # not every primitive below has a JVP rule
  weights = weights.astype(jnp.promote_types(weights.dtype, jnp.float32))
  if replacement:
    rows = weights.reshape(-1, weights.shape[-1])
    drawn = _invert(key, rows, num_samples)
    drawn = drawn.reshape(*weights.shape[:-1], num_samples)
  else:
    clocks = standard_exponential(key, weights.shape, weights.dtype)
    arrival = jnp.where(weights > 0, -clocks / weights, -jnp.inf)
    drawn = lax.top_k(arrival, num_samples)[1]
  least, most = weights.min(-1, keepdims=True), weights.max(-1, keepdims=True)
  is_proper = (least >= 0) & (most > 0) & (most < jnp.inf)
  return jnp.where(is_proper, drawn, no_integer(drawn.dtype))


# With more categories, cumulative weights in float32 lose too many digits.
_MOST_IN_A_BLOCK = 2048


def _invert(key, weights, num_samples: int) -> jax.Array:
  """Sample categories of weights (rows, n), as (rows, num_samples), with replacement.

  Sample from many categories in two steps: a block, then a category of the block. Each
  step has its own uniform number, as one number has too few digits for both.
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
  points = _below(unit(key, total.shape, total.dtype), total)
  return _search(cumulative, points, start, size)


def _find(key, weights, num_samples: int) -> jax.Array:
  """Sample categories by inversion in one step."""
  cumulative = jnp.cumsum(weights, axis=-1)
  shape = (len(weights), num_samples)
  points = _below(unit(key, shape, weights.dtype), cumulative[:, -1:])
  search = lambda row, at: jnp.searchsorted(row, at, side="right")  # noqa: E731
  return jax.vmap(search)(cumulative, points)


def _below(fractions, total):
  """Scale fractions to points strictly below the total.

  So a trailing category of weight 0 is never sampled.
  """
  return jnp.minimum(fractions * total, jnp.nextafter(total, jnp.zeros_like(total)))


def _search(cumulative, points, start, size: int) -> jax.Array:
  """Find the first index from `start` on whose cumulative weight exceeds the point."""
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


def _unsigned_dtype(dtype):
  return jnp.dtype(f"uint{jnp.iinfo(dtype).bits}")
