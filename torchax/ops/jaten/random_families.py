"""Random operations of other distributions: `(key, arrays…) -> arrays`.

Uniform and normal numbers, integers and bits are in `random.py`. The samplers are in
`torchax/rng/samplers.py` and `rejection.py`, the gradients in `pathwise.py`.
"""

import jax
import jax.numpy as jnp
import torch

from torchax.core import mappings
from torchax.ops.builtin import Kind, op
from torchax.ops.jaten._random_checks import require_float, require_real
from torchax.registry.names import aten
from torchax.rng import pathwise, rejection, samplers


def _sampler(*ops, **options):
  return op(*ops, kind=Kind.SAMPLER, **options)


# One distribution for all elements --------------------------------------------------


def _check_positive(name: str, parameter: str):
  def check(self, value=1.0, *args, **_):
    if not value > 0:
      raise RuntimeError(f"{name} expects {parameter} > 0.0, but found {value}.")

  return check


@_sampler(aten.exponential, check=_check_positive("exponential_", "lambda"))
def _aten_exponential(key, self, lambd=1.0):
  dtype = require_float("exponential_", self.dtype, error=RuntimeError)
  return samplers.exponential(key, self.shape, dtype, rate=lambd)


def _check_cauchy(self, median=0.0, sigma=1.0, **_):
  if not sigma > 0:
    raise RuntimeError(f"cauchy_ expects sigma > 0.0, but found sigma={sigma}.")


@_sampler(aten.cauchy, check=_check_cauchy)
def _aten_cauchy(key, self, median=0.0, sigma=1.0):
  dtype = require_float("cauchy_", self.dtype, error=RuntimeError)
  return samplers.cauchy(key, self.shape, dtype, median, sigma)


def _check_log_normal(self, mean=1.0, std=2.0, **_):
  if not std > 0:
    raise RuntimeError(f"log_normal_ expects std > 0.0, but found std={std}.")


@_sampler(aten.log_normal, check=_check_log_normal)
def _aten_log_normal(key, self, mean=1.0, std=2.0):
  dtype = require_float("log_normal_", self.dtype)
  return samplers.log_normal(key, self.shape, dtype, mean, std)


def _check_geometric(self, p, **_):
  if not 0 < p < 1:
    raise RuntimeError(f"geometric_ expects p to be in (0, 1), but got p={p}.")


@_sampler(aten.geometric, check=_check_geometric)
def geometric(key, self, p):
  dtype = require_real("geometric_", self.dtype, bool_ok=False)
  return samplers.geometric(key, self.shape, dtype, p)


# A distribution for each element ----------------------------------------------------


@_sampler(aten.poisson)
def _aten_poisson(key, self):
  return rejection.poisson(key, self, require_float("poisson", self.dtype))


def _check_binomial(count, prob, **_):
  if not count.is_floating_point():
    raise ValueError(f"binomial takes floating-point counts, but got {count.dtype}.")
  if not prob.is_floating_point():
    raise ValueError(f"binomial takes floating-point prob, but got {prob.dtype}.")
  if count.dtype is not prob.dtype:
    raise RuntimeError(f"binomial: count is {count.dtype}, but prob {prob.dtype}.")
  torch.broadcast_shapes(count.shape, prob.shape)


@_sampler(aten.binomial, check=_check_binomial)
def _aten_binomial(key, count, prob):
  return rejection.binomial(key, count, prob, require_float("binomial", count.dtype))


@_sampler(aten._standard_gamma)
def _aten__standard_gamma(key, self):
  dtype = require_float("_standard_gamma", self.dtype)
  return rejection.standard_gamma(key, self, dtype)


@op(aten._standard_gamma_grad)
def _aten__standard_gamma_grad(self, output):
  require_float("_standard_gamma_grad", self.dtype)
  return pathwise.gamma_gradient(self, output)


@_sampler(aten._sample_dirichlet, order_dependent=True)
def _aten__sample_dirichlet(key, self):
  dtype = require_float("_sample_dirichlet", self.dtype)
  return rejection.dirichlet(key, self, dtype)


@op(aten._dirichlet_grad)
def _aten__dirichlet_grad(x, alpha, total):
  require_float("_dirichlet_grad", x.dtype)
  return pathwise.dirichlet_gradient(x, alpha, total)


# Categories -------------------------------------------------------------------------

# float32 counts no further; torch's own limit.
_MOST_CATEGORIES = 2**24


def _check_multinomial(self, num_samples, replacement=False, **_):
  if self.dim() not in (1, 2):
    raise RuntimeError(
      f"multinomial expects weights of 1 or 2 dimensions, but got {self.dim()}."
    )
  if self.shape[-1] > _MOST_CATEGORIES:
    raise RuntimeError("number of categories cannot exceed 2^24")
  if num_samples <= 0:
    raise RuntimeError("cannot sample n_sample <= 0 samples")
  if not replacement and num_samples > self.shape[-1]:
    raise RuntimeError(
      "cannot sample n_sample > prob_dist.size(-1) samples without replacement"
    )
  if not self.is_floating_point():
    raise RuntimeError(
      f"multinomial only supports floating-point dtypes for input, got: {self.dtype}"
    )
  weights = self.jax()
  if weights.shape[-1] == 0:
    raise RuntimeError("cannot sample from a distribution without categories")
  if not isinstance(weights, jax.core.Tracer):
    _check_weights(weights)


@jax.jit
def _are_finite_with_a_sum(weights):
  """Two flags, so that one small array comes back from the device."""
  finite = (jnp.isfinite(weights) & (weights >= 0)).all()
  return jnp.stack([finite, (weights.max(-1, initial=0) > 0).all()])


def _check_weights(weights: jax.Array) -> None:
  # torch looks at the weights on every device, too.
  with jax.ensure_compile_time_eval():
    is_finite, has_sum = _are_finite_with_a_sum(weights).tolist()
  if not is_finite:
    raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
  if not has_sum:
    raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")


@_sampler(aten.multinomial, check=_check_multinomial, order_dependent=True)
def _aten_multinomial(key, self, num_samples, replacement=False):
  drawn = samplers.multinomial(key, self, num_samples, replacement)
  return drawn.astype(mappings.t2j_dtype(torch.int64))
