"""Losses and their gradients.

`reduction` is ATen's number: 0 none, 1 mean, 2 sum. Negative log likelihoods have the
classes in dimension 1 (0 without a batch), so one pair of functions implements
`nll_loss` and `nll_loss2d`. CTC is in `ctc.py`.
"""

import enum

import jax
import jax.numpy as jnp

from torchax.core import out_of_range
from torchax.ops.builtin import op
from torchax.ops.jaten import _numbers
from torchax.ops.jaten._arguments import require_inexact, require_one_dtype
from torchax.ops.promotion import in_opmath, widen
from torchax.registry.index_rules import Range
from torchax.registry.names import aten

# Lower bounds of the logarithms in binary cross entropy, which keeps the loss finite,
# and of the divisor in its gradient: aten/src/ATen/native/Loss.cpp.
LOG_FLOOR = -100.0
VARIANCE_FLOOR = 1e-12


class Reduction(enum.IntEnum):
  """Reduction of a loss, with ATen's numbers."""

  NONE = 0
  MEAN = 1
  SUM = 2


def _reduce(losses, reduction):
  if reduction == Reduction.MEAN:
    return jnp.mean(losses)
  return jnp.sum(losses) if reduction == Reduction.SUM else losses


def _spread(grad_output, reduction, *arrays):
  """Return the gradient of each loss; there is one per element of `arrays`."""
  if reduction != Reduction.MEAN:
    return grad_output
  return grad_output / max(1, jnp.broadcast_arrays(*arrays)[0].size)


# ---- negative log likelihood


def _class_axis(self) -> int:
  return 0 if self.ndim == 1 else 1


def _class_weights(self, weight):
  """Return the weights of the classes, shaped to broadcast to `self`."""
  if weight is None:
    return jnp.ones((), widen(self).dtype)
  require_one_dtype("nll_loss", self, weight)
  return widen(weight).reshape((-1,) + (1,) * (self.ndim - 1 - _class_axis(self)))


def _target_classes(self, target):
  """Reshape `target` to the shape of `self` with a class dimension of size 1."""
  axis = _class_axis(self)
  shape = (*self.shape[:axis], 1, *self.shape[axis + 1 :])
  return target.reshape(shape)


def _is_counted(classes, ignore_index):
  """Return a mask of classes not ignored; their dtype may not hold `ignore_index`."""
  wide = jnp.promote_types(classes.dtype, jnp.int32)
  return classes.astype(wide) != ignore_index


def _class_rules(self, target, weight, reduction, ignore_index):
  classes = self.shape[_class_axis(self)] if self.ndim else 0
  yield Range(
    target, 0, classes, IndexError, "Target {number} is out of bounds.", ignore_index
  )


@op(
  aten.nll_loss_forward.default,
  aten.nll_loss2d_forward.default,
  rules=_class_rules,
  static=("ignore_index",),
  prepare=_numbers.as_they_are,
)
def _aten_nll_loss_forward(self, target, weight, reduction, ignore_index):
  axis = _class_axis(self)
  classes = _target_classes(self, target)
  counts = _is_counted(classes, ignore_index)
  safe = out_of_range.clip(jnp.where(counts, classes, 0), self.shape[axis])
  picked = jnp.take_along_axis(widen(self), safe, axis=axis, mode="clip")
  weights = jnp.broadcast_to(_class_weights(self, weight), self.shape)
  weights = jnp.take_along_axis(weights, safe, axis=axis, mode="clip")
  # A NaN weight for a class out of range makes the gradient NaN too.
  weights = out_of_range.fill_invalid(
    weights, out_of_range.is_out_of_range(classes, self.shape[axis])
  )
  weights = jnp.where(counts, weights, 0)
  losses = jnp.where(counts, -picked * weights, 0)
  if reduction == Reduction.NONE:
    return losses.squeeze(axis).astype(self.dtype), jnp.zeros((), self.dtype)
  total_weight = jnp.sum(weights)
  loss = jnp.sum(losses)
  if reduction == Reduction.MEAN:
    loss = loss / total_weight
  return loss.astype(self.dtype), total_weight.astype(self.dtype)


@op(
  aten.nll_loss_backward,
  aten.nll_loss2d_backward,
  static=("ignore_index",),
  prepare=_numbers.as_they_are,
)
def _aten_nll_loss_backward(
  grad_output, self, target, weight, reduction, ignore_index, total_weight
):
  axis = _class_axis(self)
  classes = _target_classes(self, target)
  grad = widen(grad_output)
  if reduction == Reduction.MEAN:
    grad = grad / widen(total_weight)
  elif reduction == Reduction.NONE:
    grad = grad.reshape(classes.shape)
  # XLA fuses the comparison with all classes into one pass, but not a scatter.
  shape = [1] * self.ndim
  shape[axis] = self.shape[axis]
  is_target = jnp.arange(self.shape[axis]).reshape(shape) == classes
  counts = _is_counted(classes, ignore_index)
  gradient = jnp.where(is_target & counts, -_class_weights(self, weight) * grad, 0)
  broken = out_of_range.is_out_of_range(classes, self.shape[axis]) & counts
  gradient = out_of_range.fill_invalid(gradient, broken)
  return gradient.astype(self.dtype)


# ---- distances


@op(aten.mse_loss)
@in_opmath
def _aten_mse_loss(self, target, reduction=1):
  return _reduce(jnp.square(self - target), reduction)


@op(aten.mse_loss_backward)
@in_opmath
def _aten_mse_loss_backward(grad_output, self, target, reduction):
  return 2 * (self - target) * _spread(grad_output, reduction, self, target)


@op(aten.l1_loss)
@in_opmath
def _aten_l1_loss(self, target, reduction=1):
  return _reduce(jnp.abs(self - target), reduction)


def _is_zero(number) -> bool:
  """Return True for the static number 0; a traced operand is never 0."""
  return isinstance(number, int | float) and number == 0


def _smooth_l1(difference, beta):
  distance = jnp.abs(difference)
  if _is_zero(beta):
    return distance
  near = 0.5 * distance * distance / beta
  return jnp.where(distance < beta, near, distance - 0.5 * beta)


def _check_smooth_l1_loss(self, target, reduction=1, beta=1.0):
  if beta < 0:
    raise RuntimeError(f"smooth_l1_loss does not support negative beta, got {beta}.")


# At 0 the loss is the absolute difference.
_prepare_beta = _numbers.static_if("beta", is_static=lambda beta: beta == 0)


@op(
  aten.smooth_l1_loss,
  check=_check_smooth_l1_loss,
  static=("beta",),
  prepare=_prepare_beta,
)
@in_opmath
def _aten_smooth_l1_loss(self, target, reduction=1, beta=1.0):
  return _reduce(_smooth_l1(self - target, beta), reduction)


@op(aten.smooth_l1_loss_backward, static=("beta",), prepare=_prepare_beta)
@in_opmath
def _aten_smooth_l1_loss_backward(grad_output, self, target, reduction, beta):
  difference = self - target
  slope = jnp.sign(difference)
  if not _is_zero(beta):
    slope = jnp.where(jnp.abs(difference) < beta, difference * (1 / beta), slope)
  return slope * _spread(grad_output, reduction, self, target)


def _check_huber_loss(self, target, reduction=1, delta=1.0):
  if delta <= 0:
    raise RuntimeError(
      f"huber_loss does not support non-positive values for delta, got {delta}."
    )


@op(aten.huber_loss, check=_check_huber_loss)
@in_opmath
def _aten_huber_loss(self, target, reduction=1, delta=1.0):
  require_inexact("huber_loss", self)
  return _reduce(delta * _smooth_l1(self - target, delta), reduction)


@op(aten.huber_loss_backward)
@in_opmath
def _aten_huber_loss_backward(grad_output, self, target, reduction, delta):
  slope = jnp.clip(self - target, -delta, delta)
  return slope * _spread(grad_output, reduction, self, target)


@op(aten.soft_margin_loss)
@in_opmath
def _aten_soft_margin_loss(self, target, reduction=1):
  require_inexact("soft_margin_loss", self)
  if jnp.broadcast_shapes(self.shape, target.shape) != self.shape:
    raise RuntimeError(
      "soft_margin_loss expects a target that broadcasts to the shape of the input, "
      f"{list(self.shape)}, but got {list(target.shape)}."
    )
  return _reduce(jax.nn.softplus(-target * self), reduction)


@op(aten.soft_margin_loss_backward)
@in_opmath
def _aten_soft_margin_loss_backward(grad_output, self, target, reduction):
  slope = -target * jax.nn.sigmoid(-target * self)
  return slope * _spread(grad_output, reduction, self, target)


# ---- entropies


def _cross_entropy_slope(self, target):
  return (self - target) / jnp.maximum((1 - self) * self, VARIANCE_FLOOR)


@jax.custom_jvp
def _cross_entropy(self, target):
  log_yes = jnp.maximum(jnp.log(self), LOG_FLOOR)
  log_no = jnp.maximum(jnp.log1p(-self), LOG_FLOOR)
  return (target - 1) * log_no - target * log_yes


@_cross_entropy.defjvp
def _cross_entropy_jvp(primals, tangents):
  """Use torch's slope, which is finite at probabilities 0 and 1."""
  self, target = primals
  self_tangent, target_tangent = tangents
  log_odds = jnp.maximum(jnp.log1p(-self), LOG_FLOOR)
  log_odds -= jnp.maximum(jnp.log(self), LOG_FLOOR)
  slope = _cross_entropy_slope(self, target)
  return _cross_entropy(self, target), slope * self_tangent + log_odds * target_tangent


def _apply_weight(losses, weight):
  return losses if weight is None else losses * weight


@op(aten.binary_cross_entropy)
@in_opmath
def _aten_binary_cross_entropy(self, target, weight=None, reduction=1):
  """Compute the loss; it is NaN for a probability outside [0, 1].

  torch raises there, but compiled code cannot raise on data.
  """
  require_one_dtype("binary_cross_entropy", self, target)
  return _reduce(_apply_weight(_cross_entropy(self, target), weight), reduction)


@op(aten.binary_cross_entropy_backward)
@in_opmath
def _aten_binary_cross_entropy_backward(
  grad_output, self, target, weight=None, reduction=1
):
  slope = _apply_weight(_cross_entropy_slope(self, target), weight)
  return slope * _spread(grad_output, reduction, self)


@jax.custom_jvp
def _surprise(logit):
  """Compute -log(sigmoid(logit)) without overflow, faster than by `logaddexp`."""
  return jnp.maximum(-logit, 0) + jnp.log1p(jnp.exp(-jnp.abs(logit)))


@_surprise.defjvp
def _surprise_jvp(primals, tangents):
  """Differentiate as torch, also at 0, where the maximum has no derivative."""
  (logit,), (tangent,) = primals, tangents
  return _surprise(logit), -jax.nn.sigmoid(-logit) * tangent


@op(aten.binary_cross_entropy_with_logits)
@in_opmath
def _aten_binary_cross_entropy_with_logits(
  self, target, weight=None, pos_weight=None, reduction=1
):
  positive = 1 if pos_weight is None else 1 + (pos_weight - 1) * target
  losses = (1 - target) * self + positive * _surprise(self)
  return _reduce(_apply_weight(losses, weight), reduction)


@op(aten.kl_div)
@in_opmath
def _aten_kl_div(self, target, reduction=1, *, log_target=False):
  """Compute the divergence; `self` has log probabilities, `target` if `log_target`."""
  if log_target:
    return _reduce(jnp.exp(target) * (target - self), reduction)
  return _reduce(jax.scipy.special.xlogy(target, target) - target * self, reduction)


# ---- margins between classes


def _hinge(values):
  return jnp.where(values > 0, values, 0)


def _multi_margin(self, target, p, margin, weight, reduction):
  """Average hinge(margin - own + other) ** p over the other classes."""
  if p not in (1, 2):
    raise RuntimeError(f"only p == 1 and p == 2 supported, but got p={p}.")
  rows, classes = jnp.atleast_2d(self), target.reshape(-1, 1)
  broken = out_of_range.is_out_of_range(classes, rows.shape[1])
  classes = out_of_range.clip(classes, rows.shape[1])
  own = jnp.take_along_axis(rows, classes, axis=1, mode="clip")
  losses = _hinge(margin - own + rows)
  losses = losses if p == 1 else losses * losses
  # The product with NaN makes the gradient NaN too.
  losses = losses * out_of_range.fill_invalid(jnp.ones_like(own), broken)
  if weight is not None:
    losses = losses * weight[classes]
  others = jnp.arange(rows.shape[1]) != classes
  losses = jnp.where(others, losses, 0).sum(axis=1) / max(rows.shape[1], 1)
  return _reduce(losses.reshape(target.shape), reduction)


def _margin_rules(self, target, *rest, **named):
  classes = self.shape[-1] if self.ndim else 1
  yield Range(target, 0, classes, RuntimeError, "target out of range")


@op(aten.multi_margin_loss, static=("p",), rules=_margin_rules)
@in_opmath
def _aten_multi_margin_loss(self, target, p=1, margin=1, weight=None, reduction=1):
  return _multi_margin(self, target, p, margin, weight, reduction)


@op(aten.multi_margin_loss_backward, static=("p",))
@in_opmath
def _aten_multi_margin_loss_backward(
  grad_output, self, target, p, margin, weight=None, reduction=1
):
  _, pull_back = jax.vjp(
    lambda array: _multi_margin(array, target, p, margin, weight, reduction), self
  )
  return pull_back(grad_output)[0]


def _multilabel_margin(self, target, reduction):
  """Return the loss, and 1 for each label's class; labels end at the first -1."""
  rows, labels = jnp.atleast_2d(self), jnp.atleast_2d(target)
  count = rows.shape[1]
  valid = jnp.cumprod(labels >= 0, axis=1).astype(bool)
  is_label = (labels[:, :, None] == jnp.arange(count)) & valid[:, :, None]
  is_target = is_label.any(axis=1)
  own = jnp.take_along_axis(rows, jnp.where(valid, labels, 0), axis=1, mode="clip")
  hinges = _hinge(1 - own[:, :, None] + rows[:, None, :])
  counts = valid[:, :, None] & ~is_target[:, None, :]
  losses = jnp.where(counts, hinges, 0).sum(axis=(1, 2)) / max(count, 1)
  broken = ((labels < -1) | (labels >= count)).any(axis=1)
  losses = losses * out_of_range.fill_invalid(jnp.ones_like(losses), broken)
  loss = _reduce(losses.reshape(self.shape[:-1]), reduction)
  return loss, is_target.reshape(target.shape).astype(self.dtype)


def _multilabel_rules(self, target, reduction):
  classes = self.shape[-1] if self.ndim else 1
  message = "argument #2 'target' is out of range"
  yield Range(target, -1, classes, RuntimeError, message)


@op(aten.multilabel_margin_loss_forward.default, rules=_multilabel_rules)
@in_opmath
def _aten_multilabel_margin_loss_forward(self, target, reduction):
  return _multilabel_margin(self, target, reduction)


@op(aten.multilabel_margin_loss_backward)
@in_opmath
def _aten_multilabel_margin_loss_backward(
  grad_output, self, target, reduction, is_target
):
  _, pull_back = jax.vjp(
    lambda array: _multilabel_margin(array, target, reduction)[0], self
  )
  return pull_back(grad_output)[0]
