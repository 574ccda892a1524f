"""The Airy function at values of DLMF, table 9.9, and of its definition."""

import math

import jax
import pytest
import torch
from ops.harness import Case, check, floats

import torchax

airy_ai = torch.special.airy_ai
# Computed with mpmath at 40 digits: on both sides of the bounds of the series.
VALUES = {
  -20.5: -0.04462568039701191,
  -6.25: -0.3496120516108905,
  -5.75: -0.18884209899944737,
  -2.0: 0.22740742820168558,
  -0.5: 0.4757280916105396,
  0.0: 0.3550280538878172,
  0.5: 0.23169360648083348,
  1.75: 0.05056988080579487,
  2.25: 0.023654658557747447,
  10.0: 1.1047532552898686e-10,
}


@pytest.mark.parametrize(
  "dtype, rtol, atol", [(torch.float32, 5e-6, 5e-6), (torch.float64, 1e-13, 1e-14)]
)
def test_it_has_the_true_values(dtype, rtol, atol):
  """The argument of the cosine at -20.5 is 62, of which float32 rounds 4e-6."""
  points = torch.tensor(list(VALUES), dtype=dtype)
  with jax.enable_x64(True), torchax.default_env():
    actual = airy_ai(points.to("jax")).cpu()
  expected = torch.tensor(list(VALUES.values()), dtype=dtype)
  torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
  "case",
  [
    Case(airy_ai, torch.tensor([math.inf, -math.inf, math.nan])),
    Case(airy_ai, torch.arange(-5, 5), rtol=2e-5, why="torch is right to 1e-5 here"),
    Case(airy_ai, floats(4, dtype=torch.float64)),
  ],
  ids=str,
)
def test_it_gives_what_cpu_torch_gives(case):
  check(case)
