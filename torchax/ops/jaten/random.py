"""Random operations: `(key, arrays…) -> arrays`; dispatch draws the key.

The distributions are in `torchax/rng/samplers.py`. Checks run on torch's arguments
before anything is drawn and raise what torch raises.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax.ops import mappings
from torchax.ops.op_base import Kind, default_float, op
from torchax.rng import samplers

aten = torch.ops.aten


def _sampler(*ops, **options):
  return op(*ops, kind=Kind.SAMPLER, **options)


def _dtype(dtype) -> jnp.dtype:
  return default_float() if dtype is None else mappings.t2j_dtype(dtype)


def _dtype_like(self, dtype) -> jnp.dtype:
  return self.dtype if dtype is None else mappings.t2j_dtype(dtype)


def _floating(name: str, dtype) -> jnp.dtype:
  if not jnp.issubdtype(dtype, jnp.inexact):
    raise NotImplementedError(
      f"{name} draws floating-point numbers, but the dtype is {dtype}."
    )
  return dtype


def _require_size(size) -> None:
  if any(extent < 0 for extent in size):
    negative = min(size)
    raise RuntimeError(
      f"Trying to create tensor with negative dimension {negative}: {list(size)}"
    )


def _check_size(size, **_):
  _require_size(size)


# Uniform and normal ----------------------------------------------------------------


@_sampler(aten.rand, check=_check_size)
def _rand(key, size, *, names=None, dtype=None):
  return samplers.uniform(key, size, _floating("rand", _dtype(dtype)))


@_sampler(aten.rand_like)
def _aten_rand_like(key, self, *, dtype=None):
  dtype = _floating("rand_like", _dtype_like(self, dtype))
  return samplers.uniform(key, self.shape, dtype)


@_sampler(aten.randn, check=_check_size)
def _aten_randn(key, size, *, names=None, dtype=None):
  return samplers.normal(key, size, _floating("randn", _dtype(dtype)))


@_sampler(aten.randn_like)
def _aten_randn_like(key, self, *, dtype=None):
  dtype = _floating("randn_like", _dtype_like(self, dtype))
  return samplers.normal(key, self.shape, dtype)


def _check_uniform(self, from_=0.0, to=1.0, **_):
  if not from_ <= to:
    raise RuntimeError(
      "uniform_ expects to return a [from, to) range, but found "
      f"from={from_} > to={to}."
    )


@_sampler(aten.uniform, check=_check_uniform)
def _aten_uniform(key, self, from_=0.0, to=1.0):
  dtype = _floating("uniform_", self.dtype)
  return samplers.uniform(key, self.shape, dtype, from_, to)


def _check_std(std) -> None:
  if isinstance(std, int | float) and not std >= 0:
    raise RuntimeError(f"normal expects std >= 0.0, but found std {std}.")


def _check_normal(self, mean=0.0, std=1.0, **_):
  _check_std(std)


@_sampler(aten.normal_functional, check=_check_normal)
def _aten_normal_functional(key, self, mean=0.0, std=1.0):
  return samplers.normal(key, self.shape, _floating("normal_", self.dtype), mean, std)


def _check_normal_tensors(mean, std=1.0, **_):
  _check_std(std)
  torch.broadcast_shapes(getattr(mean, "shape", ()), getattr(std, "shape", ()))


def _check_normal_factory(mean, std, size, **_):
  _check_std(std)
  _require_size(size)


@_sampler(
  aten.normal.Tensor_float,
  aten.normal.float_Tensor,
  aten.normal.Tensor_Tensor,
  check=_check_normal_tensors,
)
def _aten_normal(key, mean, std=1.0):
  """The parameters get no gradient, as in torch."""
  mean, std = jax.lax.stop_gradient((mean, std))
  dtype = _floating("normal", jnp.result_type(mean, std))
  shape = np.broadcast_shapes(np.shape(mean), np.shape(std))
  return samplers.normal(key, shape, dtype, mean, std)


@_sampler(aten.normal.float_float, check=_check_normal_factory)
def _aten_normal_float_float(key, mean, std, size, *, dtype=None):
  return samplers.normal(key, size, _floating("normal", _dtype(dtype)), mean, std)


# Integers --------------------------------------------------------------------------


def _check_range(name: str, low: int, high: int, dtype) -> None:
  if not low < high:
    raise RuntimeError(
      f"{name} expects 'from' to be less than 'to', but got from={low} >= to={high}."
    )
  jax_dtype = mappings.t2j_dtype(dtype)
  if jnp.issubdtype(jax_dtype, jnp.integer):
    limits = np.iinfo(jax_dtype)
    if low < limits.min or high - 1 > limits.max:
      raise RuntimeError(
        f"{name}: [{low}, {high}) does not fit in {jax_dtype}. For 64-bit integers "
        'call `jax.config.update("jax_enable_x64", True)` first.'
      )


def _check_randint(low, high=None, size=None, *, dtype=None, **_):
  if size is None:  # (high, size)
    low, high, size = 0, low, high
  _check_range("randint", low, high, dtype or torch.int64)
  _require_size(size)


@_sampler(aten.randint, check=_check_randint)
def _aten_randint(key, *args, dtype=None):
  low, high, size = args if len(args) == 3 else (0, *args)
  return samplers.integers(
    key, size, mappings.t2j_dtype(dtype or torch.int64), low, high
  )


def _check_randint_like(self, low, high=None, *, dtype=None, **_):
  low, high = (0, low) if high is None else (low, high)
  if not isinstance(high, torch.Tensor):
    _check_range("randint_like", low, high, dtype or self.dtype)


@_sampler(aten.randint_like, check=_check_randint_like)
def _aten_randint_like(key, self, low, high=None, *, dtype=None):
  low, high = (0, low) if high is None else (low, high)
  return samplers.integers(key, self.shape, _dtype_like(self, dtype), low, high)


def _check_randperm(n, **_):
  if n < 0:
    raise RuntimeError(f"randperm expects n >= 0, but got n={n}.")


@_sampler(aten.randperm, check=_check_randperm)
def _aten_randperm(key, n, *, dtype=None):
  return samplers.permutation(key, n, mappings.t2j_dtype(dtype or torch.int64))


def _check_random(self, from_=None, to=None, **_):
  if from_ is not None:
    low, high = (0, from_) if to is None else (from_, to)
    _check_range("random_", low, high, self.dtype)


@_sampler(aten.random.default)
def _aten_random(key, self):
  return samplers.integers(key, self.shape, self.dtype, 0, _random_bound(self.dtype))


def _random_bound(dtype) -> int:
  """torch draws up to the largest integer, for floats those that are exact."""
  if dtype == jnp.bool_:
    return 2
  if jnp.issubdtype(dtype, jnp.integer):
    return int(jnp.iinfo(dtype).max) + 1
  return 2 ** (jnp.finfo(dtype).nmant + 1) + 1


@_sampler(aten.random.to, check=_check_random)
def _aten_random_to(key, self, to):
  return samplers.integers(key, self.shape, self.dtype, 0, to)


@_sampler(getattr(aten.random, "from"), check=_check_random)
def _aten_random_from(key, self, from_, to):
  to = _random_bound(self.dtype) if to is None else to
  return samplers.integers(key, self.shape, self.dtype, from_, to)


# Bernoulli and dropout -------------------------------------------------------------


def _check_p(self, p=0.5, **_):
  if isinstance(p, int | float) and not 0 <= p <= 1:
    raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}.")


@_sampler(aten.bernoulli.default)
def _aten_bernoulli(key, self):
  _floating("bernoulli", self.dtype)
  return samplers.bernoulli(key, self.shape, self).astype(self.dtype)


@_sampler(aten.bernoulli.p, aten.bernoulli.Tensor, check=_check_p)
def _aten_bernoulli_p(key, self, p=0.5):
  return samplers.bernoulli(key, self.shape, p).astype(self.dtype)


def _check_dropout(input, p, train, **_):
  if not 0 <= p <= 1:
    raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}.")


# p is static so that 1 - p is rounded once, in Python, as in torch's composite form.
@_sampler(aten.native_dropout, static=("p",), check=_check_dropout)
def _aten_native_dropout(key, input, p, train=True):
  mask = samplers.bernoulli(key, input.shape, 1.0 - p)
  scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
  return jnp.where(mask, input * jnp.asarray(scale, input.dtype), 0), mask


@op(aten.native_dropout_backward)
def _aten_native_dropout_backward(grad_output, mask, scale):
  return jnp.where(mask, grad_output * scale, 0).astype(grad_output.dtype)


# Other distributions ---------------------------------------------------------------


def _check_positive(name: str, parameter: str):
  def check(self, value=1.0, *args, **_):
    if not value > 0:
      raise RuntimeError(f"{name} expects {parameter} > 0.0, but found {value}.")

  return check


@_sampler(aten.exponential, check=_check_positive("exponential_", "lambda"))
def _aten_exponential(key, self, lambd=1.0):
  dtype = _floating("exponential_", self.dtype)
  return samplers.exponential(key, self.shape, dtype, rate=lambd)


def _check_cauchy(self, median=0.0, sigma=1.0, **_):
  if not sigma > 0:
    raise RuntimeError(f"cauchy_ expects sigma > 0.0, but found sigma={sigma}.")


@_sampler(aten.cauchy, check=_check_cauchy)
def _aten_cauchy(key, self, median=0.0, sigma=1.0):
  dtype = _floating("cauchy_", self.dtype)
  return samplers.cauchy(key, self.shape, dtype, median, sigma)


def _check_log_normal(self, mean=1.0, std=2.0, **_):
  if not std > 0:
    raise RuntimeError(f"log_normal_ expects std > 0.0, but found std={std}.")


@_sampler(aten.log_normal, check=_check_log_normal)
def _aten_log_normal(key, self, mean=1.0, std=2.0):
  dtype = _floating("log_normal_", self.dtype)
  return samplers.log_normal(key, self.shape, dtype, mean, std)


def _check_geometric(self, p, **_):
  if not 0 < p < 1:
    raise RuntimeError(f"geometric_ expects p to be in (0, 1), but got p={p}.")


@_sampler(aten.geometric, check=_check_geometric)
def geometric(key, self, p):
  return samplers.geometric(key, self.shape, self.dtype, p)


def _check_multinomial(self, num_samples, replacement=False, **_):
  if self.dim() not in (1, 2):
    raise RuntimeError(
      f"multinomial expects weights of 1 or 2 dimensions, but got {self.dim()}."
    )
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
  if not isinstance(weights, jax.core.Tracer):
    _check_weights(np.asarray(weights.astype(jnp.float32)))


def _check_weights(weights: np.ndarray) -> None:
  if not np.isfinite(weights).all() or (weights < 0).any():
    raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
  if (weights.sum(axis=-1) <= 0).any():
    raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")


@_sampler(aten.multinomial, check=_check_multinomial)
def _aten_multinomial(key, self, num_samples, replacement=False):
  drawn = samplers.multinomial(key, self, num_samples, replacement)
  return drawn.astype(mappings.t2j_dtype(torch.int64))
