"""Functions of complex numbers: near zeros, on both sides of a cut, at infinity.

Also `sinh` and `cosh` of real numbers, which XLA computes inaccurately.
"""

import jax
import pytest
import torch
from torch.testing import assert_close

from torchax import interop

EPS = torch.finfo(torch.float32).eps
ROOTS = [torch.sqrt, torch.rsqrt, torch.acos, torch.asin, torch.asinh, torch.atan]
ROOTS += [torch.atanh, lambda z: z**0.5, lambda z: z**-0.5]
# Both signs of zero beside numbers on the cuts of the functions.
AXIS = torch.tensor([-3.0, -0.5, 0.5, 3.0]).repeat_interleave(2)
ZEROS = torch.tensor([0.0, -0.0]).repeat(4)


@pytest.mark.parametrize("function", [torch.sinh, torch.cosh, torch.asinh, torch.atan])
def test_numbers_near_a_zero_are_accurate(function):
  radius = torch.logspace(-8, 1, 500, dtype=torch.float64)
  angle = torch.linspace(0, 40, 500, dtype=torch.float64)
  around_zero = torch.polar(radius, angle)
  z = torch.cat([around_zero, around_zero + torch.pi / 2 * 1j]).to(torch.complex64)
  expected = function(z.to(torch.complex128))
  error = (function(z.to("jax")).cpu() - expected).abs()
  assert (error <= 4 * EPS * expected.abs()).all()


@pytest.mark.parametrize("function", ROOTS)
@pytest.mark.parametrize("parts", [(AXIS, ZEROS), (ZEROS, AXIS)], ids=["real", "imag"])
def test_the_sign_of_zero_chooses_the_side_of_a_cut(function, parts):
  def value_and_gradient(z):
    value = function(z.requires_grad_())
    return value.detach(), *torch.autograd.grad(value.abs().sum(), z)

  z = torch.complex(*parts)
  expected = value_and_gradient(z.clone())
  for run in (value_and_gradient, interop.jax_jit(value_and_gradient)):
    assert_close([result.cpu() for result in run(z.to("jax"))], list(expected))


def test_powers_are_as_exact_as_those_of_torch():
  generator = torch.Generator().manual_seed(0)
  parts = torch.randn(2, 10_000, 2, generator=generator) * 9
  base, exponent = map(torch.view_as_complex, parts)
  exact = torch.pow(base.to(torch.complex128), exponent.to(torch.complex128))
  is_normal = (exact.abs() > 1e-30) & (exact.abs() < 1e37)

  def error(result):
    return ((result - exact).abs() / exact.abs())[is_normal]

  on_jax = base.to("jax"), exponent.to("jax")
  expected = error(torch.pow(base, exponent))
  for run in (torch.pow, interop.jax_jit(torch.pow)):
    found = error(run(*on_jax).cpu())
    assert found.mean() < 1.2 * expected.mean()
    assert found.max() < 2 * expected.max()


@pytest.mark.parametrize("exponent", [2.5, 3 + 1j])
def test_powers_of_zero_are_zero_with_gradient_zero(exponent):
  power = interop.jax_view(lambda z: (z**exponent).abs().square())
  zero = jax.numpy.asarray(0j)
  assert power(zero) == 0
  assert jax.grad(power)(zero) == 0


def logaddexp_of_all(z):
  return torch.logaddexp(z.reshape(-1, 1), z.reshape(-1))


@pytest.mark.parametrize(
  "function",
  [
    *(torch.abs, torch.exp, torch.exp2, torch.sqrt, torch.atan, torch.atanh),
    logaddexp_of_all,
  ],
)
def test_infinities_and_nan_are_those_of_c(function):
  parts = torch.tensor([0.0, -0.0, 1, -2.5, 1e3, torch.inf, -torch.inf, torch.nan])
  z = torch.complex(*torch.meshgrid(parts, parts, indexing="ij"))
  for run in (function, interop.jax_jit(function)):
    assert_close(run(z.to("jax")).cpu(), function(z), equal_nan=True)


@pytest.mark.parametrize("function", [torch.sinh, torch.cosh])
def test_hyperbolic_functions_of_real_numbers_are_accurate(function):
  x = torch.cat([torch.linspace(-89, 89, 5001), torch.logspace(-30, 1, 500)])
  x = torch.cat([x, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])])
  expected = function(x.double())
  for run in (function, interop.jax_jit(function)):
    found = run(x.to("jax")).cpu()
    assert_close(found.double(), expected, rtol=4 * EPS, atol=0, equal_nan=True)
    assert torch.equal(found.signbit(), expected.signbit())
  derivative = jax.vmap(jax.grad(interop.jax_view(function)))(x.to("jax").jax())
  other = torch.cosh if function is torch.sinh else torch.sinh
  assert_close(interop.torch_view(derivative), other(x.to("jax")), equal_nan=True)
