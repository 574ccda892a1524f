"""Distributions and moments of the samplers.

Each sampler and dtype draws 10,000 numbers from each of 20 seeds, and `goodness.py`
tests them; it also describes the long version of these tests. Independence of draws is
tested in `test_independence.py`.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rng.goodness import (
  SEEDS,
  SIGMAS,
  N,
  least_p,
  p_value,
  require_good,
)
from scipy import stats

from torchax.rng import RngState, samplers

pytestmark = pytest.mark.statistics

bf16, f16, f32, f64 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64


@dataclasses.dataclass
class Row:
  """One sampler, its parameters, its dtype and its expected distribution.

  Attributes:
    sample: key -> N numbers.
    law: a frozen scipy distribution, or the probabilities of categories.
    x64: True to draw with 64-bit types.
    grid: the spacing of the underlying uniform numbers, for narrow floats.
  """

  sample: Callable
  law: object
  x64: bool = False
  grid: float = 0.0


def _real(sampler, dtype, law, *parameters, **options) -> Row:
  sample = lambda key: sampler(key, (N,), dtype, *parameters)  # noqa: E731
  return Row(sample, law, x64=dtype == f64, **options)


def _ordered_pairs(weights) -> np.ndarray:
  """Return probabilities of (first, second) without replacement, a row per first."""
  weights = np.asarray(weights) / np.sum(weights)
  pairs = weights[:, None] * weights[None, :] / (1 - weights[:, None])
  np.fill_diagonal(pairs, 0)
  return pairs.ravel()


WEIGHTS = (1.0, 0.0, 3.0, 2.0, 0.5)


def _pairs(key):
  rows = jnp.broadcast_to(jnp.asarray(WEIGHTS), (N, len(WEIGHTS)))
  first, second = samplers.multinomial(key, rows, 2, False).T
  return first * len(WEIGHTS) + second


def _orders(key):
  """Return the index of the order of a permutation of 4, among 24."""
  keys = jax.random.split(key, N)
  orders = jax.vmap(lambda key: samplers.permutation(key, 4, jnp.int32))(keys)
  return orders @ jnp.array([64, 16, 4, 1])


def _order_probabilities() -> np.ndarray:
  numbers = np.arange(256)
  digits = np.stack([numbers // 64, numbers // 16 % 4, numbers // 4 % 4, numbers % 4])
  is_order = (np.sort(digits, axis=0) == np.arange(4)[:, None]).all(0)
  return is_order / 24


ROWS = {
  "uniform float32": _real(samplers.uniform, f32, stats.uniform()),
  "uniform float64": _real(samplers.uniform, f64, stats.uniform()),
  "uniform bfloat16": _real(samplers.uniform, bf16, stats.uniform(), grid=2**-8),
  "uniform float16": _real(samplers.uniform, f16, stats.uniform(), grid=2**-11),
  "uniform(-2, 5)": _real(samplers.uniform, f32, stats.uniform(-2, 7), -2.0, 5.0),
  "normal float32": _real(samplers.normal, f32, stats.norm()),
  "normal float64": _real(samplers.normal, f64, stats.norm()),
  "normal bfloat16": _real(samplers.normal, bf16, stats.norm()),
  "normal float16": _real(samplers.normal, f16, stats.norm()),
  "normal(3, 0.5)": _real(samplers.normal, f32, stats.norm(3, 0.5), 3.0, 0.5),
  "normal complex64, real part": Row(
    lambda key: samplers.normal(key, (N,), jnp.complex64).real, stats.norm(0, 0.5**0.5)
  ),
  "normal complex64, imaginary part": Row(
    lambda key: samplers.normal(key, (N,), jnp.complex64).imag, stats.norm(0, 0.5**0.5)
  ),
  "log_normal(0.5, 0.25)": _real(
    samplers.log_normal, f32, stats.lognorm(0.25, scale=np.exp(0.5)), 0.5, 0.25
  ),
  "exponential float32": _real(samplers.exponential, f32, stats.expon()),
  "exponential float64": _real(samplers.exponential, f64, stats.expon()),
  "exponential bfloat16": _real(samplers.exponential, bf16, stats.expon()),
  "exponential float16": _real(samplers.exponential, f16, stats.expon()),
  "exponential(4)": _real(samplers.exponential, f32, stats.expon(scale=0.25), 4.0),
  "cauchy float32": _real(samplers.cauchy, f32, stats.cauchy()),
  "cauchy(1, 3)": _real(samplers.cauchy, f32, stats.cauchy(1, 3), 1.0, 3.0),
  "geometric(0.3) float32": _real(samplers.geometric, f32, stats.geom(0.3), 0.3),
  "geometric(0.3) int32": _real(samplers.geometric, jnp.int32, stats.geom(0.3), 0.3),
  "geometric(0.02)": _real(samplers.geometric, f32, stats.geom(0.02), 0.02),
  "bernoulli(0.1)": Row(
    lambda key: samplers.bernoulli(key, (N,), 0.1), stats.bernoulli(0.1)
  ),
  "bernoulli(0.5)": Row(
    lambda key: samplers.bernoulli(key, (N,), 0.5), stats.bernoulli(0.5)
  ),
  "bernoulli(0.999)": Row(
    lambda key: samplers.bernoulli(key, (N,), 0.999), stats.bernoulli(0.999)
  ),
  "integers below 10": _real(samplers.integers, jnp.int32, stats.randint(0, 10), 0, 10),
  "integers of int8": _real(
    samplers.integers, jnp.int8, stats.randint(-128, 128), -128, 128
  ),
  "integers from -100 to 127": _real(
    samplers.integers, jnp.int8, stats.randint(-100, 128), -100, 128
  ),
  "integers as floats": _real(samplers.integers, f32, stats.randint(-3, 4), -3, 4),
  "permutation": Row(_orders, _order_probabilities()),
  "multinomial with replacement": Row(
    lambda key: samplers.multinomial(key, jnp.asarray(WEIGHTS), N, True),
    np.array(WEIGHTS) / sum(WEIGHTS),
  ),
  "multinomial without replacement": Row(_pairs, _ordered_pairs(WEIGHTS)),
}
ROW_COUNT = len(ROWS) + 20  # and the values below
LEAST_P = least_p(ROW_COUNT)


@functools.cache
def _drawn(name: str) -> np.ndarray:
  """Return draw 0 of each seed, shape (SEEDS, N)."""
  row = ROWS[name]
  with jax.enable_x64(row.x64):
    keys = jnp.stack([RngState.from_seed(seed).draw_key() for seed in range(SEEDS)])
    drawn = jax.jit(jax.vmap(row.sample))(keys)
    return np.asarray(drawn.astype(f64 if row.x64 else f32), np.float64)


def _p_value(drawn: np.ndarray, row: Row) -> float:
  return p_value(drawn, row.law, row.grid)


def _require_good(p_values) -> None:
  require_good(p_values, ROW_COUNT)


# T2 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_the_numbers_have_their_distribution(name):
  _require_good([_p_value(drawn, ROWS[name]) for drawn in _drawn(name)])


@pytest.mark.parametrize(
  "name, spoil",
  [
    ("uniform float32", lambda drawn: drawn * 0.97),
    ("uniform bfloat16", lambda drawn: np.floor(drawn * 32) / 32 * 0.97),
    ("normal float32", lambda drawn: drawn * 1.04),
    ("normal bfloat16", lambda drawn: drawn + 0.03),
    ("exponential float32", lambda drawn: np.maximum(drawn, 0.03)),
    ("geometric(0.3) float32", lambda drawn: np.where(drawn == 3, 4, drawn)),
    ("bernoulli(0.5)", lambda drawn: np.where(np.arange(N) % 25, drawn, 1)),
    ("integers below 10", lambda drawn: np.where(np.arange(N) % 20, drawn, 9)),
    ("permutation", lambda drawn: np.where(np.arange(N) % 20, drawn, drawn.min())),
    ("multinomial with replacement", lambda d: np.where(np.arange(N) % 20, d, 3)),
    # Pooled over all seeds: each p-value is fine, together they are not.
    ("normal float32", lambda drawn: _drawn("normal float32")[0]),
    ("bernoulli(0.5)", lambda drawn: np.arange(N) % 2),
  ],
)
def test_the_tests_see_a_wrong_distribution(name, spoil):
  with pytest.raises(AssertionError):
    _require_good([_p_value(spoil(drawn), ROWS[name]) for drawn in _drawn(name)])


# T3 ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "name",
  [
    name
    for name, row in ROWS.items()
    if not isinstance(row.law, np.ndarray) and np.isfinite(row.law.var())
  ],
)
def test_mean_and_variance_are_within_5_sigma(name):
  row, drawn = ROWS[name], _drawn(name).ravel()
  mean, variance, _, excess = (float(m) for m in row.law.stats(moments="mvsk"))
  # A number on a grid represents the interval above it.
  drawn = drawn + row.grid / 2
  assert abs(drawn.mean() - mean) < SIGMAS * np.sqrt(variance / drawn.size)
  of_variance = SIGMAS * variance * np.sqrt((excess + 2) / drawn.size)
  # The variance is about the sample's mean, which is off by up to 5 sigma.
  of_variance += SIGMAS**2 * variance / drawn.size
  assert abs(drawn.var() - variance) < of_variance


# Through torch's own names ----------------------------------------------------------


def _tensor(*shape) -> torch.Tensor:
  return torch.empty(shape or (N,), device="jax")


def _init(name, *args, shape=(100, 100), **kwargs):
  return lambda: getattr(torch.nn.init, name)(_tensor(*shape), *args, **kwargs)


_XAVIER = np.sqrt(2 / 200)  # 100 inputs and 100 outputs
_KAIMING = np.sqrt(2 / 100)

TORCH = {
  "dropout": (lambda: F.dropout(torch.ones(N, device="jax"), 0.2) > 0, 0.8),
  "nn.Dropout": (lambda: torch.nn.Dropout(0.7)(torch.ones(N, device="jax")) > 0, 0.3),
  "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.3, device="jax")), 0.3),
  "multinomial": (
    lambda: torch.multinomial(torch.tensor([1.0, 3.0]).to("jax"), N, True),
    0.75,
  ),
  "init.uniform_": (_init("uniform_", -1.0, 2.0), stats.uniform(-1, 3)),
  "init.normal_": (_init("normal_", 1.0, 2.0), stats.norm(1, 2)),
  "init.trunc_normal_": (
    _init("trunc_normal_", 0.0, 1.0, -1.0, 2.0),
    stats.truncnorm(-1, 2),
  ),
  "init.xavier_uniform_": (
    _init("xavier_uniform_"),
    stats.uniform(-_XAVIER * 3**0.5, 2 * _XAVIER * 3**0.5),
  ),
  "init.xavier_normal_": (_init("xavier_normal_"), stats.norm(0, _XAVIER)),
  "init.kaiming_uniform_": (
    _init("kaiming_uniform_", nonlinearity="relu"),
    stats.uniform(-_KAIMING * 3**0.5, 2 * _KAIMING * 3**0.5),
  ),
  "init.kaiming_normal_": (
    _init("kaiming_normal_", nonlinearity="relu"),
    stats.norm(0, _KAIMING),
  ),
  "random_": (lambda: _tensor().random_(1 << 20) / (1 << 20), stats.uniform()),
  "log_normal_": (
    lambda: _tensor().log_normal_(1.0, 0.5),
    stats.lognorm(0.5, scale=np.e),
  ),
  "exponential_": (lambda: _tensor().exponential_(0.5), stats.expon(scale=2)),
}


@pytest.mark.parametrize("name", TORCH)
def test_torchs_functions_have_their_distribution(name):
  draw, law = TORCH[name]
  p_values = []
  for seed in range(SEEDS):
    torch.manual_seed(1000 + seed)
    drawn = draw().detach().numpy().ravel().astype(np.float64)
    if isinstance(law, float):
      p_values.append(stats.binomtest(int(drawn.sum()), N, law).pvalue)
    else:
      p_values.append(stats.kstest(drawn, law.cdf).pvalue)
  _require_good(p_values)


def test_positions_in_a_permutation_are_uniform():
  torch.manual_seed(0)
  firsts = [torch.randperm(10, device="jax").tolist() for _ in range(50 * SEEDS)]
  places = np.array(firsts)
  for place in range(10):
    assert stats.chisquare(np.bincount(places[:, place], minlength=10)).pvalue > LEAST_P


def test_an_orthogonal_matrix_is_orthogonal_and_differs_by_draw():
  first, second = (_init("orthogonal_", shape=(30, 20))() for _ in range(2))
  np.testing.assert_allclose((first.T @ first).numpy(), np.eye(20), rtol=0, atol=1e-5)
  assert not torch.equal(first, second)
  # The Haar measure has no preferred sign.
  assert (np.sign(np.diag(first.numpy())) > 0).any()
  assert (np.sign(np.diag(first.numpy())) < 0).any()


def test_a_sparse_matrix_has_its_zeros_in_each_column():
  matrix = _init("sparse_", 0.3, shape=(20, 50))().numpy()
  assert ((matrix == 0).sum(0) == 6).all()
  assert len({tuple(np.flatnonzero(column == 0)) for column in matrix.T}) > 40
