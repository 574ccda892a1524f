"""Exactness of samplers in their dtype: spans, probabilities, tails, impossible values.

Random words are chosen where a fault would take billions of draws to show.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rng.sampler_rows import all_words
from scipy import special, stats

import torchax
from torchax.interop import jax_jit
from torchax.rng import RngState, samplers, threefry, uniform
from torchax.rng.special_functions import normal_above

pytestmark = pytest.mark.distributions

RARE = 1e-4
ONES = 0xFFFFFFFF
NAN = float("nan")
f16, bf16, f32, f64 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64


def _key(seed=0):
  return RngState.from_seed(seed).draw_key()


# Integers ---------------------------------------------------------------------------

WIDE = 3 << 29  # with a modulus, a third of them would be a third less likely
INTEGERS = {
  "randint": lambda n, high: torch.randint(0, high, (n,), device="jax"),
  "randint_like": lambda n, high: torch.randint_like(
    torch.zeros(n, dtype=torch.int32, device="jax"), high
  ),
  "random_": lambda n, high: torch.zeros(n, dtype=torch.int32, device="jax").random_(
    high
  ),
  "random_ from to": lambda n, high: (
    torch.zeros(n, dtype=torch.int32, device="jax").random_(-5, high - 5) + 5
  ),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_of_a_wide_span_are_uniform(name):
  torch.manual_seed(0)
  drawn = INTEGERS[name](60_000, WIDE).numpy()
  thirds = np.bincount(drawn // (1 << 29), minlength=3)
  assert stats.chisquare(thirds).pvalue > RARE, thirds


@pytest.mark.parametrize(
  "dtype, span",
  [("int64", 3 << 61), ("int64", WIDE), ("uint32", 3 << 30), ("uint64", 3 << 62)],
)
def test_integers_of_64_bits_and_unsigned_ones_are_uniform(dtype, span):
  with jax.enable_x64(True):
    drawn = samplers.integers(_key(), (60_000,), jnp.dtype(dtype), 0, span)
    thirds = np.bincount(np.asarray(drawn // (span // 3)).astype(int), minlength=3)
  assert stats.chisquare(thirds).pvalue > RARE, thirds


@pytest.mark.parametrize("span", [1, 2, 3, 10, 1000, WIDE, 2**31, 2**32 - 1, 2**32])
def test_an_integer_is_the_part_of_the_span_that_64_bits_say(span):
  """Exactly floor(U span) with U of 64 bits, computed in 32-bit arithmetic."""
  words = np.asarray(threefry.two_words(_key(), (500,))).astype(object)
  expected = [(int(a) << 32 | int(b)) * span >> 64 for a, b in words.T]
  drawn = uniform.scale_to_integer(_key(), (500,), span, jnp.uint32)
  if span & (span - 1) == 0 or span < 2**32:
    assert drawn.tolist() == expected
  if span < 2**32:  # arrays of bounds use the same computation
    traced = uniform.scale_to_integer(
      _key(), (500,), jnp.asarray(span, jnp.uint32), jnp.uint32
    )
    assert jnp.array_equal(traced, drawn)


@pytest.mark.parametrize("span", [3, 3 << 60, 2**63 + 1, 2**64 - 1])
def test_uint64_integers_scale_128_random_bits_to_the_span(span):
  with jax.enable_x64(True):
    first = jax.random.bits(_key(), (200,), "uint64").tolist()
    second = threefry.second_words(_key(), (200,), "uint64").tolist()
    drawn = uniform.scale_to_integer(_key(), (200,), span, jnp.uint64).tolist()
  assert drawn == [(a << 64 | b) * span >> 128 for a, b in zip(first, second)]


def test_an_integer_is_the_same_with_64_bit_types_as_without():
  narrow = samplers.integers(_key(), (100,), jnp.int32, -7, WIDE)
  with jax.enable_x64(True):
    wide = samplers.integers(_key(), (100,), jnp.int64, -7, WIDE)
  assert narrow.tolist() == wide.tolist()


# Probabilities ----------------------------------------------------------------------

PIECE, PIECES = 1 << 23, 16
_count = jax.jit(lambda key, p: uniform.is_below(key, (PIECE,), p).sum())
_count_number = jax.jit(
  lambda key, p: uniform.is_below(key, (PIECE,), p).sum(), static_argnums=1
)


@pytest.mark.parametrize("count", [_count, _count_number], ids=["array", "number"])
def test_a_rare_event_has_the_rate_that_is_written(count):
  """With 23 uniform bits, the rate over 2**27 elements was twelve times as high."""
  p = 1e-8
  p = p if count is _count_number else jnp.float32(p)
  events = sum(int(count(_key(seed), p)) for seed in range(PIECES))
  assert stats.binomtest(events, PIECE * PIECES, 1e-8).pvalue > 1e-3, events


@pytest.mark.parametrize("p", [1e-8, 0.1, 0.5, 1 - 1e-8, 1 - 2.0**-53, 2.0**-60])
@pytest.mark.parametrize("kind", [float, f32])
def test_a_probability_is_compared_to_its_last_digit(p, kind):
  steps = round(float(kind(p)) * 2**62)
  p = p if kind is float else jnp.asarray(p, kind)

  def is_below(steps):
    with all_words(*(word << 1 for word in divmod(steps, 1 << 31))):
      return uniform.is_below(_key(), (), p).item()

  assert is_below(steps - 1)
  assert steps == 2**62 or not is_below(steps)


@pytest.mark.parametrize(
  "drop",
  [
    lambda x: F.dropout(x, 1e-8) == 0,
    lambda x: torch.native_dropout(x, 1e-8, True)[0] == 0,
    lambda x: F.dropout1d(x.view(1, -1, 1), 1e-8) == 0,
    lambda x: F.alpha_dropout(x, 1e-8, True) < 0,
    lambda x: x.clone().bernoulli_(1 - 1e-8) == 0,
  ],
  ids=["dropout", "native_dropout", "dropout1d", "alpha_dropout", "bernoulli_"],
)
def test_a_rare_drop_happens(env, drop):
  """float32 rounds 1 - 1e-8 to 1."""

  def dropped(word: int):
    torchax.clear_caches()  # programs with other words
    try:
      with env, all_words(word):
        return drop(torch.ones(3, device="jax")).cpu()
    finally:
      torchax.clear_caches()

  assert dropped(ONES).all()
  assert not dropped(ONES - 100).any()  # 2.4e-8 below 1


# Uniform ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, digits", [(f32, 24), (f64, 53), (f16, 11), (bf16, 8)])
def test_a_uniform_number_has_torchs_digits_and_is_never_1(dtype, digits):
  with jax.enable_x64(dtype is f64):
    with all_words(ONES):
      most = samplers.uniform(_key(), (), dtype).astype(float).item()
      assert samplers.uniform(_key(), (), dtype, 1.0, 3.0) < 3
      assert samplers.uniform(_key(), (), dtype, 0.1, 0.3) < jnp.asarray(0.3, dtype)
    drawn = np.asarray(samplers.uniform(_key(), (20_000,), dtype)).astype(np.float64)
  assert most == 1 - 2.0**-digits
  steps = drawn * 2.0**digits
  assert np.array_equal(steps, np.floor(steps))
  assert abs((steps % 2).mean() - 0.5) < 5 * 0.5 / np.sqrt(len(steps))


# Tails ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, rtol", [(f32, 4e-7), (f64, 2e-15)])
def test_the_normal_quantile_is_exact_in_its_tails(dtype, rtol):
  tail = np.concatenate([2.0 ** -np.arange(1.05, 64, 0.11), np.linspace(1e-5, 0.499)])
  with jax.enable_x64(True):
    tail = tail.astype(dtype)
    found = np.asarray(normal_above(jnp.asarray(tail)), np.float64)
  np.testing.assert_allclose(found, -special.ndtri(tail.astype(np.float64)), rtol)


@pytest.mark.parametrize("dtype", [f32, f64])
@pytest.mark.parametrize(
  "words", [(0, 1 << 9), (0, 1 << 31), (1 << 20, 5), (1 << 30, 0)]
)
@pytest.mark.parametrize("is_upper", [False, True])
def test_each_law_is_its_quantile_at_its_bits(words, dtype, is_upper):
  dropped = int(dtype is f32)  # 63 of the bits suffice
  tail = ((words[0] << 32 | words[1]) >> dropped) + 0.5
  tail /= 2 ** (64 - dropped)
  if is_upper:
    words = tuple(ONES - word for word in words)
  sign = 1 if is_upper else -1
  expected = {
    "normal": -sign * special.ndtri(tail),
    "exponential": -np.log(tail) if is_upper else -np.log1p(-tail),
    "cauchy": sign / np.tan(np.pi * tail),
  }
  with jax.enable_x64(dtype is f64), all_words(*words):
    for name, number in expected.items():
      found = getattr(samplers, name)(_key(), (), dtype).item()
      np.testing.assert_allclose(found, number, 2e-6, 1e-6, err_msg=name)


def test_normals_beyond_5_45_sigma_are_drawn():
  """A uniform number of 23 bits has no such quantile; 6.8 of 2**27 are expected."""
  count = jax.jit(
    lambda key: (jnp.abs(samplers.normal(key, (PIECE,), f32)) > 5.45).sum()
  )
  found = sum(int(count(_key(seed))) for seed in range(PIECES))
  law = stats.poisson(PIECE * PIECES * 2 * stats.norm.sf(5.45))
  assert found > 0
  assert min(law.cdf(found), law.sf(found - 1)) > RARE, found


@pytest.mark.parametrize("dtype", [f32, bf16, f16])
def test_a_log_normal_and_a_geometric_reach_as_far(dtype):
  with all_words(ONES):
    far = samplers.log_normal(_key(), (), f32, 0.0, 0.5).item()
    trials = samplers.geometric(_key(), (), dtype, 0.5).item()
    count = samplers.geometric(_key(), (), jnp.int8, 1e-3).item()
  assert far == pytest.approx(np.exp(9.15 / 2), rel=0.1)
  assert trials == 64 and count == 127


def test_the_least_half_precision_exponential_is_subnormal():
  with all_words(0):
    assert samplers.exponential(_key(), (), f16).item() == 2.0**-24
    assert samplers.exponential(_key(), (), f32).item() > 0


# Words ------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("shape", [(), (7,), (3, 500)])
def test_two_words_are_jaxs_and_others(impl, shape):
  key = jax.random.key(3, impl=impl)
  first, second = threefry.two_words(key, shape)
  assert jnp.array_equal(first, jax.random.bits(key, shape))
  assert not (first == second).any()
  with jax.threefry_partitionable(False):
    first, second = threefry.two_words(key, shape)
    assert jnp.array_equal(first, jax.random.bits(key, shape))
  with jax.debug_key_reuse(True):
    again = threefry.two_words(jax.random.key(3, impl=impl), shape)
  expected = threefry.two_words(key, shape)
  assert all(jnp.array_equal(a, b) for a, b in zip(again, expected))


def test_the_bits_of_two_words_are_even_and_independent():
  words = np.asarray(threefry.two_words(_key(), (20_000,)))
  bits = (words[..., None] >> np.arange(32) & 1).transpose(0, 2, 1).reshape(64, -1)
  correlation = np.corrcoef(bits) - np.eye(64)
  assert abs(correlation).max() < 5.5 / np.sqrt(bits.shape[1])
  assert abs(bits.mean(1) - 0.5).max() < 5 * 0.5 / np.sqrt(bits.shape[1])


# Impossible values ------------------------------------------------------------------

t = torch.tensor
LEAST = -(2**31)


def _t(*numbers):
  return t(numbers).to("jax")


# name -> (draw from a tensor, its numbers, which of them are valid).
IMPOSSIBLE = {
  "bernoulli": (torch.bernoulli, [1.0, 2.0, -0.5, NAN]),
  "bernoulli_": (lambda p: p.clone().bernoulli_(p), [1.0, 2.0, -0.5, NAN]),
  "normal std": (lambda std: torch.normal(0.0, std), [1.0, -1.0, NAN]),
  "normal both": (lambda std: torch.normal(std * 0, std), [1.0, -1.0, NAN]),
  "poisson": (torch.poisson, [1.0, -1.0, NAN]),
  "binomial prob": (lambda p: torch.binomial(p * 0 + 5, p), [0.5, 2.0, -0.1, NAN]),
  "binomial count": (lambda n: torch.binomial(n, n * 0 + 0.5), [5.0, -1.0, NAN]),
  "gamma": (torch._standard_gamma, [1.0, -1.0, NAN]),
  "dirichlet": (
    lambda a: torch._sample_dirichlet(a[:, None].expand(-1, 2))[:, 0],
    [1.0, -1.0, NAN],
  ),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_parameter_on_the_device_gives_nan(name, wrap):
  draw, parameters = IMPOSSIBLE[name]
  found = wrap(draw)(_t(*parameters)).isnan().tolist()
  assert found == [False] + [True] * (len(parameters) - 1)


WITHOUT_NAN = {
  "bernoulli_ of int32": (
    lambda p: torch.zeros(2, dtype=torch.int32, device="jax").bernoulli_(p),
    [1.0, 2.0],
    [1, LEAST],
  ),
  "bernoulli_ of uint8": (
    lambda p: torch.zeros(2, dtype=torch.uint8, device="jax").bernoulli_(p),
    [1.0, NAN],
    [1, 255],
  ),
  "multinomial": (
    lambda w: torch.multinomial(torch.stack([w, 0 * w, -w]), 1)[:, 0],
    [0.0, 1.0],
    [1, LEAST, LEAST],
  ),
  "multinomial with replacement": (
    lambda w: torch.multinomial(torch.stack([w, w / 0]), 1, True)[:, 0],
    [0.0, 1.0],
    [1, LEAST],
  ),
  "randint_like": (
    lambda high: torch.randint_like(
      torch.zeros(2, dtype=torch.int32, device="jax"), high[0].int()
    ),
    [-3.0],
    [LEAST, LEAST],
  ),
}


@pytest.mark.parametrize("name", WITHOUT_NAN)
def test_a_result_without_nan_raises_or_is_no_plausible_number(env, name):
  draw, parameters, compiled = WITHOUT_NAN[name]
  before = env.rng.state.state_dict()
  with env:
    with pytest.raises(RuntimeError):
      draw(_t(*parameters))
    assert env.rng.state.state_dict() == before
    assert jax_jit(draw)(_t(*parameters)).tolist() == compiled
