"""Connectionist temporal classification (Graves et al. 2006).

Label sequences are extended by a blank before, between and after the labels. One scan
over time computes the forward variables. Lengths are operands, so lengths in tensors
do not trigger recompilation.
"""

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax import lax

from torchax.core import mappings, out_of_range
from torchax.ops.builtin import Kind, op
from torchax.ops.jaten import _numbers
from torchax.ops.jaten.loss import Reduction
from torchax.ops.promotion import widen
from torchax.registry.index_rules import Condition
from torchax.registry.names import aten


def _padded_targets(targets, target_lengths):
  """Return targets as (N, S); split concatenated ones at their lengths."""
  if targets.ndim == 2:
    return targets
  starts = jnp.cumsum(target_lengths) - target_lengths
  positions = starts[:, None] + jnp.arange(targets.shape[0])
  return targets.at[positions].get(mode="fill", fill_value=0)


def _log_sum(*terms):
  """Compute log(sum(exp(terms))), with a zero gradient where all terms are -inf."""
  stacked = jnp.stack(terms)
  peak = jnp.max(stacked, axis=0)
  peak = lax.stop_gradient(jnp.where(peak == -jnp.inf, 0, peak))
  total = jnp.sum(jnp.exp(stacked - peak), axis=0)
  nothing = total == 0
  return jnp.where(nothing, -jnp.inf, jnp.log(jnp.where(nothing, 1, total)) + peak)


def _shift_right(alpha, by):
  """Shift `alpha` to the right by `by` positions; -inf fills the start."""
  return jnp.pad(alpha, ((0, 0), (by, 0)), constant_values=-jnp.inf)[:, :-by]


def _forward_variables(emissions, may_skip, input_lengths):
  """Return log alpha after each step, (T, N, 2 S + 1); constant past an input's end.

  Args:
    emissions: log probability of each extended label at each step, (T, N, 2 S + 1).
    may_skip: (N, 2 S + 1), True for labels whose preceding blank is optional.
    input_lengths: (N,) numbers of steps.
  """

  def step(alpha, inputs):
    time, emission = inputs
    skipped = jnp.where(may_skip, _shift_right(alpha, 2), -jnp.inf)
    reached = _log_sum(alpha, _shift_right(alpha, 1), skipped)
    alpha = jnp.where((time < input_lengths)[:, None], reached + emission, alpha)
    return alpha, alpha

  # A path starts with the first blank or the first label.
  positions = jnp.arange(emissions.shape[2])
  first = jnp.where(positions < 2, emissions[0], -jnp.inf)
  times = jnp.arange(1, emissions.shape[0])
  _, later = lax.scan(step, first, (times, emissions[1:]))
  return jnp.concatenate([first[None], later])


def _negative_log_likelihood(log_probs, targets, input_lengths, target_lengths, blank):
  """Return losses (N,) and log forward variables (N, T, 2 S + 1)."""
  targets = _padded_targets(targets, target_lengths)
  # (N, 2 S + 1): a blank at each even position, a label at each odd one.
  shape = (targets.shape[0], 2 * targets.shape[1] + 1)
  labels = jnp.full(shape, blank, targets.dtype).at[:, 1::2].set(targets)
  labels = jnp.clip(labels, 0, log_probs.shape[2] - 1)
  emissions = jnp.take_along_axis(log_probs, labels[None], axis=2)
  repeats = labels == jnp.pad(labels, ((0, 0), (2, 0)), constant_values=-1)[:, :-2]
  alphas = _forward_variables(emissions, (labels != blank) & ~repeats, input_lengths)
  last = 2 * target_lengths[:, None]
  ends = jnp.take_along_axis(alphas[-1], last, axis=1)
  before = jnp.take_along_axis(alphas[-1], jnp.maximum(last - 1, 0), axis=1)
  # Without labels a path can end only in the blank.
  before = jnp.where(last > 0, before, -jnp.inf)
  losses = -_log_sum(ends, before)[:, 0]
  return losses, jnp.moveaxis(alphas, 0, 1)


def _invalid_rows(log_probs, targets, input_lengths, target_lengths):
  """Return a mask (N,) of rows with a length, or a label in use, out of range."""
  steps, _, classes = log_probs.shape
  labels = _padded_targets(targets, target_lengths)
  is_used = jnp.arange(labels.shape[1]) < target_lengths[:, None]
  broken = jnp.any(out_of_range.is_out_of_range(labels, classes) & is_used, axis=1)
  broken |= out_of_range.is_out_of_range(input_lengths, steps + 1)
  broken |= out_of_range.is_out_of_range(target_lengths, labels.shape[1] + 1)
  if targets.ndim == 1:
    broken |= jnp.sum(target_lengths) > targets.shape[0]
  return broken


_WHILE = "(while checking arguments for ctc_loss_allocate_outputs)"


def _length_rules(log_probs, targets, input_lengths, target_lengths, *rest, **named):
  steps, most = log_probs.shape[0], targets.shape[-1]
  for name, lengths in (("input", input_lengths), ("target", target_lengths)):
    yield Condition(
      lengths,
      lambda numbers: numbers < 0,
      RuntimeError,
      f"Expected {name}_lengths to have value at least 0, but got value {{number}} "
      f"{_WHILE}",
    )
  yield Condition(
    input_lengths,
    lambda numbers: numbers > steps,
    RuntimeError,
    f"Expected input_lengths to have value at most {steps}, but got value {{number}} "
    f"{_WHILE}",
  )
  yield Condition(
    target_lengths,
    lambda numbers: numbers > most,
    RuntimeError,
    f"Expected tensor to have size at least {{number}} at dimension "
    f"{len(targets.shape) - 1}, but got size {most} for argument #2 'targets' {_WHILE}",
  )


def _add_batch(log_probs, targets, input_lengths, target_lengths):
  """Add a batch dimension if `log_probs` is (T, C); widen half precision."""
  lengths = (jnp.ravel(jnp.asarray(n)) for n in (input_lengths, target_lengths))
  targets = targets.astype(jnp.int32)  # torch accepts floats
  if log_probs.ndim == 2:
    log_probs, targets = log_probs[:, None], jnp.atleast_2d(targets)
  return widen(log_probs), targets, *lengths


_NUMBERS: dict = {
  "static": ("blank", "input_lengths", "target_lengths"),
  "prepare": _numbers.as_they_are,
}


def _check(log_probs, targets, input_lengths, target_lengths, blank=0, *rest):
  if not log_probs.is_floating_point():
    raise NotImplementedError(f"ctc_loss is not implemented for {log_probs.dtype}.")
  batch = log_probs.shape[1] if log_probs.dim() > 2 else 1
  for name, lengths in (("input", input_lengths), ("target", target_lengths)):
    if isinstance(lengths, torch.Tensor):
      dtype, count = lengths.dtype, lengths.numel()
      if dtype == torch.bool or dtype.is_floating_point:
        raise RuntimeError(f"{name}_lengths must be integral, but got {dtype}.")
    else:
      count = len(lengths)
    if count != batch:
      raise RuntimeError(
        f"{name}_lengths must be of size batch_size {batch}, but got {count}."
      )
  if not 0 <= blank < log_probs.shape[-1]:
    raise RuntimeError(
      f"blank must be in label range [0, {log_probs.shape[-1]}), but got {blank}."
    )


@op(
  aten._ctc_loss,
  check=_check,
  rules=_length_rules,
  **_NUMBERS,
)
def _aten__ctc_loss(
  log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False
):
  """Return losses and log alpha; the caller applies `zero_infinity` to the losses."""
  batch = _add_batch(log_probs, targets, input_lengths, target_lengths)
  losses, alphas = _negative_log_likelihood(*batch, blank)
  losses = out_of_range.fill_invalid(losses, _invalid_rows(*batch))
  if log_probs.ndim == 2:
    losses, alphas = losses[0], alphas[0]
  return losses.astype(log_probs.dtype), alphas.astype(log_probs.dtype)


@op(aten._ctc_loss_backward, **_NUMBERS)
def _aten__ctc_loss_backward(
  grad,
  log_probs,
  targets,
  input_lengths,
  target_lengths,
  neg_log_likelihood,
  log_alpha,
  blank,
  zero_infinity=False,
):
  """Compute the gradient, assuming as torch does that `log_probs` is a log-softmax.

  It is exp(log_probs) minus the posterior of the labels. The gradient of log-softmax
  maps it to itself.
  """
  wide, *lengths_and_targets = _add_batch(
    log_probs, targets, input_lengths, target_lengths
  )
  losses, pull_back = jax.vjp(
    lambda array: _negative_log_likelihood(array, *lengths_and_targets, blank)[0], wide
  )
  (minus_posterior,) = pull_back(jnp.ones_like(losses))
  gradient = (jnp.exp(wide) + minus_posterior) * widen(grad).reshape(1, -1, 1)
  broken = _invalid_rows(wide, *lengths_and_targets)[None, :, None]
  unlikely = jnp.isinf(losses)[None, :, None]
  gradient = jnp.where(unlikely, 0 if zero_infinity else jnp.nan, gradient)
  inside = jnp.arange(wide.shape[0])[:, None] < lengths_and_targets[1]
  gradient = jnp.where(inside[:, :, None], gradient, 0)
  gradient = out_of_range.fill_invalid(gradient, broken)
  return gradient.reshape(log_probs.shape).astype(log_probs.dtype)


def _lengths_tensor(lengths, env):
  """Convert lengths to a jax tensor, so that new lengths do not recompile."""
  if not isinstance(lengths, torch.Tensor):
    return env.j2t_iso(jnp.asarray(lengths, mappings.t2j_dtype(torch.int64)))
  if lengths.device.type == "cpu":
    return env.j2t_iso(mappings.t2j(lengths))
  return lengths


@op(torch.ctc_loss, F.ctc_loss, kind=Kind.TENSORS, needs_env=True, takes_cpu=True)
def ctc_loss(
  log_probs,
  targets,
  input_lengths,
  target_lengths,
  blank=0,
  reduction="mean",
  zero_infinity=False,
  *,
  env,
):
  """Compute the CTC loss; `reduction` is a name, or ATen's number for `torch.ctc_loss`.

  Replaces torch's composite operation, which moves lengths to the storage's device.
  """
  if isinstance(reduction, str):
    if reduction not in ("none", "mean", "sum"):
      raise ValueError(
        f"{reduction} is not a valid value for reduction: expected none, mean or sum."
      )
    reduction = Reduction[reduction.upper()]
  input_lengths = _lengths_tensor(input_lengths, env)
  target_lengths = _lengths_tensor(target_lengths, env)
  # Without the overload's name, torch parses one-element tensors as lists of integers.
  losses, _ = aten._ctc_loss.Tensor(
    log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
  )
  if zero_infinity:
    losses = losses.masked_fill(losses.isinf(), 0)
  if reduction == Reduction.MEAN:
    return (losses / target_lengths.clamp(min=1)).mean()
  return losses.sum() if reduction == Reduction.SUM else losses
