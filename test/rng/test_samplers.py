"""Results of each random operation: supports, bounds, dtypes, exact cases.

Distributions inside the supports are tested in `test_statistics.py`, refusals in
`test_errors.py`.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from torchax.ops import mappings
from torchax.rng import RngState, samplers

pytestmark = pytest.mark.distributions

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32)


def _key(count=0):
  return RngState.from_seed(0).draw_key(count)


def _zeros(n=10_000, dtype=torch.float32) -> torch.Tensor:
  return torch.zeros(n, dtype=dtype, device="jax")


def _numpy(tensor) -> np.ndarray:
  return np.asarray(tensor.jax().astype(jnp.float32))


@pytest.fixture
def x64():
  with jax.enable_x64(True):
    yield


# Uniform ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_uniform_number_reaches_low_and_never_high(dtype):
  drawn = _numpy(torch.rand(100_000, device="jax", dtype=dtype))
  assert drawn.min() >= 0 and drawn.max() < 1
  step = float(jnp.finfo(mappings.t2j_dtype(dtype)).eps)
  assert drawn.min() <= max(step, 1e-4) and drawn.max() >= 1 - max(step, 1e-4)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("low, high", [(1.0, 1.01), (-3.0, -2.5), (1000.0, 1001.0)])
def test_rounding_never_reaches_the_excluded_bound(dtype, low, high):
  """In a narrow interval u * (high - low) + low rounds to high."""
  drawn = _zeros(50_000, dtype).uniform_(low, high)
  low, high = (torch.tensor(bound, dtype=dtype).float().item() for bound in (low, high))
  drawn = _numpy(drawn)
  assert drawn.min() >= low
  assert drawn.max() < high or high == low


def test_an_empty_interval_gives_its_only_number():
  assert set(_zeros(10).uniform_(2.5, 2.5).tolist()) == {2.5}


def test_a_complex_uniform_fills_the_unit_square():
  drawn = np.asarray(torch.rand(10_000, device="jax", dtype=torch.complex64).jax())
  for part in (drawn.real, drawn.imag):
    assert part.min() >= 0 and 0.99 < part.max() < 1
  assert abs(np.corrcoef(drawn.real, drawn.imag)[0, 1]) < 0.05


# Normal and its relatives -----------------------------------------------------------


def test_a_standard_deviation_of_zero_gives_the_mean():
  assert set(_zeros(10).normal_(1.5, 0.0).tolist()) == {1.5}
  mean = torch.arange(4.0).to("jax")
  assert torch.equal(torch.normal(mean, 0.0), mean)


def test_a_complex_normal_has_variance_one_in_all():
  drawn = np.asarray(torch.randn(20_000, device="jax", dtype=torch.complex64).jax())
  # The variance of a sample of n numbers of variance 1/2 is within 5 sigma of it.
  bound = 5 * 0.5 * np.sqrt(2 / len(drawn))
  assert abs(drawn.real.var() - 0.5) < bound
  assert abs(drawn.imag.var() - 0.5) < bound
  assert abs(np.corrcoef(drawn.real, drawn.imag)[0, 1]) < 5 / np.sqrt(len(drawn))


def test_normal_applies_parameters_element_by_element():
  mean = torch.tensor([[0.0], [100.0]]).to("jax")
  std = torch.tensor([0.0, 1.0, 10.0]).to("jax")
  drawn = _numpy(torch.normal(mean.expand(2, 3), std.expand(2, 3)))
  assert drawn[0, 0] == 0 and drawn[1, 0] == 100
  assert (drawn[1] > 40).all() and (abs(drawn[0]) < 60).all()


def test_normal_keeps_the_dtype_of_its_parameters():
  mean = torch.zeros(8, dtype=torch.bfloat16, device="jax")
  assert torch.normal(mean, 1.0).dtype == torch.bfloat16
  assert torch.normal(0.0, mean + 1).dtype == torch.bfloat16


def test_log_normal_is_the_exponential_of_the_normal_draw(env):
  with env.rng_scope(3):
    logs = _zeros(100).normal_(0.5, 0.25)
  with env.rng_scope(3):
    drawn = _zeros(100).log_normal_(0.5, 0.25)
  np.testing.assert_allclose(np.log(_numpy(drawn)), _numpy(logs), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_exponential_is_finite_and_never_zero(dtype):
  drawn = _zeros(200_000, dtype).exponential_(3.0)
  assert torch.isfinite(drawn).all().item() and (drawn > 0).all().item()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_exponential_of_infinite_rate_is_zero(dtype):
  assert _zeros(4, dtype).exponential_(float("inf")).tolist() == [0.0] * 4


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_cauchy_is_never_nan(dtype):
  assert not torch.isnan(_zeros(200_000, dtype).cauchy_()).any().item()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.uint8], ids=str)
def test_a_geometric_counts_trials_from_one(dtype):
  drawn = _numpy(_zeros(20_000, dtype).geometric_(0.5))
  assert drawn.min() == 1 and np.array_equal(drawn, np.floor(drawn))
  assert drawn.max() < 60


# Integers ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_randint_hits_every_integer_of_its_range_and_no_other(dtype):
  drawn = torch.randint(3, 10, (2_000,), device="jax", dtype=dtype)
  assert set(drawn.tolist()) == set(range(3, 10))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_randint_covers_a_whole_narrow_dtype(dtype):
  limits = torch.iinfo(dtype)
  drawn = torch.randint(
    limits.min, limits.max + 1, (20_000,), device="jax", dtype=dtype
  )
  assert set(drawn.tolist()) == set(range(limits.min, limits.max + 1))


def test_randint_reaches_the_largest_integer_from_any_low():
  drawn = torch.randint(100, 128, (2_000,), device="jax", dtype=torch.int8)
  assert set(drawn.tolist()) == set(range(100, 128))
  drawn = torch.randint(-100, 128, (20_000,), device="jax", dtype=torch.int8)
  assert set(drawn.tolist()) == set(range(-100, 128))


def test_randint_of_the_widest_range_uses_all_bits():
  drawn = torch.randint(-(2**31), 2**31, (4_000,), device="jax", dtype=torch.int32)
  bits = np.asarray(drawn.jax()).view(np.uint32)[:, None] >> np.arange(32) & 1
  assert (abs(bits.mean(0) - 0.5) < 5 * 0.5 / np.sqrt(len(bits))).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32], ids=str)
def test_random_fills_the_non_negative_half_of_an_integer_dtype(dtype):
  drawn = np.asarray(_zeros(20_000, dtype).random_().jax()).astype(np.int64)
  top = torch.iinfo(dtype).max
  assert drawn.min() >= 0 and drawn.min() <= top // 100
  assert drawn.max() <= top and drawn.max() >= top - top // 100


@pytest.mark.parametrize("dtype, top", [(torch.bfloat16, 2**8), (torch.float16, 2**11)])
def test_random_fills_the_exact_integers_of_a_float_dtype(dtype, top):
  drawn = _numpy(_zeros(40_000, dtype).random_())
  assert drawn.min() == 0 and drawn.max() == top
  assert np.array_equal(drawn, np.floor(drawn))


def test_random_of_bools_is_either():
  assert set(_zeros(100, torch.bool).random_().tolist()) == {False, True}


def test_random_takes_one_bound_or_two():
  assert set(_zeros(500).random_(4).tolist()) == set(range(4))
  assert set(_zeros(500).random_(-2, 2).tolist()) == set(range(-2, 2))


def test_a_tensor_may_be_the_bound_of_randint_like():
  high = torch.tensor(4).to("jax")
  drawn = torch.randint_like(_zeros(500, torch.int32), high)
  assert set(drawn.tolist()) == set(range(4))


def test_under_x64_integers_use_64_bits(x64):
  drawn = np.asarray(samplers.integers(_key(), (2_000,), jnp.int64, 0, 2**62))
  bits = drawn[:, None] >> np.arange(62) & 1
  assert (abs(bits.mean(0) - 0.5) < 5 * 0.5 / np.sqrt(len(bits))).all()
  drawn = np.asarray(samplers.integers(_key(), (2_000,), jnp.int64, -(2**63), 2**63))
  assert drawn.min() < -(2**62) and drawn.max() > 2**62


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize("n", [0, 1, 2, 257])
def test_randperm_is_a_permutation(n, dtype):
  drawn = torch.randperm(n, device="jax", dtype=dtype)
  assert sorted(drawn.tolist()) == list(range(n))


# Bernoulli, dropout -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.bool], ids=str)
def test_bernoulli_of_p_0_and_1_is_sure(dtype):
  assert not _zeros(5_000, dtype).bernoulli_(0.0).any().item()
  assert _zeros(5_000, dtype).bernoulli_(1.0).all().item()


def test_bernoulli_takes_a_probability_for_each_element():
  p = torch.tensor([0.0, 1.0, 0.0, 1.0]).to("jax").repeat(1_000)
  expected = p.tolist()
  assert torch.bernoulli(p).tolist() == expected
  assert _zeros(4_000).bernoulli_(p).tolist() == expected


@pytest.mark.parametrize("p", [0.1, 0.5, 0.75])
def test_dropout_zeroes_or_scales_by_one_over_keep(p):
  kept = F.dropout(torch.ones(5_000, device="jax"), p)
  scale = np.float32(1 / (1 - p))
  values = set(np.unique(_numpy(kept)))
  assert values == {np.float32(0), scale}


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_dropout_is_the_same_with_and_without_the_environment(env, p):
  x = torch.arange(1.0, 1000.0).to("jax")
  with env.rng_scope(1):
    plain = F.dropout(x, p)
  with env, env.rng_scope(1):
    inside = F.dropout(x, p)
  assert torch.equal(plain, inside)


def test_dropout_in_eval_or_with_p_0_is_identity_without_draws(env):
  x = torch.arange(5.0).to("jax")
  before = env.rng.state.state_dict()
  with env:
    assert torch.equal(F.dropout(x, 0.5, training=False), x)
    assert torch.equal(F.dropout(x, 0.0), x)
    assert torch.equal(F.dropout2d(x.view(1, 5, 1, 1), 0.5, False).flatten(), x)
    assert torch.equal(F.alpha_dropout(x, 0.5, False), x)
  assert env.rng.state.state_dict() == before


@pytest.mark.parametrize("with_env", [True, False])
def test_dropout_with_p_1_gives_zeros(env, with_env):
  with env if with_env else contextlib.nullcontext():
    assert not F.dropout(torch.ones(100, device="jax"), 1.0).any().item()


def test_dropout_in_place_changes_its_argument():
  x = torch.ones(1_000, device="jax")
  out = F.dropout(x, 0.5, inplace=True)
  assert out is x and set(x.tolist()) == {0.0, 2.0}


@pytest.mark.parametrize(
  "dropout, dims",
  [(F.dropout1d, 1), (F.dropout2d, 2), (F.dropout3d, 3)],
  ids=["dropout1d", "dropout2d", "dropout3d"],
)
def test_feature_dropout_drops_whole_channels(env, dropout, dims):
  for scope in (env, env.disabled()):
    with scope:
      x = torch.ones((20, 30) + (2,) * dims, device="jax")
      kept = _numpy(dropout(x, 0.5)).reshape(600, -1)
    assert (kept == kept[:, :1]).all()
    assert set(np.unique(kept)) == {0.0, 2.0}
    assert 200 < (kept[:, 0] == 0).sum() < 400


@pytest.mark.parametrize(
  "dropout, shape",
  [(F.alpha_dropout, (100_000,)), (F.feature_alpha_dropout, (1000, 100, 3))],
  ids=["alpha_dropout", "feature_alpha_dropout"],
)
def test_alpha_dropout_keeps_mean_zero_and_variance_one(env, dropout, shape):
  with env:
    x = torch.randn(shape, device="jax")
    kept = _numpy(dropout(x, 0.3, training=True))
  # Two values of fixed magnitude plus a normal: the kurtosis stays below 4.
  assert abs(kept.mean()) < 5 / np.sqrt(np.prod(shape[:2]))
  assert abs(kept.var() - 1) < 5 * np.sqrt(3 / np.prod(shape[:2]))
  dropped = np.unique(kept[x.jax() * 0 == 0].round(4), return_counts=True)
  assert dropped[1].max() > 0.28 * kept.size  # the saturation value


def test_attention_dropout_drops_weights_and_scales_the_rest():
  n = 64
  query = torch.zeros(1, 1, n, n, device="jax")
  value = torch.eye(n, device="jax")[None, None]
  weights = _numpy(F.scaled_dot_product_attention(query, query, value, dropout_p=0.5))
  assert set(np.unique(weights * n)) == {0.0, 2.0}
  assert abs((weights == 0).mean() - 0.5) < 5 * 0.5 / n


# Multinomial ------------------------------------------------------------------------


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_multinomial_never_draws_a_category_of_weight_zero(dtype, replacement):
  weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 3.0, 0.0], dtype=dtype).to("jax")
  drawn = [torch.multinomial(weights.expand(200, 6), 3, replacement).flatten().tolist()]
  assert set(drawn[0]) == {1, 3, 4}


def test_multinomial_without_replacement_repeats_nothing():
  weights = torch.rand(200, 9, device="jax") + 0.01
  for row in torch.multinomial(weights, 9).tolist():
    assert sorted(row) == list(range(9))


def test_multinomial_takes_one_row_or_many():
  weights = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).to("jax")
  assert torch.multinomial(weights, 1).tolist() == [[0], [1]]
  assert torch.multinomial(weights[1], 4, True).tolist() == [1, 1, 1, 1]


def test_the_sum_of_the_weights_does_not_matter(env):
  weights = torch.tensor([1.0, 2.0, 5.0]).to("jax")
  for replacement in (False, True):
    with env.rng_scope(1):
      drawn = torch.multinomial(weights.expand(50, 3), 2, replacement)
    with env.rng_scope(1):
      scaled = torch.multinomial(weights.expand(50, 3) * 64, 2, replacement)
    assert torch.equal(drawn, scaled)


# Common to all ----------------------------------------------------------------------


SAMPLERS = {
  "uniform": lambda key: samplers.uniform(key, (100,), jnp.float32),
  "normal": lambda key: samplers.normal(key, (100,), jnp.float32),
  "bernoulli": lambda key: samplers.bernoulli(key, (100,), 0.5),
  "integers": lambda key: samplers.integers(key, (100,), jnp.int32, 0, 1000),
  "permutation": lambda key: samplers.permutation(key, 100, jnp.int32),
  "exponential": lambda key: samplers.exponential(key, (100,), jnp.float32),
  "cauchy": lambda key: samplers.cauchy(key, (100,), jnp.float32),
  "geometric": lambda key: samplers.geometric(key, (100,), jnp.float32, 0.1),
  "multinomial": lambda key: samplers.multinomial(key, jnp.ones(100), 9, False),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_is_a_function_of_its_key(name):
  sample = SAMPLERS[name]
  assert jnp.array_equal(sample(_key(0)), sample(_key(0)))
  assert not jnp.array_equal(sample(_key(0)), sample(_key(1)))


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_row_of_a_batch_is_drawn_as_if_alone(name):
  sample = SAMPLERS[name]
  keys = jax.random.split(jax.random.key(0), 3)
  batch = jax.vmap(sample)(keys)
  for row, key in zip(batch, keys):
    assert jnp.array_equal(row, sample(key))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (3, 1, 4)], ids=str)
def test_any_shape_can_be_drawn(env, shape):
  drawn = [
    torch.rand(shape, device="jax"),
    torch.randn(shape, device="jax"),
    torch.randint(0, 5, shape, device="jax"),
    torch.empty(shape, device="jax").bernoulli_(0.5),
    torch.empty(shape, device="jax").exponential_(),
  ]
  assert [tuple(tensor.shape) for tensor in drawn] == [shape] * 5
  assert env.rng.state.count == 5  # an empty draw counts like any other


def test_a_view_is_filled_in_its_base():
  base = torch.zeros(4, 6, device="jax")
  base[1:3, ::2].uniform_(1.0, 2.0)
  filled = _numpy(base) > 0
  expected = np.zeros((4, 6), bool)
  expected[1:3, ::2] = True
  assert np.array_equal(filled, expected)


def test_an_out_tensor_receives_the_draw(env):
  with env.rng_scope(2):
    expected = torch.rand(5, device="jax")
  out = torch.zeros(5, device="jax")
  with env.rng_scope(2):
    torch.rand(5, out=out)
  assert torch.equal(out, expected)
