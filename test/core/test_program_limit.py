"""Compilation of programs of single operations, in traces and outside of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerators import cpu_only
from jax import lax

from torchax.compat import versions
from torchax.core import program_limit
from torchax.ops.casting import cast

NUMBERS = np.random.default_rng(0).standard_normal((9, 33)).astype(np.float32)
SCALES = np.exp2(np.random.default_rng(1).integers(-26, 18, NUMBERS.shape))
WIDE = (NUMBERS * SCALES).astype(np.float32)
WIDE[0, :5] = 0.0, -0.0, np.inf, -np.inf, np.nan

FUNCTIONS = {
  "exp": jnp.exp,
  "log": lambda x: jnp.log(jnp.abs(x)),
  "tanh": jnp.tanh,
  "erf": lax.erf,
  "sin": jnp.sin,
  "power": lambda x: jnp.abs(x) ** 1.7,
  "softmax": lambda x: jax.nn.softmax(x, -1),
  "sums": lambda x: (x.sum(), x.sum(0), x.sum(1)),
  "product": lambda x: x.prod(1),
  "cumulative sum": lambda x: jnp.cumsum(x, 1),
  "sort": lambda x: jnp.sort(x, 1),
  "index": lambda x: x[:, ::3].T,
  "gradient": jax.grad(lambda x: (jax.nn.gelu(x) ** 2).sum()),
  "product of matrices": lambda x: x @ x.T,
  "bfloat16": lambda x: jax.nn.gelu(x.astype(jnp.bfloat16)),
  "float16": lambda x: jnp.exp(x.astype(jnp.float16)),
  "complex": lambda x: jnp.exp(lax.complex(x, x)),
  "integers": lambda x: (x * 10).astype(jnp.int32) // 3 % 7,
  "normal numbers": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
  **{
    f"to {dtype}": lambda x, dtype=dtype: cast(x, dtype)
    for dtype in (
      "bfloat16",
      "float16",
      "int8",
      "uint8",
      "float8_e4m3fn",
      "float8_e5m2",
      "float8_e4m3fnuz",
      "float8_e5m2fnuz",
      "float8_e8m0fnu",
    )
  },
}


def _bits(result) -> list[bytes]:
  # All NaNs count as equal.
  arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(result)]
  return [np.where(np.isnan(a), np.ones_like(a), a).tobytes() for a in arrays]


# XLA adds and multiplies in another order, as in a program with more operations.
IN_ANOTHER_ORDER = ("softmax", "sums", "product")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_programs_that_compile_quickly_give_the_same_numbers(name):
  function = FUNCTIONS[name]
  x = WIDE if name.startswith("to ") else NUMBERS
  quick = jax.jit(function, compiler_options=program_limit.quick_options())(x)
  expected = jax.jit(lambda x: function(x))(x)
  if name in IN_ANOTHER_ORDER:
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
      quick,
      expected,
    )
  else:
    assert _bits(quick) == _bits(expected)


SUMS = {
  "all": (lambda x: x.sum(), (1_000_000,)),
  "along rows": (lambda x: x.sum(1), (30, 3000)),
  "along columns": (lambda x: x.sum(0), (3000, 30)),
  "of squares": (lambda x: ((x - 1) ** 2).mean(), (700, 800)),
  "of few numbers": (lambda x: x.sum(), (4000,)),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_quick_programs_are_exact_to_a_few_bits(name, dtype):
  function, shape = SUMS[name]
  with jax.enable_x64(True):
    x = np.abs(np.random.default_rng(2).standard_normal(shape)).astype(dtype)
    quick = jax.jit(function, compiler_options=program_limit.quick_options())(x)
    wide = function(x.astype(np.longdouble))
    tolerance = 8 * jnp.finfo(dtype).eps
  np.testing.assert_allclose(np.asarray(quick, wide.dtype), wide, rtol=tolerance)


@cpu_only("torchax gives these options to XLA's CPU compiler only")
def test_a_small_sum_is_one_kernel():
  options = program_limit.quick_options()
  program = jax.jit(lambda x: x.sum(1), compiler_options=options)
  text = program.lower(jnp.ones((8, 64))).compile().as_text()
  assert text.count(" reduce(") == 1 and "reduce-window" not in text


ELEMENTWISE = [name for name in (*FUNCTIONS, "tangent") if name not in IN_ANOTHER_ORDER]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_options_for_the_same_bits_change_none_but_of_sums(name):
  function = FUNCTIONS.get(name, jnp.tan)
  options = program_limit.quick_options(program_limit.Effort.SAME_BITS)
  quick = jax.jit(function, compiler_options=options)
  assert _bits(quick(NUMBERS)) == _bits(jax.jit(lambda x: function(x))(NUMBERS))


@cpu_only("torchax gives these options to XLA's CPU compiler only")
def test_the_options_are_known_to_this_version_of_xla():
  known = program_limit.quick_options()
  repeated = program_limit.quick_options(program_limit.Effort.REPEATED)
  same_bits = program_limit.quick_options(program_limit.Effort.SAME_BITS)
  assert same_bits.items() < repeated.items() <= known.items()
  assert known.items() <= program_limit._QUICK.items()
  assert len(same_bits) == 2
  # Later versions have no older emitters.
  if versions.is_older(jax.__version__, "0.11"):
    assert known == program_limit._QUICK
  assert program_limit.quick_options(program_limit.Effort.FULL) is None
  level = "xla_backend_optimization_level"
  assert program_limit.quick_options(program_limit.Effort.NONE) == {**known, level: 0}


def test_an_option_that_xla_does_not_know_is_left_out():
  assert not program_limit._is_known("xla_cpu_of_a_later_version", True)


def test_a_value_that_xla_refuses_is_an_error():
  with pytest.raises(jax.errors.JaxRuntimeError):
    program_limit._is_known("xla_backend_optimization_level", "high")


def test_a_program_runs_inside_of_every_transformation():
  double = program_limit.jit(lambda x: 2 * x)
  x = jnp.arange(3.0)
  within = double.in_traces
  assert (double(x) == 2 * x).all()
  assert jax.grad(lambda x: within(x).sum())(x).tolist() == [2.0, 2.0, 2.0]
  assert jax.jit(lambda x: within(x) + 1)(x).tolist() == [1.0, 3.0, 5.0]
  assert jax.vmap(within)(x).tolist() == [0.0, 2.0, 4.0]
  assert jax.jit(jax.grad(lambda x: within(x).sum()))(x).tolist() == [2.0] * 3


def test_programs_of_users_have_their_own_options():
  theirs = program_limit.jit(lambda x: x + 1, is_of_user=True)
  assert jax.jit(lambda x: theirs(x))(jnp.ones(2)).tolist() == [2.0, 2.0]
