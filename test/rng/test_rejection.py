"""Poisson, binomial, gamma, Dirichlet, categories: distributions, limits, gradients.

`goodness.py` tests the distributions. A count is made continuous first: with v uniform,
F(k - 1) + v P(k) is uniform if and only if k has the distribution function F. Gradients
are compared with derivatives of scipy's distribution functions, because CPU torch's own
gradients are approximations.
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
from rng.goodness import SEEDS, N, p_value, require_good
from scipy import special, stats

from torchax.interop import jax_view
from torchax.rng import RngState, pathwise, rejection

pytestmark = pytest.mark.distributions

f32, f64 = jnp.float32, jnp.float64
UNIFORM = stats.uniform()


def _key(count=0):
  return RngState.from_seed(0).draw_key(count)


@dataclasses.dataclass
class Group:
  """Numbers of several laws, drawn at once.

  Attributes:
    sample: key -> array of shape (laws, N).
    laws: frozen scipy distributions.
    x64: True to draw with 64-bit types.
  """

  sample: Callable
  laws: tuple
  x64: bool = False


def _column(values, dtype=f32):
  return jnp.broadcast_to(jnp.asarray(values, dtype)[:, None], (len(values), N))


def _poisson(rates, dtype=f32) -> Group:
  def sample(key):
    return rejection.poisson(key, _column(rates, dtype), dtype)

  return Group(sample, tuple(map(stats.poisson, rates)), dtype == f64)


def _binomial(counts, probs) -> Group:
  def sample(key):
    return rejection.binomial(key, _column(counts), _column(probs), f32)

  return Group(sample, tuple(map(stats.binom, counts, probs)))


def _gamma(alphas, dtype=f32) -> Group:
  def sample(key):
    return rejection.standard_gamma(key, _column(alphas, dtype), dtype)

  return Group(sample, tuple(map(stats.gamma, alphas)), dtype == f64)


def _dirichlet(alphas) -> Group:
  def sample(key):
    rows = jnp.broadcast_to(jnp.asarray(alphas, f32), (N, len(alphas)))
    return rejection.dirichlet(key, rows, f32).T

  others = sum(alphas) - np.array(alphas)
  return Group(sample, tuple(map(stats.beta, alphas, others)))


GROUPS = {
  "poisson": _poisson((0.2, 7.0, 10.0, 23.5, 1e6)),
  "poisson float64": _poisson((3.0, 40.0), f64),
  "binomial": _binomial((9.0, 40.0, 50.0, 1e6), (0.25, 0.25, 0.875, 0.5)),
  "gamma": _gamma((0.2, 0.7, 1.0, 3.5, 1e5)),
  "gamma float64": _gamma((0.05, 2.0), f64),
  "dirichlet": _dirichlet((0.3, 1.5, 40.0)),
}
ROWS = {
  f"{name} {place}": (name, place)
  for name, group in GROUPS.items()
  for place in range(len(group.laws))
}


@functools.cache
def _drawn_group(name: str) -> np.ndarray:
  """Return draw 0 of each seed, shape (SEEDS, laws, N)."""
  group = GROUPS[name]
  with jax.enable_x64(group.x64):
    sample = jax.jit(group.sample)
    draws = [sample(RngState.from_seed(seed).draw_key()) for seed in range(SEEDS)]
    return np.asarray(draws, np.float64)


def _drawn(row: str) -> np.ndarray:
  name, place = ROWS[row]
  return _drawn_group(name)[:, place]


def _law(row: str):
  name, place = ROWS[row]
  return GROUPS[name].laws[place]


def _made_uniform(drawn: np.ndarray, law) -> np.ndarray:
  if not hasattr(law.dist, "pmf"):
    return law.cdf(drawn)
  assert np.array_equal(drawn, np.floor(drawn))
  v = np.random.default_rng(0).random(drawn.shape)
  return law.cdf(drawn - 1) + v * law.pmf(drawn)


def _require_law(drawn: np.ndarray, law) -> None:
  p_values = [p_value(numbers, UNIFORM) for numbers in _made_uniform(drawn, law)]
  require_good(p_values, rows=2 * len(ROWS))


@pytest.mark.statistics
@pytest.mark.parametrize("row", ROWS)
def test_the_numbers_have_their_distribution(row):
  _require_law(_drawn(row), _law(row))


@pytest.mark.parametrize(
  "row, spoil",
  [
    ("poisson 1", lambda drawn: np.where(drawn == 7, 8, drawn)),
    ("poisson 4", lambda drawn: drawn + 40),
    ("binomial 1", lambda drawn: np.maximum(drawn, 6)),
    ("gamma 0", lambda drawn: drawn * 1.2),
    ("dirichlet 0", lambda drawn: np.maximum(drawn, 1e-4)),
  ],
)
def test_the_tests_see_a_wrong_distribution(row, spoil):
  with pytest.raises(AssertionError):
    _require_law(spoil(_drawn(row)), _law(row))


# Limits and domains -----------------------------------------------------------------


def test_rare_events_have_their_rate():
  """One float32 uniform has steps of 1e-7, too coarse for a probability of 1e-8."""
  rates, draws = jnp.full(1 << 20, 2e-8, f32), 40
  sample = jax.jit(lambda key: rejection.poisson(key, rates, f32).sum())
  events = sum(int(sample(_key(count))) for count in range(draws))
  assert stats.binomtest(events, rates.size * draws, 2e-8).pvalue > 1e-4


def test_many_categories_are_all_drawn():
  """With one float32 uniform, a third of so many would never be drawn."""
  weights = torch.ones(3 << 22, device="jax")
  drawn = torch.multinomial(weights, 30_000, replacement=True).numpy()
  assert stats.chisquare(np.bincount(drawn % 3, minlength=3)).pvalue > 1e-4
  assert stats.kstest(drawn / len(weights), "uniform").pvalue > 1e-4


def test_blocks_of_categories_keep_the_weights():
  n = 5_000
  weights = np.where(np.arange(n) % 7 == 3, 0, 1 + np.arange(n) % 5).astype(np.float32)
  rows = torch.from_numpy(np.stack([weights, weights[::-1]])).to("jax")
  drawn = torch.multinomial(rows, 40_000, replacement=True).numpy()
  for places, expected in zip(drawn, (weights, weights[::-1])):
    counts = np.bincount(places, minlength=n)
    assert not counts[expected == 0].any()
    folded = np.add.reduceat(counts, range(0, n, 50))
    law = np.add.reduceat(expected.astype(np.float64), range(0, n, 50))
    assert stats.chisquare(folded, law / law.sum() * counts.sum()).pvalue > 1e-4
    by_weight = [counts[expected == weight].sum() for weight in range(1, 6)]
    law = np.array([(expected == weight).sum() * weight for weight in range(1, 6)])
    assert stats.chisquare(by_weight, law / law.sum() * sum(by_weight)).pvalue > 1e-4


def test_the_least_of_many_numbers_have_all_their_digits(env):
  """Below 2**-12, a uniform float32 would have 2048 values and repeat itself."""
  with env.rng_scope(1):
    drawn = torch.empty(1 << 21, device="jax").exponential_().numpy()
  small = drawn[drawn < 2.0**-12]
  assert len(small) > 300
  assert len(set(small.tolist())) == len(small)
  assert stats.kstest(small * 2.0**12, "uniform").pvalue > 1e-4


def test_exponential_race_samples_tokens_by_their_weights():
  """With a noise of 0, a token would win whatever its weight."""
  vocabulary, steps = 1 << 17, 200
  weights = torch.full((vocabulary,), 1e-9, device="jax")
  weights[:4] = torch.tensor([0.1, 0.2, 0.3, 0.4]).to("jax")
  noise = torch.empty(steps, vocabulary, device="jax").exponential_()
  tokens = (weights / noise).argmax(-1).numpy()
  assert tokens.max() < 4
  expected = np.array([0.1, 0.2, 0.3, 0.4]) * steps
  assert stats.chisquare(np.bincount(tokens, minlength=4), expected).pvalue > 1e-4


def test_certain_events_are_always_drawn():
  count = torch.tensor([0.0, 7.0, 7.0]).to("jax")
  prob = torch.tensor([0.5, 0.0, 1.0]).to("jax")
  assert torch.binomial(count, prob).tolist() == [0, 0, 7]
  assert torch.poisson(torch.tensor([0.0, -0.0]).to("jax")).tolist() == [0, 0]
  assert torch._sample_dirichlet(torch.tensor(2.0).to("jax")).item() == 1 - 2**-24


def test_outside_of_the_domain_is_nan_and_infinity_stays():
  nan, inf = jnp.nan, jnp.inf
  assert jnp.isnan(rejection.poisson(_key(), jnp.array([-1.0, nan]), f32)).all()
  assert rejection.poisson(_key(), jnp.array([inf]), f32)[0] == inf
  assert jnp.isnan(rejection.standard_gamma(_key(), jnp.array([-1.0, nan]), f32)).all()
  assert rejection.standard_gamma(_key(), jnp.array([inf]), f32)[0] == inf
  drawn = rejection.binomial(
    _key(), jnp.array([nan, 4.0, inf]), jnp.array([0.5, nan, 0.5]), f32
  )
  assert jnp.isnan(drawn[:2]).all() and drawn[2] == inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gamma_numbers_and_proportions_are_never_at_a_limit(dtype):
  alpha = torch.full((2_000, 3), 1e-3, dtype=dtype, device="jax")
  assert (torch._standard_gamma(alpha) > 0).all().item()
  proportions = torch._sample_dirichlet(alpha)
  assert ((proportions > 0) & (proportions < 1)).all().item()
  # With tiny parameters, one element takes all; which one is uniform.
  largest = proportions.float().numpy()
  assert (largest.max(-1) > 0.9).mean() > 0.97
  counts = np.bincount(largest.argmax(-1), minlength=3)
  assert stats.chisquare(counts).pvalue > 1e-4


def test_proportions_have_the_sum_one():
  alpha = torch.tensor([1e-6, 1e-2, 1.0, 1e3, 1e6]).to("jax").expand(50, 5)
  total = torch._sample_dirichlet(alpha).sum(-1).numpy()
  np.testing.assert_allclose(total, 1, rtol=1e-6)


def test_any_implementation_of_keys_will_do():
  """The Poisson sampler of JAX takes keys of threefry2x32 only."""
  rates = jnp.array([3.0, 50.0])
  sample = jax.jit(lambda key: rejection.poisson(key, rates, f32))
  draws = np.array([sample(jax.random.key(seed, impl="rbg")) for seed in range(200)])
  assert (abs(draws.mean(0) - rates) < 5 * np.sqrt(rates / 200)).all()


SAMPLERS = {
  "poisson": lambda key: rejection.poisson(key, jnp.linspace(0.5, 60, 50), f32),
  "gamma": lambda key: rejection.standard_gamma(key, jnp.linspace(1.0, 9, 50), f32),
}


@pytest.mark.parametrize("name, rtol", [("poisson", 0), ("gamma", 2e-6)])
def test_a_row_of_a_batch_is_drawn_as_if_alone(name, rtol):
  """Gamma is equal up to rounding: XLA reorders terms that rows share."""
  keys = jax.random.split(jax.random.key(0), 3)
  sample = jax.jit(SAMPLERS[name])
  rows = jax.jit(jax.vmap(SAMPLERS[name]))(keys)
  np.testing.assert_allclose(rows, [sample(key) for key in keys], rtol=rtol)


# Gradients --------------------------------------------------------------------------

ALPHAS = (1e-3, 0.05, 0.7, 1.0, 3.0, 12.0, 150.0, 3e3)
QUANTILES = (1e-3, 0.1, 0.5, 0.9, 0.999)


def _derivative(function, at):
  """Return central differences by Richardson's extrapolation, accurate to 1e-9."""
  steps = at * 0.02 / 2.0 ** np.arange(5)[:, None]
  table = [(function(at + h) - function(at - h)) / (2 * h) for h in steps]
  for order in range(1, 5):
    table = [(4**order * b - a) / (4**order - 1) for a, b in zip(table, table[1:])]
  return table[0]


def _gamma_grid(dtype) -> tuple[np.ndarray, ...]:
  """Return parameters, quantiles and dx/dα in float64, at points that the dtype has."""
  alpha, quantile = (g.ravel() for g in np.meshgrid(ALPHAS, QUANTILES))
  alpha = alpha.astype(dtype).astype(np.float64)
  x = stats.gamma.ppf(quantile, alpha)
  alpha, x = alpha[x > 1e-30], x[x > 1e-30].astype(dtype).astype(np.float64)
  upper = special.gammaincc(alpha, x) < 0.5
  moved = np.where(
    upper,
    -_derivative(lambda a: special.gammaincc(a, x), alpha),
    _derivative(lambda a: special.gammainc(a, x), alpha),
  )
  return alpha, x, -moved / stats.gamma.pdf(x, alpha)


def _beta_grid(dtype) -> tuple[np.ndarray, ...]:
  """Return x, α, α + β and (dx/dα) / (1 - x) in float64."""
  alpha, beta, quantile = (g.ravel() for g in np.meshgrid(ALPHAS, ALPHAS, QUANTILES))
  alpha = alpha.astype(dtype).astype(np.float64)
  total = (alpha + beta).astype(dtype).astype(np.float64)
  beta = total - alpha
  x = stats.beta.ppf(quantile, alpha, beta).astype(dtype).astype(np.float64)
  # Skip points where β is lost in the sum, or x is at the edge: no number to compare.
  sound = (beta > 1e-4 * total) & (x > 1e-6) & (x < 1 - 1e-4)
  alpha, beta, total, x = (v[sound] for v in (alpha, beta, total, x))
  moved = _derivative(lambda a: special.betainc(a, beta, x), alpha)
  return x, alpha, total, -moved / stats.beta.pdf(x, alpha, beta) / (1 - x)


# Tolerance by dtype: the quotient of two numbers loses digits (x relative to its
# bounds, α to the total).
GRADIENT_PRECISION = {np.float32: 2e-6, np.float64: 1e-7}


@pytest.mark.parametrize("dtype", GRADIENT_PRECISION)
def test_gamma_gradient_is_the_derivative_of_the_quantile(dtype):
  alpha, x, expected = _gamma_grid(dtype)
  assert len(x) > 30
  with jax.enable_x64(dtype is np.float64):
    actual = pathwise.gamma_gradient(jnp.asarray(alpha, dtype), jnp.asarray(x, dtype))
  np.testing.assert_allclose(actual, expected, rtol=GRADIENT_PRECISION[dtype])


@pytest.mark.parametrize("dtype", GRADIENT_PRECISION)
def test_dirichlet_gradient_is_the_derivative_of_the_quantile(dtype):
  x, alpha, total, expected = _beta_grid(dtype)
  assert len(x) > 100
  with jax.enable_x64(dtype is np.float64):
    arrays = (jnp.asarray(value, dtype) for value in (x, alpha, total))
    actual = pathwise.dirichlet_gradient(*arrays)
  np.testing.assert_allclose(actual, expected, rtol=20 * GRADIENT_PRECISION[dtype])


def test_gradients_of_samples_at_the_bounds_equal_cpu_torch():
  """With a small α a third of the samples is the least number of float32."""
  alpha = torch.tensor([1e-4, 1e-2, 0.1, 3.0])[:, None]
  x = torch.tensor([0.0, torch.finfo(torch.float32).tiny, 1e-30, 1e-15])
  expected = torch._standard_gamma_grad(alpha, x)
  actual = torch._standard_gamma_grad(alpha.to("jax"), x.to("jax"))
  torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=0)
  for beta in (0.5, 3.0, 200.0):
    operands = (torch.cat([x, torch.ones(1)]), alpha, alpha + beta)
    expected = torch._dirichlet_grad(*torch.broadcast_tensors(*operands))
    actual = torch._dirichlet_grad(*(value.to("jax") for value in operands))
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=0)


def test_gradients_match_cpu_torch_within_its_precision():
  """torch approximates by rational functions, with errors of up to 2e-3 here."""
  alpha, x, _ = _gamma_grid(np.float32)
  alpha, x = torch.tensor(alpha).float(), torch.tensor(x).float()
  actual = torch._standard_gamma_grad(alpha.to("jax"), x.to("jax"))
  expected = torch._standard_gamma_grad(alpha, x)
  torch.testing.assert_close(actual.cpu(), expected, rtol=3e-3, atol=0)
  x, alpha, total, _ = _beta_grid(np.float32)
  cpu = [torch.tensor(value).float() for value in (x, alpha, total)]
  moderate = (cpu[1] > 0.04) & (cpu[2] - cpu[1] > 0.04) & (cpu[2] < 200)
  cpu = [value[moderate] for value in cpu]
  actual = torch._dirichlet_grad(*(value.to("jax") for value in cpu))
  expected = torch._dirichlet_grad(*cpu)
  torch.testing.assert_close(actual.cpu(), expected, rtol=2e-2, atol=0)


DIFFERENTIABLE = {
  "gamma": lambda alpha: torch._standard_gamma(alpha).pow(2).sum(),
  "dirichlet": lambda alpha: torch.distributions.Dirichlet(alpha).rsample()[0],
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_torchs_gradient_is_jaxs(env, name):
  numbers = [0.5, 2.0, 30.0]
  with env, env.rng_scope(3):
    alpha = torch.tensor(numbers).to("jax").requires_grad_()
    (by_torch,) = torch.autograd.grad(DIFFERENTIABLE[name](alpha), alpha)
  function = {
    "gamma": DIFFERENTIABLE["gamma"],
    "dirichlet": lambda alpha: torch._sample_dirichlet(alpha)[0],
  }[name]
  by_jax = jax.grad(lambda a: jax_view(function)(a, rng=3))(jnp.array(numbers))
  np.testing.assert_allclose(by_torch.numpy(), by_jax, rtol=1e-6)


def test_a_mean_of_gamma_numbers_moves_with_their_parameter():
  """E x = α, so the mean of dx/dα is 1, up to the error of 20,000 samples."""
  for alpha in (0.3, 2.0, 40.0):
    parameter = torch.full((20_000,), alpha, device="jax")
    drawn = torch._standard_gamma(parameter)
    moved = torch._standard_gamma_grad(parameter, drawn).numpy()
    assert abs(moved.mean() - 1) < 5 * moved.std() / np.sqrt(len(moved))


NO_GRADIENT = {
  "poisson": lambda p: torch.poisson(p * 20),
  "binomial": lambda p: torch.binomial(torch.full_like(p, 20.0), p),
  "bernoulli": torch.bernoulli,
  "normal": lambda p: torch.normal(p, p),
}


@pytest.mark.parametrize("name", NO_GRADIENT)
def test_parameters_of_other_draws_get_no_gradient(env, name):
  draw = NO_GRADIENT[name]
  by_jax = jax.grad(lambda p: jax_view(lambda t: draw(t).sum())(p, rng=0))
  assert not by_jax(jnp.full(8, 0.4)).any()
  if name == "binomial":  # torch takes no derivative of this
    return
  with env:
    p = torch.full((8,), 0.4, device="jax").requires_grad_()
    (gradient,) = torch.autograd.grad(draw(p).sum(), p, allow_unused=True)
    assert gradient is None or not gradient.any().item()


# Activations and pooling that draw --------------------------------------------------


def test_rrelu_draws_slopes_that_are_uniform_and_its_gradient(env):
  x = torch.linspace(-3.0, 1.0, 4_000).to("jax").requires_grad_()
  noise = torch.zeros(4_000, device="jax")
  out = torch.ops.aten.rrelu_with_noise(x, noise, 0.2, 0.7, True)
  (gradient,) = torch.autograd.grad(out.sum(), x)
  negative = x.detach().numpy() <= 0
  slopes = noise.numpy()
  assert torch.equal(gradient, noise)
  np.testing.assert_allclose(out.detach().numpy(), x.detach().numpy() * slopes)
  assert (slopes[~negative] == 1).all()
  assert stats.kstest((slopes[negative] - 0.2) / 0.5, "uniform").pvalue > 1e-4


def test_rrelu_in_eval_draws_nothing_and_uses_the_mean_slope(env):
  x = torch.tensor([-2.0, 3.0]).to("jax")
  before = env.rng.state.state_dict()
  assert F.rrelu(x, 0.1, 0.5).tolist() == pytest.approx([-0.6, 3.0])
  assert torch.nn.RReLU(0.1, 0.5).eval()(x).tolist() == pytest.approx([-0.6, 3.0])
  assert env.rng.state.state_dict() == before


def test_rrelu_in_place_changes_its_argument():
  x = -torch.ones(8, device="jax")
  out = F.rrelu(x, training=True, inplace=True)
  assert out is x and ((x > -1 / 3) & (x <= -1 / 8)).all().item()


POOLINGS = {
  "2d": (torch.ops.aten.fractional_max_pool2d, (2, 3), (3, 4), (7, 9)),
  "2d, no choice": (torch.ops.aten.fractional_max_pool2d, (1, 2), (7, 8), (7, 9)),
  "3d": (torch.ops.aten.fractional_max_pool3d, (3, 2, 2), (1, 4, 3), (8, 9, 5)),
}


@pytest.mark.parametrize("name", POOLINGS)
def test_fractional_pooling_matches_cpu_torch_for_equal_samples(name):
  pool, kernel, pooled, size = POOLINGS[name]
  generator = torch.Generator().manual_seed(0)
  x = torch.randn(2, 3, *size, generator=generator, requires_grad=True)
  samples = torch.rand(2, 3, len(size), generator=generator)
  expected, places = pool(x, kernel, pooled, samples)
  on_jax = x.detach().to("jax").requires_grad_()
  actual, indices = pool(on_jax, kernel, pooled, samples.to("jax"))
  assert torch.equal(actual.detach().cpu(), expected.detach())
  assert torch.equal(indices.cpu().long(), places)
  weights = torch.rand(expected.shape, generator=generator)
  (wanted,) = torch.autograd.grad(expected, x, weights)
  (gradient,) = torch.autograd.grad(actual, on_jax, weights.to("jax"))
  torch.testing.assert_close(gradient.cpu(), wanted)


@pytest.mark.parametrize("dims", [2, 3])
def test_fractional_pooling_draws_new_windows_from_the_stream(env, dims):
  pool = {2: F.fractional_max_pool2d, 3: F.fractional_max_pool3d}[dims]
  x = torch.randn((1, 6) + (12,) * dims, device="jax")
  with env.rng_scope(1):
    first, places = pool(x, 2, output_size=5, return_indices=True)
    second = pool(x, 2, output_size=5)
  with env.rng_scope(1):
    assert torch.equal(pool(x, 2, output_size=5), first)
  assert not torch.equal(first, second)
  assert torch.equal(x.flatten(2).gather(2, places.flatten(2).long()), first.flatten(2))


def test_gumbel_softmax_chooses_in_proportion():
  logits = torch.tensor([0.1, 0.3, 0.6]).log().to("jax").expand(6_000, 3)
  chosen = F.gumbel_softmax(logits, hard=True).sum(0).numpy()
  assert stats.chisquare(chosen, np.array([0.1, 0.3, 0.6]) * 6_000).pvalue > 1e-4
