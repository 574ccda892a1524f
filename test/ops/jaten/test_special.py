"""Special functions against CPU torch: values, dtypes, gradients."""

import math

import jax
import numpy as np
import pytest
import scipy.special
import torch
from ops.harness import Case, check, floats, ints

import torchax

special = torch.special
X = floats(3, 4, low=-3.0, high=3.0)
POSITIVE = floats(3, 4, low=0.1, high=6.0)
OTHER = floats(3, 4, low=0.1, high=6.0, seed=1)
PROBABILITY = floats(3, 4, low=0.01, high=0.99)
INTS = ints(3, 4, low=1, high=6)
DEGREES = ints(3, 4, low=-1, high=9)
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -0.5, math.inf, -math.inf, math.nan])
LARGE = torch.tensor([200.0, 1e3, 1e4, 1e5, 1e6])
NEGATIVE = torch.tensor([-2.5, -0.25, -2.0, -1.5, -7.75])
# Arguments for which the factors of erfcx and log_ndtr overflow or underflow.
TAILS = torch.tensor([9.3, 26.6, 80.0, 1e10, math.inf, -30.0, -1e3, -math.inf])
GAMMA = {"rtol": 2e-5, "atol": 2e-5, "why": "gamma series in f32 differ in order"}
CANCELS = {"rtol": 1e-4, "atol": 1e-4, "why": "the recurrence cancels in f32"}

GAMMA_CASES = (
  *(
    Case(function, POSITIVE, grad=True, **GAMMA)
    for function in (torch.lgamma, torch.digamma)
  ),
  Case(torch.lgamma, X, **GAMMA),
  Case(torch.lgamma, torch.tensor([1.0, 2.0]), grad=True, atol=1e-8, why="zeros"),
  Case(torch.lgamma, INTS, **GAMMA),
  Case(torch.lgamma, POSITIVE.to(torch.bfloat16)),
  Case(torch.digamma, SPECIAL[:5], **GAMMA),
  *(Case(torch.polygamma, n, POSITIVE, grad=True, **GAMMA) for n in (0, 1, 2, 3)),
  Case(torch.mvlgamma, POSITIVE + 2, 3, grad=True, **GAMMA),
  *(
    Case(function, POSITIVE, OTHER, **GAMMA)
    for function in (torch.igamma, torch.igammac)
  ),
  *(
    Case(function, LARGE, LARGE + LARGE.sqrt() * step, **GAMMA)
    for function in (torch.igamma, torch.igammac)
    for step in (-3, 0, 2)
  ),
  *(
    Case(function, torch.tensor([math.inf] * 2), torch.tensor([1.0, math.inf]))
    for function in (torch.igamma, torch.igammac)
  ),
  *(
    Case(function, torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1e-3, 0.0, math.inf]))
    for function in (torch.igamma, torch.igammac)
  ),
  Case(special.zeta, POSITIVE + 1.1, OTHER, **GAMMA),
  Case(special.zeta, 2, POSITIVE, **GAMMA),
  Case(special.zeta, torch.tensor([1.0, 0.5, 3.0, 2.0]), 0.0),
  Case(special.zeta, torch.tensor([2.0, 3.0, 1e8, 2.5, 4.0]), NEGATIVE),
  Case(special.zeta, INTS, INTS.flip(0), **GAMMA),
  Case(torch.Tensor.polygamma_, POSITIVE, 2, **GAMMA),
  Case(torch.polygamma, 1, torch.tensor([0.0, math.inf, math.nan])),
)

ERROR_CASES = (
  Case(special.erfcx, X, grad=True, rtol=1e-5, why="exp(9) in f32"),
  Case(special.erfcx, INTS, **GAMMA),
  Case(special.erfcx, TAILS),
  Case(special.log_ndtr, TAILS),
  Case(torch.erfinv, torch.tensor([0.0, -0.0, 1.0, -1.0, 1.5, math.nan])),
  Case(special.ndtr, X, grad=True),
  Case(special.ndtri, PROBABILITY, grad=True, **GAMMA),
  Case(special.log_ndtr, X, grad=True, **GAMMA),
  Case(special.entr, PROBABILITY, grad=True),
  Case(special.entr, SPECIAL),
  Case(special.xlog1py, X, POSITIVE, grad=True),
  Case(special.xlog1py, torch.zeros(7), SPECIAL),
  Case(special.xlog1py, 2, POSITIVE),
)

POLYNOMIAL_CASES = tuple(
  Case(function, *operands, **CANCELS)
  for function in (
    special.chebyshev_polynomial_t,
    special.chebyshev_polynomial_u,
    special.chebyshev_polynomial_v,
    special.chebyshev_polynomial_w,
    special.hermite_polynomial_h,
    special.hermite_polynomial_he,
    special.laguerre_polynomial_l,
    special.legendre_polynomial_p,
    special.shifted_chebyshev_polynomial_t,
    special.shifted_chebyshev_polynomial_u,
    special.shifted_chebyshev_polynomial_v,
    special.shifted_chebyshev_polynomial_w,
  )
  for operands in ((PROBABILITY, DEGREES), (PROBABILITY, 4), (0.3, DEGREES))
)

CASES = GAMMA_CASES + ERROR_CASES + POLYNOMIAL_CASES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_equal_torch_on_the_cpu(case):
  check(case)


def test_polygamma_raises_for_a_negative_order():
  with torchax.default_env(), pytest.raises(RuntimeError):
    torch.polygamma(-1, POSITIVE.to("jax"))


ACCURATE = (
  ("erfinv", torch.cat([floats(200), 1 - floats(100, low=0.0) * 1e-4])),
  ("erfcx", floats(200, low=-3.0, high=30.0)),
  ("log_ndtr", floats(200, low=-30.0, high=3.0)),
  ("ndtri", floats(200, low=1e-3, high=0.999)),
  ("digamma", floats(200, low=-9.9, high=9.9)),
)


@pytest.mark.parametrize(
  "name, values", ACCURATE, ids=lambda v: v if str(v) == v else ""
)
def test_values_are_accurate_to_float32_rounding(name, values):
  """Compare with double precision, since torch's own kernels may round worse."""
  exact = getattr(special, name)(values.double())
  with torchax.default_env():
    actual = getattr(special, name)(values.to("jax")).cpu()
  torch.testing.assert_close(actual.double(), exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
  "name, values", ACCURATE, ids=lambda v: v if str(v) == v else ""
)
def test_float64_values_are_accurate(name, values):
  values = values.double()
  with jax.enable_x64(True), torchax.default_env():
    actual = getattr(special, name)(values.to("jax")).cpu()
  exact = getattr(special, name)(values)
  torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["gammainc", "gammaincc"])
def test_incomplete_gamma_of_large_numbers_in_float64(name):
  """Compare with SciPy, since torch is off by 1e-9."""
  shape = np.geomspace(200, 1e6, 40)[:, None]
  x = shape + np.sqrt(shape) * np.linspace(-3, 3, 9)
  with jax.enable_x64(True):
    actual = getattr(special, name)(*(torch.tensor(v).to("jax") for v in (shape, x)))
    np.testing.assert_allclose(
      actual.cpu(), getattr(scipy.special, name)(shape, x), 1e-12
    )


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_polygamma_is_accurate_near_its_poles(n):
  """torch's float32 kernel of the trigamma function loses digits there."""
  values = torch.cat([floats(40, low=-9.9, high=-0.1), torch.tensor([-3.001, -0.499])])
  exact = torch.polygamma(n, values.double())
  with torchax.default_env():
    actual = torch.polygamma(n, values.to("jax")).cpu()
  torch.testing.assert_close(actual.double(), exact, rtol=2e-6, atol=2e-5)
