"""The gamma and zeta families, error functions, and orthogonal polynomials.

Integers are computed in the default dtype, half precision in float32. Bessel functions
are in `bessel.py`; `erf`, `sinc`, `xlogy` and `logit` are in `pointwise.py`.
"""

import functools
import math

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.scipy import special

from torchax.ops.op_base import op, promote, to_float

aten = torch.ops.aten


def _in_floats(function):
  """Promotes the operands to one float dtype and computes in float32 at least."""

  @functools.wraps(function)
  def with_float_operands(*operands):
    arrays = [to_float(array) for array in promote(*operands)]
    dtype = arrays[0].dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    return function(*(array.astype(wide) for array in arrays)).astype(dtype)

  return with_float_operands


# --- Gamma and zeta -----------------------------------------------------------------


@op(aten.lgamma, aten.special_gammaln)
@_in_floats
def _aten_lgamma(self):
  return lax.lgamma(self)


@op(aten.digamma, aten.special_digamma, aten.special_psi)
@_in_floats
def _aten_digamma(self):
  """At a signed zero torch gives the infinity of the opposite sign."""
  pole = -jnp.copysign(jnp.asarray(math.inf, self.dtype), self)
  return jnp.where(self == 0, pole, lax.digamma(self))


@op(aten.polygamma, aten.special_polygamma)
def _aten_polygamma(n, self):
  """The n-th derivative of digamma, by the Hurwitz zeta function for n > 0."""
  if n < 0:
    raise RuntimeError(f"polygamma(n, x) does not support negative n, but got n={n}.")
  if n == 0:
    return _aten_digamma(self)

  def from_zeta(x):
    factorial = math.exp(math.lgamma(n + 1.0))
    sign = 1.0 if n % 2 else -1.0
    return sign * factorial * special.zeta(jnp.full_like(x, n + 1.0), x)

  return _in_floats(from_zeta)(self)


@op(aten.mvlgamma, aten.special_multigammaln)
def _aten_mvlgamma(self, p):
  """log Γ_p(x) = p (p - 1)/4 log π + Σ lgamma(x - i/2), i = 0 … p - 1."""
  if p < 1:
    raise RuntimeError(f"p has to be greater than or equal to 1, but got p={p}.")

  def sum_of_lgamma(x):
    terms = sum(lax.lgamma(x - i / 2) for i in range(p))
    return terms + p * (p - 1) / 4 * math.log(math.pi)

  return _in_floats(sum_of_lgamma)(self)


def _with_one_shape(function):
  return lambda *arrays: function(*jnp.broadcast_arrays(*arrays))


@op(aten.igamma, aten.special_gammainc)
def _aten_igamma(self, other):
  """The regularized lower incomplete gamma function P(self, other)."""
  return _in_floats(_with_one_shape(lax.igamma))(self, other)


@op(aten.igammac, aten.special_gammaincc)
def _aten_igammac(self, other):
  return _in_floats(_with_one_shape(lax.igammac))(self, other)


@op(aten.special_zeta)
def _aten_special_zeta(self, other):
  """Hurwitz zeta: Σ (k + other)^-self over k ≥ 0; infinite at other = 0, -1, -2 …"""

  def zeta(exponent, offset):
    pole = (exponent > 1) & (offset <= 0) & (offset == jnp.floor(offset))
    return jnp.where(pole, math.inf, lax.zeta(*jnp.broadcast_arrays(exponent, offset)))

  return _in_floats(zeta)(self, other)


# --- Error functions and entropies --------------------------------------------------


@op(aten.special_erfcx)
@_in_floats
def _aten_special_erfcx(self):
  """exp(x²) erfc(x), without the overflow of its factors."""
  return special.erfcx(self)


@op(aten.special_ndtr)
@_in_floats
def _aten_special_ndtr(self):
  return special.ndtr(self)


@op(aten.special_ndtri)
@_in_floats
def _aten_special_ndtri(self):
  return special.ndtri(self)


@op(aten.special_log_ndtr)
@_in_floats
def _aten_special_log_ndtr(self):
  return special.log_ndtr(self)


@op(aten.special_entr)
@_in_floats
def _aten_special_entr(self):
  """-x log(x): 0 at 0, -inf below, NaN for NaN."""
  positive = jnp.where(self > 0, self, 1)
  entropy = jnp.where(self < 0, -math.inf, -positive * jnp.log(positive))
  return jnp.where(jnp.isnan(self), self, entropy)


@op(aten.special_xlog1py)
@_in_floats
def _aten_special_xlog1py(self, other):
  """0 * log1p(y) is 0 for every y except NaN."""
  product = jnp.where(self == 0, 0.0, self * jnp.log1p(other))
  return jnp.where(jnp.isnan(other), other, product)


# --- Orthogonal polynomials ---------------------------------------------------------


def _polynomial(x, n, first, step):
  """The polynomial of degree n at x, each degree from the two before it.

  Args:
    x: where to evaluate, any shape that broadcasts with `n`.
    n: the degrees, cut to integers; below 0 the value is 0.
    first: `first(x)` is the polynomial of degree 1; that of degree 0 is 1.
    step: `step(k, x, current, previous)` takes degrees k and k - 1 to k + 1.
  """

  def evaluate(x, n):
    x, n = jnp.broadcast_arrays(x, n)
    degree = n.astype(jnp.int32)
    one, linear = jnp.ones_like(x), first(x)
    start = jnp.where(degree == 0, one, jnp.where(degree == 1, linear, 0))

    def advance(k, state):
      previous, current, result = state
      following = step(k.astype(x.dtype), x, current, previous)
      return current, following, jnp.where(degree == k + 1, following, result)

    highest = jnp.max(degree, initial=0)
    return lax.fori_loop(1, highest, advance, (one, linear, start))[2]

  return _in_floats(evaluate)(x, n)


def _chebyshev_step(k, x, current, previous):
  return 2 * x * current - previous


def _hermite_step(k, x, current, previous):
  return 2 * (x * current - k * previous)


def _hermite_e_step(k, x, current, previous):
  return x * current - k * previous


def _laguerre_step(k, x, current, previous):
  return ((2 * k + 1 - x) * current - k * previous) / (k + 1)


def _legendre_step(k, x, current, previous):
  return ((2 * k + 1) * x * current - k * previous) / (k + 1)


# Degree 1, and the recurrence: Abramowitz & Stegun, table 22.7.
POLYNOMIALS = {
  "chebyshev_polynomial_t": (lambda x: x, _chebyshev_step),
  "chebyshev_polynomial_u": (lambda x: 2 * x, _chebyshev_step),
  "chebyshev_polynomial_v": (lambda x: 2 * x - 1, _chebyshev_step),
  "chebyshev_polynomial_w": (lambda x: 2 * x + 1, _chebyshev_step),
  "hermite_polynomial_h": (lambda x: 2 * x, _hermite_step),
  "hermite_polynomial_he": (lambda x: x, _hermite_e_step),
  "laguerre_polynomial_l": (lambda x: 1 - x, _laguerre_step),
  "legendre_polynomial_p": (lambda x: x, _legendre_step),
}


def _register(name, change_variable=None):
  first, step = POLYNOMIALS[name.removeprefix("shifted_")]

  def lowering(x, n):
    return _polynomial(
      x if change_variable is None else change_variable(x), n, first, step
    )

  lowering.__name__ = lowering.__qualname__ = f"_aten_special_{name}"
  globals()[lowering.__name__] = op(getattr(aten, f"special_{name}"))(lowering)


def _to_unit_interval(x) -> jax.Array:
  """The shifted polynomials live on [0, 1]."""
  return 2 * x - 1


for _name in POLYNOMIALS:
  _register(_name)
  if _name.startswith("chebyshev"):
    _register(f"shifted_{_name}", _to_unit_interval)
