"""Random operations: `(key, arrays…) -> arrays`; dispatch draws the key.

The samplers are in `torchax/rng/samplers.py` and `rejection.py`, the gradients in
`pathwise.py`. Checks see torch's arguments before anything is drawn and raise torch's
errors.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax.core import mappings
from torchax.ops.builtin import Kind, op
from torchax.ops.jaten import _numbers
from torchax.ops.jaten._arguments import require_size
from torchax.ops.jaten._random_checks import (
  known_values,
  require_float,
  require_interval,
  require_probabilities,
  require_range,
  require_real,
  require_std,
)
from torchax.ops.promotion import default_float, dtype_or, int64, result_dtype
from torchax.registry.names import aten
from torchax.rng import pathwise, rejection, samplers


def _sampler(*ops, **options):
  return op(*ops, kind=Kind.SAMPLER, **options)


def _check_size(size, **_):
  require_size(size)


# Uniform and normal ----------------------------------------------------------------


@_sampler(
  aten.rand,
  check=_check_size,
  distribution="uniform(0, 1)",
  is_exact=True,
  by_element=True,
)
def _rand(key, size, *, names=None, dtype=None):
  dtype = require_float("rand", dtype_or(dtype, default_float()), True)
  return samplers.uniform(key, size, dtype)


@_sampler(aten.rand_like, distribution="uniform(0, 1)", is_exact=True, by_element=True)
def _aten_rand_like(key, self, *, dtype=None):
  dtype = require_float("rand_like", dtype_or(dtype, self.dtype), True)
  return samplers.uniform(key, self.shape, dtype)


@_sampler(
  aten.randn,
  check=_check_size,
  distribution="normal(0, 1)",
  by_element=True,
)
def _aten_randn(key, size, *, names=None, dtype=None):
  dtype = require_float("randn", dtype_or(dtype, default_float()), True)
  return samplers.normal(key, size, dtype)


@_sampler(aten.randn_like, distribution="normal(0, 1)", by_element=True)
def _aten_randn_like(key, self, *, dtype=None):
  dtype = require_float("randn_like", dtype_or(dtype, self.dtype), True)
  return samplers.normal(key, self.shape, dtype)


@_sampler(
  aten.uniform,
  check=lambda self, from_=0.0, to=1.0, **_: require_interval(from_, to, self.dtype),
  by_element=True,
)
def _aten_uniform(key, self, from_=0.0, to=1.0):
  dtype = require_float("uniform_", self.dtype, True)
  return samplers.uniform(key, self.shape, dtype, from_, to)


@_sampler(
  aten.normal_functional,
  check=lambda self, mean=0.0, std=1.0, **_: require_std(std),
  distribution="normal",
  by_element=True,
)
def _aten_normal_functional(key, self, mean=0.0, std=1.0):
  return samplers.normal(
    key, self.shape, require_float("normal_", self.dtype, True), mean, std
  )


def _check_normal_tensors(mean, std=1.0, **_):
  require_std(std)
  torch.broadcast_shapes(getattr(mean, "shape", ()), getattr(std, "shape", ()))


def _check_normal_factory(mean, std, size, **_):
  require_std(std)
  require_size(size)


def _normal_of_tensors(key, mean, std, dtype):
  """Draw normal numbers; as in torch, the parameters get no gradient."""
  mean, std = jax.lax.stop_gradient((mean, std))
  shape = np.broadcast_shapes(np.shape(mean), np.shape(std))
  return samplers.normal(key, shape, dtype, mean, std)


@_sampler(
  aten.normal.Tensor_float, aten.normal.Tensor_Tensor, check=_check_normal_tensors
)
def _aten_normal(key, mean, std=1.0):
  """Draw normal numbers in the dtype of the mean, whatever the dtype of `std`."""
  return _normal_of_tensors(key, mean, std, require_float("normal", mean.dtype, True))


@_sampler(aten.normal.float_Tensor, check=_check_normal_tensors)
def _aten_normal_float_Tensor(key, mean, std):
  return _normal_of_tensors(key, mean, std, require_float("normal", std.dtype))


@_sampler(aten.normal.float_float, check=_check_normal_factory, by_element=True)
def _aten_normal_float_float(key, mean, std, size, *, dtype=None):
  dtype = require_float("normal", dtype_or(dtype, default_float()), True)
  return samplers.normal(key, size, dtype, mean, std)


# Integers --------------------------------------------------------------------------


def _check_randint(low, high=None, size=None, *, dtype=None, **_):
  if size is None:  # (high, size)
    low, high, size = 0, low, high
  require_range("randint", low, high, dtype or torch.int64)
  require_size(size)


def _integers(key, shape, dtype, low, high):
  """Draw from [low, high), or from a range that the host has prepared."""
  if isinstance(high, tuple):
    return samplers.integers_from(key, shape, dtype, *high)
  return samplers.integers(key, shape, dtype, low, high)


def _integer_sampler(*ops, low="low", high="high", **options):
  prepare = _numbers.integers(low, high)
  options.setdefault("distribution", "integers")
  return _sampler(*ops, prepare=prepare, is_exact=True, by_element=True, **options)


@_integer_sampler(
  aten.randint,
  check=_check_randint,
)
def _aten_randint(key, *args, dtype=None):
  low, high, size = args if len(args) == 3 else (0, *args)
  return _integers(key, size, mappings.t2j_dtype(dtype or torch.int64), low, high)


def _check_randint_like(self, low, high=None, *, dtype=None, **_):
  low, high = (0, low) if high is None else (low, high)
  dtype = dtype or self.dtype
  if isinstance(high, torch.Tensor):
    if high.numel() != 1 or high.dim():
      raise RuntimeError("randint_like: high must be a scalar tensor.")
    high = known_values(high, looks=not dtype.is_floating_point)
  if high is not None:
    require_range("randint_like", int(low), int(high), dtype)


@_integer_sampler(aten.randint_like, check=_check_randint_like)
def _aten_randint_like(key, self, low, high=None, *, dtype=None):
  low, high = (0, low) if high is None else (low, high)
  return _integers(key, self.shape, dtype_or(dtype, self.dtype), low, high)


def _check_randperm(n, *, dtype=None, **_):
  """Check n; as in torch, an integer dtype must hold n itself, not only n - 1."""
  if n < 0:
    raise RuntimeError(f"randperm expects n >= 0, but got n={n}.")
  dtype = mappings.t2j_dtype(dtype or torch.int64)
  require_real("randperm", dtype, bool_ok=False)
  is_integer = jnp.issubdtype(dtype, jnp.integer)
  most = jnp.iinfo(dtype).max + 1 if is_integer else _random_bound(dtype)
  if n > most:
    raise RuntimeError(f"randperm: n={n} is too large for {dtype}, at most {most}.")


@_sampler(aten.randperm, check=_check_randperm, distribution="permutation")
def _aten_randperm(key, n, *, dtype=None):
  return samplers.permutation(key, n, mappings.t2j_dtype(dtype or torch.int64))


def _random_bound(dtype) -> int:
  """Return torch's exclusive bound: a float dtype holds all integers below it."""
  if dtype == jnp.bool_:
    return 2
  if jnp.issubdtype(dtype, jnp.integer):
    return int(jnp.iinfo(dtype).max) + 1
  return 2 ** (jnp.finfo(dtype).nmant + 1) + 1


@_sampler(aten.random.default, distribution="integers", by_element=True)
def _aten_random(key, self):
  dtype = require_real("random_", self.dtype)
  return samplers.integers(key, self.shape, dtype, 0, _random_bound(dtype))


def _check_random_to(self, to, **_):
  require_range("random_", 0, to, self.dtype)


@_integer_sampler(aten.random.to, high="to", check=_check_random_to)
def _aten_random_to(key, self, to):
  return _integers(key, self.shape, self.dtype, 0, to)


def _check_random_from(self, from_, to=None, **_):
  if self.is_complex():
    raise RuntimeError(f"random_ draws real numbers, but the dtype is {self.dtype}.")
  to = _random_bound(mappings.t2j_dtype(self.dtype)) if to is None else to
  require_range("random_", from_, to, self.dtype)


@_integer_sampler(
  getattr(aten.random, "from"), low="from", high="to", check=_check_random_from
)
def _aten_random_from(key, self, from_, to):
  to = _random_bound(self.dtype) if to is None else to
  return _integers(key, self.shape, self.dtype, from_, to)


# Bernoulli and dropout -------------------------------------------------------------


@_sampler(aten.bernoulli.default, by_element=True)
def _aten_bernoulli(key, self):
  dtype = require_float("bernoulli", self.dtype)
  return _bernoulli(key, self.shape, self, dtype)


def _bernoulli(key, shape, p, dtype):
  """Draw with probability `p`; outside of [0, 1] give NaN, or `samplers.no_integer`."""
  if isinstance(p, float | tuple):  # already checked on the host
    return samplers.bernoulli(key, shape, p).astype(dtype)
  p = jax.lax.stop_gradient(p)
  drawn = samplers.bernoulli(key, shape, p).astype(dtype)
  if dtype == jnp.bool_:
    return drawn
  is_float = jnp.issubdtype(dtype, jnp.floating)
  nothing = jnp.nan if is_float else samplers.no_integer(dtype)
  return jnp.where((p >= 0) & (p <= 1), drawn, nothing).astype(dtype)


def _check_p(self, p=0.5, **_):
  if isinstance(p, torch.Tensor):
    torch.broadcast_shapes(p.shape, self.shape)
    if not p.is_floating_point():
      raise NotImplementedError(f"bernoulli_ takes no probabilities of {p.dtype}.")
  require_probabilities(p, looks=not self.is_floating_point())


# The host prepares a number, since float32 would round 1 - 1e-8 to 1.
@_sampler(aten.bernoulli.Tensor, check=_check_p, by_element=True)
@_sampler(
  aten.bernoulli.p,
  static=("p",),
  prepare=_numbers.probability("p", is_kept=True),
  check=_check_p,
  is_exact=True,
  by_element=True,
)
def _aten_bernoulli_p(key, self, p=0.5):
  dtype = require_real("bernoulli_", self.dtype)
  return _bernoulli(key, self.shape, p, dtype)


def _check_dropout(input, p, train, **_):
  if not 0 <= p <= 1:
    raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}.")


# Python rounds 1 - p once, as torch's composite kernel does.
prepare_dropout = _numbers.probability("p", scales=True)


@_sampler(
  aten.native_dropout,
  static=("p",),
  prepare=prepare_dropout,
  check=_check_dropout,
  distribution="dropout",
  is_exact=True,
  by_element=True,
)
def _aten_native_dropout(key, input, p, train=True):
  """Apply dropout; `train=None` means training, `train=False` keeps everything.

  `p` is a number, or the steps of the probability to keep and its reciprocal.
  """
  require_float("native_dropout", input.dtype, True, RuntimeError)
  if train is False:
    return input, jnp.ones(input.shape, bool)
  if isinstance(p, tuple):
    keep, scale = p
  else:
    keep = 1.0 - p
    scale = 0.0 if p == 1 else 1.0 / keep
  mask = samplers.bernoulli(key, input.shape, keep)
  return jnp.where(mask, input * jnp.asarray(scale, input.dtype), 0), mask


@op(aten.native_dropout_backward)
def _aten_native_dropout_backward(grad_output, mask, scale):
  scaled = jnp.where(mask, grad_output * scale, 0)
  return scaled.astype(result_dtype(grad_output, scale))


@_sampler(
  aten._fused_dropout,
  static=("p",),
  prepare=_numbers.probability("p", is_kept=True, scales=True),
  is_exact=True,
  by_element=True,
)
def _aten__fused_dropout(key, self, p):
  """Apply dropout; `p` is the probability to keep, and the mask is uint8."""
  dtype = require_float("_fused_dropout", self.dtype)
  keep, scale = p if isinstance(p, tuple) else (p, 1 / p)
  mask = samplers.bernoulli(key, self.shape, keep)
  return _scale_kept(self, mask, scale).astype(dtype), mask.astype(jnp.uint8)


@op(aten._masked_scale)
def _aten__masked_scale(self, mask, scale):
  return _scale_kept(self, mask != 0, scale).astype(self.dtype)


def _scale_kept(self, mask, scale):
  return jnp.where(mask, self * jnp.asarray(scale, self.dtype), 0)


# One distribution for all elements --------------------------------------------------


def _check_exponential(self, lambd=1.0, **_):
  if not lambd > 0:
    raise RuntimeError(f"exponential_ expects lambda > 0.0, but found {lambd}.")


@_sampler(aten.exponential, check=_check_exponential, by_element=True)
def _aten_exponential(key, self, lambd=1.0):
  dtype = require_float("exponential_", self.dtype, error=RuntimeError)
  return samplers.exponential(key, self.shape, dtype, rate=lambd)


def _check_cauchy(self, median=0.0, sigma=1.0, **_):
  if not sigma > 0:
    raise RuntimeError(f"cauchy_ expects sigma > 0.0, but found sigma={sigma}.")


@_sampler(aten.cauchy, check=_check_cauchy, by_element=True)
def _aten_cauchy(key, self, median=0.0, sigma=1.0):
  dtype = require_float("cauchy_", self.dtype, error=RuntimeError)
  return samplers.cauchy(key, self.shape, dtype, median, sigma)


def _check_log_normal(self, mean=1.0, std=2.0, **_):
  if not std > 0:
    raise RuntimeError(f"log_normal_ expects std > 0.0, but found std={std}.")


@_sampler(aten.log_normal, check=_check_log_normal, by_element=True)
def _aten_log_normal(key, self, mean=1.0, std=2.0):
  dtype = require_float("log_normal_", self.dtype)
  return samplers.log_normal(key, self.shape, dtype, mean, std)


def _check_geometric(self, p, **_):
  if not 0 < p < 1:
    raise RuntimeError(f"geometric_ expects p to be in (0, 1), but got p={p}.")


@_sampler(aten.geometric, check=_check_geometric, by_element=True)
def geometric(key, self, p):
  dtype = require_real("geometric_", self.dtype, bool_ok=False)
  return samplers.geometric(key, self.shape, dtype, p)


# A distribution for each element ----------------------------------------------------


@_sampler(aten.poisson)
def _aten_poisson(key, self):
  return rejection.poisson(key, self, require_float("poisson", self.dtype))


def _check_binomial(count, prob, **_):
  if not count.is_floating_point():
    raise ValueError(f"binomial expects floating-point counts, but got {count.dtype}.")
  if not prob.is_floating_point():
    raise ValueError(f"binomial expects floating-point prob, but got {prob.dtype}.")
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

# torch's limit: float32 cannot count further.
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
  """Return both flags in one array, so that the host waits for one transfer."""
  finite = (jnp.isfinite(weights) & (weights >= 0)).all()
  return jnp.stack([finite, (weights.max(-1, initial=0) > 0).all()])


def _check_weights(weights: jax.Array) -> None:
  # torch also checks the weights on every device.
  with jax.ensure_compile_time_eval():
    is_finite, has_sum = _are_finite_with_a_sum(weights).tolist()
  if not is_finite:
    raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
  if not has_sum:
    raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")


@_sampler(aten.multinomial, check=_check_multinomial, order_dependent=True)
def _aten_multinomial(key, self, num_samples, replacement=False):
  drawn = samplers.multinomial(key, self, num_samples, replacement)
  return drawn.astype(int64())
