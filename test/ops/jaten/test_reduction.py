"""Reductions and scans against CPU torch: values, indices, dtypes, gradients."""

import math
import warnings

import jax
import jax.numpy as jnp
import pytest
import torch
from ops.harness import Case, check, floats, ints

import torchax
from torchax import interop
from torchax.compat import versions

bf16 = torch.bfloat16
X = floats(3, 4, 5)
ROWS = floats(3, 4, low=0.2, high=2.0)
INTS = ints(3, 4, low=-3, high=6)
BOOLS = ints(3, 4, low=0, high=2, dtype=torch.bool)
BYTES = ints(3, 4, low=0, high=2, dtype=torch.uint8)
COMPLEX = torch.complex(ROWS, floats(3, 4, seed=1))
SCALAR = torch.tensor(2.5)
GAPS = torch.tensor([[1.0, 3.0, math.nan, 2.0], [5.0, math.nan, math.nan, 4.0]])
# XLA loses NaN in the extrema of so many elements on the CPU.
MANY = floats(64, 128)
MANY[:, 40] = MANY[:, 100] = math.nan
INFINITE = torch.full((2, 3), -math.inf)
DATA_WHY = "the result depends on the data in shape, or is a Python value"

MANY_CASES = (
  *(Case(f, MANY) for f in (torch.amax, torch.amin, torch.aminmax)),
  *(Case(f, MANY, 1) for f in (torch.max, torch.min, torch.argmax, torch.argmin)),
  *(Case(torch.linalg.vector_norm, MANY, order, 1) for order in (math.inf, -math.inf)),
  Case(torch.max, MANY.bfloat16()),
)

SUM_CASES = (
  *(
    Case(function, X, *dims, grad=True)
    for function in (torch.sum, torch.mean, torch.nansum, torch.amax, torch.amin)
    for dims in ((), (1,), ((0, -1), True))
  ),
  *(Case(torch.logsumexp, X, dim, grad=True) for dim in (1, (0, 2))),
  Case(torch.logsumexp, INFINITE, 1),
  Case(torch.logsumexp, INTS, 0),
  Case(torch.sum, INTS),
  Case(torch.sum, BOOLS, 1),
  Case(torch.sum, X.to(bf16), 0),
  Case(torch.sum, INTS, 0, dtype=torch.float32),
  Case(torch.sum, SCALAR, 0),
  Case(torch.sum, COMPLEX, 1),
  Case(torch.mean, INTS, 0, dtype=torch.float32),
  Case(torch.nansum, GAPS, 1),
  Case(torch.nansum, BOOLS),
  Case(torch.prod, ROWS, grad=True),
  Case(torch.prod, ROWS, 1, True, grad=True),
  Case(torch.prod, INTS, 0),
  Case(torch.prod, BOOLS),
  Case(torch.trace, ROWS, grad=True),
  Case(torch.trace, INTS),
  Case(torch.count_nonzero, INTS),
  Case(torch.count_nonzero, INTS, 1),
  Case(torch.count_nonzero, X, (0, 1)),
)

TRUTH_CASES = tuple(
  Case(function, values, *dims)
  for function in (torch.any, torch.all)
  for values in (BOOLS, BYTES, INTS)
  for dims in ((), (1,), ((0, 1), True))
) + (
  Case(torch.any, GAPS, 0),
  Case(torch.equal, X, X, jit=False, why=DATA_WHY),
  Case(torch.equal, INTS, X, jit=False, why=DATA_WHY),
  Case(torch.equal, X, X + 1, jit=False, why=DATA_WHY),
  Case(torch.allclose, X, X + 1e-7, jit=False, why=DATA_WHY),
  Case(torch.allclose, GAPS, GAPS, jit=False, why=DATA_WHY),
)

EXTREMUM_CASES = (
  *(
    Case(function, values, *dims, grad=values.is_floating_point())
    for function in (torch.max, torch.min)
    for values in (X, INTS)
    for dims in ((), (1,), (-1, True))
  ),
  *(
    Case(function, values, *dims)
    for function in (torch.argmax, torch.argmin)
    for values in (X, INTS, GAPS)
    for dims in ((), (1,), (0, True))
  ),
  Case(torch.max, GAPS, 1),
  Case(torch.max, SCALAR, 0),
  Case(torch.argmax, SCALAR, 0),
  Case(torch.argmax, ROWS, keepdim=True),
  Case(torch.amax, GAPS),
  Case(torch.amax, BOOLS, 0),
  Case(torch.max, INTS, INTS.flip(0)),
  Case(torch.min, ROWS, ROWS.flip(0), grad=True),
  # torch 2.11 has no derivative of it.
  Case(torch.aminmax, ROWS, grad=not versions.is_older(torch.__version__, "2.13")),
  Case(torch.aminmax, ROWS, dim=1, keepdim=True),
)

MOMENT_CASES = (
  *(
    Case(function, X, *dims, grad=True)
    for function in (torch.var, torch.std)
    for dims in ((), (1,), ((0, -1),))
  ),
  Case(torch.var, X, 1, correction=0, grad=True),
  Case(torch.var, X, 1, correction=2.5),
  Case(torch.var, ROWS, 1, correction=9),
  Case(torch.var, X, unbiased=False),
  Case(torch.std, X.to(bf16), 1, keepdim=True),
  Case(torch.var, COMPLEX, 1),
  Case(torch.var_mean, X, 1, keepdim=True, grad=True),
  Case(torch.var_mean, X.to(bf16)),
  Case(torch.std_mean, X, (0, 1), grad=True),
  Case(torch.var, SCALAR),
)

NORM_CASES = (
  *(
    Case(torch.linalg.vector_norm, X, order, dim, grad=True)
    for order in (0, 1, 2, 3, 0.5, -1, math.inf, -math.inf)
    for dim in (None, 1)
  ),
  Case(torch.linalg.vector_norm, X.to(bf16), dim=(0, 2), keepdim=True),
  Case(torch.linalg.vector_norm, COMPLEX, 3, 1),
  Case(torch.linalg.vector_norm, ROWS.to(bf16), dtype=torch.float32),
  Case(torch.norm, X, grad=True),
  Case(torch.norm, X, 1, 2, grad=True),
  Case(torch.norm, X, "fro", (0, 1)),
  Case(torch.dist, X, X.flip(0), grad=True),
  Case(torch.dist, X, X[0], 1),
)

SCAN_CASES = (
  *(
    Case(function, X, dim, grad=True)
    for function in (torch.cumsum, torch.cumprod, torch.logcumsumexp)
    for dim in (0, -1)
  ),
  *(
    Case(function, values, 1, grad=values is X)
    for function in (torch.cummax, torch.cummin)
    for values in (X, INTS, GAPS)
  ),
  *(
    Case(function, SCALAR, 0, grad=True)
    for function in (torch.cumsum, torch.cumprod, torch.cummax, torch.logcumsumexp)
  ),
  Case(torch.cumsum, INTS, 0),
  Case(torch.cumsum, BOOLS, 1),
  Case(torch.cumsum, X.to(bf16), 1),
  Case(torch.cumprod, INTS, 1, dtype=torch.float32),
)

ORDER_CASES = (
  *(
    Case(function, values, *dims, grad=values is X)
    for function in (torch.median, torch.nanmedian)
    for values in (X, GAPS)
    for dims in ((), (1,), (0, True))
    # The index of one of several NaNs is unspecified.
    if values is X or dims != (0, True)
  ),
  Case(torch.median, torch.arange(12).flip(0).reshape(3, 4), 1),
  Case(torch.median, SCALAR, 0),
  Case(torch.kthvalue, X, 2, grad=True),
  Case(torch.kthvalue, X, 3, 1, True),
  Case(torch.kthvalue, SCALAR, 1),
  Case(torch.mode, torch.tensor([1, 3, 3, 2, 1, 0])),
  Case(torch.mode, torch.tensor([[1.0, 3.0, 3.0], [4.0, 2.0, 2.0]]), 1, grad=True),
  Case(torch.mode, torch.tensor([[1, 3, 3], [1, 2, 2]]), 0, True),
)

COUNT_CASES = ()

CASES = (
  MANY_CASES
  + SUM_CASES
  + TRUTH_CASES
  + EXTREMUM_CASES
  + MOMENT_CASES
  + NORM_CASES
  + SCAN_CASES
  + ORDER_CASES
  + COUNT_CASES
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_equal_torch_on_the_cpu(case):
  check(case)


ERRORS = (
  (IndexError, torch.sum, (X, 4)),
  (RuntimeError, torch.sum, (X, (0, 0))),
  (RuntimeError, torch.mean, (INTS,)),
  (RuntimeError, torch.var, (INTS,)),
  (RuntimeError, torch.linalg.vector_norm, (INTS,)),
  (RuntimeError, torch.max, (torch.zeros(0),)),
  (IndexError, torch.amax, (torch.zeros(0, 3), 0)),
  (IndexError, torch.argmax, (torch.zeros(0),)),
  (RuntimeError, torch.kthvalue, (X, 9)),
  (RuntimeError, torch.trace, (X,)),
  (RuntimeError, torch.allclose, (ROWS, INTS)),
)


@pytest.mark.parametrize("row", ERRORS, ids=lambda row: row[1].__name__)
def test_errors_equal_torch(row):
  error, function, args = row
  with pytest.raises(error):
    function(*args)
  with torchax.default_env(), pytest.raises(error):
    function(*(arg.to("jax") if torch.is_tensor(arg) else arg for arg in args))


@pytest.mark.parametrize("function", [torch.sum, torch.mean])
def test_complex_sums_are_exact_to_a_few_bits(function):
  values = torch.complex(*floats(2, 700, 800, low=0.1, high=1.1))
  wide = function(values.to(torch.complex128))
  with torchax.default_env():
    actual = function(values.to("jax"))
  tolerance = 2 * torch.finfo(values.dtype).eps
  torch.testing.assert_close(actual.cpu().to(wide.dtype), wide, rtol=tolerance, atol=0)


@pytest.mark.parametrize("function", [torch.sum, torch.nansum, torch.mean])
def test_half_precision_accumulates_in_float32(function):
  """A running sum in bfloat16 stays at 256: adding 1 to it rounds back."""
  values = torch.tensor([256.0] + [1.0] * 14 + [-256.0], dtype=torch.bfloat16)
  with torchax.default_env():
    actual = function(values.to("jax"), dim=0)
  assert actual.dtype == torch.bfloat16
  assert actual.item() == function(values.double(), dim=0).item()


def test_products_of_half_precision_are_rounded_once():
  values = floats(6, low=1.0, high=2.0).bfloat16()
  with torchax.default_env():
    actual = torch.prod(values.to("jax"))
  assert actual.item() == torch.prod(values.double()).bfloat16().item()


@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_too_few_numbers_for_a_variance_warn(name, device):
  function = getattr(torch, name)
  with torchax.default_env():
    ones = torch.ones(11, 1, device=device)  # a shape of this test alone
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      function(ones, dim=[])
    for numbers, correction in ((ones, 1), (ones[:, 0], 11.5)):
      with pytest.warns(UserWarning, match="degrees of freedom is <= 0"):
        function(numbers, dim=-1, correction=correction)


def test_a_mean_that_is_nan_has_a_gradient_by_jax():
  """Torch's formula does not look at the mean."""
  with torchax.default_env():
    gradient = jax.grad(interop.jax_view(torch.mean))(
      jnp.array([1, math.inf, -math.inf])
    )
  assert gradient.tolist() == [torch.tensor(1 / 3).item()] * 3
