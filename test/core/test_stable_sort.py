"""Stable sort with positions, against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torchax.core.stable_sort import sort_with_positions

NUMBERS = np.random.default_rng(0).integers(-3, 4, (4, 5, 6))
FLOATS = np.where(NUMBERS == 3, np.nan, NUMBERS * np.float32(1e-39))
FLOATS[0, 0] = [np.inf, -0.0, 0.0, -np.inf, -np.nan, -0.0]
DTYPES = ("float32", "float16", "bfloat16", "int32", "int16", "int8", "uint8", "uint32")


@pytest.mark.parametrize("axis", (0, 1, 2))
@pytest.mark.parametrize("descending", (False, True), ids=("ascending", "descending"))
@pytest.mark.parametrize("dtype", (*DTYPES, "bool"))
def test_order_equals_torch(dtype, descending, axis):
  source = FLOATS if jnp.issubdtype(dtype, jnp.floating) else NUMBERS
  array = jnp.asarray(source).astype(dtype)
  values, positions = sort_with_positions(array, axis, descending)
  wide = torch.from_numpy(np.asarray(array).astype(np.float64))
  expected = torch.sort(wide, dim=axis, descending=descending, stable=True)
  np.testing.assert_array_equal(positions, expected.indices)
  np.testing.assert_array_equal(np.asarray(values).astype(np.float64), expected.values)
  assert values.dtype == array.dtype and positions.dtype == jnp.int32


@pytest.mark.parametrize("in_axis", (0, 1))
def test_trace_runs_without_64_bits(in_axis):
  """The trace has 64-bit integers, which interpreters outside of it must keep."""
  array = jnp.asarray(FLOATS[0], jnp.float32)
  rows = np.moveaxis(np.asarray(array), in_axis, 0)
  expected = np.argsort(rows, 1, kind="stable")

  def order(row):
    return sort_with_positions(row, 0)[1]

  mapped = jax.vmap(order, in_axis)
  np.testing.assert_array_equal(mapped(array), expected)
  program = jax.make_jaxpr(mapped)(array)
  (evaluated,) = jax.core.eval_jaxpr(program.jaxpr, program.consts, array)
  np.testing.assert_array_equal(evaluated, expected)


def test_gradient_returns_to_the_positions():
  array = jnp.asarray([3.0, 1.0, 2.0])
  gradient = jax.grad(lambda x: sort_with_positions(x, 0)[0] @ jnp.arange(3.0))(array)
  np.testing.assert_array_equal(gradient, [2, 0, 1])
