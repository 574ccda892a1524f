"""Lowerings of functions whose composite kernels read values, which a trace lacks.

Eagerly torch's own kernels run, with their checks. Inside a trace the same result is
computed without reading values.
"""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import torch

from torchax.compat import jax_compat, torch_compat
from torchax.functions.builtin import register_function
from torchax.ops.promotion import to_float
from torchax.registry.names import F, aten, functions, methods
from torchax.registry.operators import Kind


def _covariance(input, correction=1, fweights=None, aweights=None):
  return jnp.cov(to_float(input), ddof=correction, fweights=fweights, aweights=aweights)


def _correlation(input):
  return jnp.corrcoef(to_float(input))


@register_function(functions.cov, methods.cov, kind=Kind.TENSORS)
def _cov(input, *, correction=1, fweights=None, aweights=None):
  if jax_compat.is_top_level():
    return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
  return input._env.functions.call(_covariance, input, correction, fweights, aweights)


@register_function(functions.corrcoef, methods.corrcoef, kind=Kind.TENSORS)
def _corrcoef(input):
  if jax_compat.is_top_level():
    return torch.corrcoef(input)
  return input._env.functions.call(_correlation, input)


_REDUCTIONS = {"none": lambda x: x, "mean": torch.mean, "sum": torch.sum}


@register_function(F.gaussian_nll_loss, kind=Kind.TENSORS)
def _gaussian_nll_loss(input, target, var, full=False, eps=1e-6, reduction="mean"):
  if jax_compat.is_top_level():
    return F.gaussian_nll_loss(input, target, var, full, eps, reduction)
  if reduction not in _REDUCTIONS:
    raise ValueError(f"{reduction} is not valid: expected one of {list(_REDUCTIONS)}")
  if not isinstance(var, torch.Tensor):
    var = torch.full_like(input, var)
  if var.dim() == input.dim() - 1 and var.shape == input.shape[:-1]:
    var = var.unsqueeze(-1)  # one variance for each row
  # The floor of the variance has no gradient.
  floored = var + (var.detach().clamp(min=eps) - var.detach())
  loss = 0.5 * (torch.log(floored) + (input - target) ** 2 / floored)
  if full:
    loss = loss + 0.5 * math.log(2 * math.pi)
  return _REDUCTIONS[reduction](loss)


@register_function(functions.combinations, kind=Kind.TENSORS)
def _combinations(input, r=2, with_replacement=False):
  if jax_compat.is_top_level() or input.dim() != 1 or r < 1:
    return torch.combinations(input, r, with_replacement)
  choose = itertools.combinations
  if with_replacement:
    choose = itertools.combinations_with_replacement
  chosen = np.array([*choose(range(len(input)), r)], np.int32).reshape(-1, r)
  return input[torch.from_numpy(chosen).to(input.device)]


class _Overlapping(torch_compat.DispatchMode):
  """Mode for `istft`, which calls `equal` only to look for windows with a gap."""

  def __torch_dispatch__(self, func, types, args=(), kwargs=None):
    return func is not aten.equal.default and func(*args, **(kwargs or {}))


@register_function(functions.istft, methods.istft, kind=Kind.TENSORS)
def _istft(input, *args, **kwargs):
  if jax_compat.is_top_level():
    return torch.istft(input, *args, **kwargs)
  with _Overlapping():
    return torch.istft(input, *args, **kwargs)
