"""Samplers by dtype, with their laws and their counterparts in `jax.random`.

`test_sampler_table.py` asserts what must hold for each row and records the properties
for the table in `docs/samplers.md`.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from torchax.rng import rejection, samplers, uniform

f16, bf16, f32, f64 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64


@dataclasses.dataclass
class Row:
  """One sampler with its parameters.

  Attributes:
    ours: `(key, shape, dtype) -> array`.
    theirs: the sampler of `jax.random`, or None if it has none.
    law: a frozen scipy distribution.
    dtypes: dtypes of the result.
    has_ends: False for rejection samplers, whose results have no least and greatest.
  """

  ours: Callable
  theirs: Callable | None
  law: object
  dtypes: tuple = (f32, f64, bf16, f16)
  has_ends: bool = True


_random = jax.random


def _full(value):
  return lambda shape, dtype: jnp.full(shape, value, dtype)


def _integers(span: int, *dtypes) -> Row:
  return Row(
    lambda key, shape, dtype: samplers.integers(key, shape, dtype, 0, span),
    lambda key, shape, dtype: _random.randint(key, shape, 0, span, dtype),
    stats.randint(0, span),
    dtypes,
  )


def _bernoulli(p: float) -> Row:
  return Row(
    lambda key, shape, dtype: samplers.bernoulli(key, shape, p),
    lambda key, shape, dtype: _random.bernoulli(key, p, shape),
    stats.bernoulli(p),
    (jnp.bool_,),
  )


ROWS = {
  "uniform": Row(samplers.uniform, _random.uniform, stats.uniform()),
  "uniform(-2, 5)": Row(
    lambda key, shape, dtype: samplers.uniform(key, shape, dtype, -2.0, 5.0),
    lambda key, shape, dtype: _random.uniform(key, shape, dtype, -2, 5),
    stats.uniform(-2, 7),
  ),
  "normal": Row(samplers.normal, _random.normal, stats.norm()),
  "log_normal(0, 1)": Row(
    samplers.log_normal,
    lambda key, shape, dtype: _random.lognormal(key, 1.0, shape, dtype),
    stats.lognorm(1.0),
  ),
  "exponential": Row(samplers.exponential, _random.exponential, stats.expon()),
  "cauchy": Row(samplers.cauchy, _random.cauchy, stats.cauchy()),
  "geometric(0.1)": Row(
    lambda key, shape, dtype: samplers.geometric(key, shape, dtype, 0.1),
    lambda key, shape, dtype: _random.geometric(key, 0.1, shape),
    stats.geom(0.1),
    (f32, f64, jnp.int32),
  ),
  "bernoulli(0.5)": _bernoulli(0.5),
  "bernoulli(0.1)": _bernoulli(0.1),
  "bernoulli of an array": Row(
    lambda key, shape, dtype: samplers.bernoulli(key, shape, _full(0.1)(shape, dtype)),
    lambda key, shape, dtype: _random.bernoulli(key, _full(0.1)(shape, dtype)),
    stats.bernoulli(0.1),
    (f32, f64),
  ),
  "integers below 10": _integers(10, jnp.uint8, jnp.int32, jnp.int64),
  "integers below 3 · 2²⁹": _integers(3 << 29, jnp.int32, jnp.int64),
  "integers below 3 · 2⁶⁰": _integers(3 << 60, jnp.int64),
  "gamma(2)": Row(
    lambda key, shape, dtype: rejection.standard_gamma(
      key, _full(2.0)(shape, dtype), dtype
    ),
    lambda key, shape, dtype: _random.gamma(key, 2.0, shape, dtype),
    stats.gamma(2.0),
    (f32,),
    has_ends=False,
  ),
  "poisson(3)": Row(
    lambda key, shape, dtype: rejection.poisson(key, _full(3.0)(shape, dtype), dtype),
    lambda key, shape, dtype: _random.poisson(key, 3.0, shape),
    stats.poisson(3.0),
    (f32,),
    has_ends=False,
  ),
  "poisson(30)": Row(
    lambda key, shape, dtype: rejection.poisson(key, _full(30.0)(shape, dtype), dtype),
    lambda key, shape, dtype: _random.poisson(key, 30.0, shape),
    stats.poisson(30.0),
    (f32,),
    has_ends=False,
  ),
  "binomial(40, 0.3)": Row(
    lambda key, shape, dtype: rejection.binomial(
      key, _full(40.0)(shape, dtype), _full(0.3)(shape, dtype), dtype
    ),
    lambda key, shape, dtype: _random.binomial(key, 40.0, 0.3, shape, dtype),
    stats.binom(40, 0.3),
    (f32,),
    has_ends=False,
  ),
}


@contextlib.contextmanager
def all_words(first: int, second: int | None = None):
  """Make every random word `first`, and the second word of an element `second`.

  Args:
    first, second: Python ints of 32 bits; a word of another width repeats or truncates
      them.
  """
  second = first if second is None else second

  def words(shape, dtype, word):
    bits = jnp.iinfo(dtype).bits
    value = word << 32 | second if bits == 64 else word & ((1 << bits) - 1)
    return jnp.full(shape, np.asarray(value, dtype))

  def bits(key, shape=(), dtype=jnp.uint32):
    return words(shape, jnp.dtype(dtype), first)

  def two_words(key, shape):
    return tuple(words(shape, jnp.dtype("uint32"), word) for word in (first, second))

  def second_words(key, shape, dtype="uint32"):
    return words(shape, jnp.dtype(dtype), second)

  with (
    mock.patch.object(jax.random, "bits", bits),
    mock.patch.object(uniform, "two_words", two_words),
    mock.patch.object(uniform, "second_words", second_words),
  ):
    yield
