"""Steps of optimizers with `fused=True`: one program for all parameters.

Each takes lists with one row per parameter, and returns the lists that torch's schema
marks as written. Numbers that change from step to step are operands. Decay rates near
one are static: 1 - 0.999 would lose four digits in single precision.
"""

import math

import jax.numpy as jnp

from torchax.ops.builtin import op
from torchax.ops.list_checks import require_same_length
from torchax.ops.promotion import widen
from torchax.registry.names import aten


def _step(update, lists, grad_scale, found_inf) -> tuple[list, ...]:
  """Apply `update` to each row and keep the dtypes.

  Args:
    update: (parameter, gradient, *state) of one row, with half precision as float32 ->
      new parameter and state.
    lists: parameters, gradients, and each kind of state; [] for an absent one.
    grad_scale: scale of the loss; the gradients are divided by it.
    found_inf: 0-d array; 1 skips the step.

  Returns:
    The new lists, in order.
  """
  params, grads, *states = lists
  require_same_length([params, grads, *filter(len, states)])
  new_rows = []
  for old in zip(params, grads, *filter(len, states)):
    param, grad, *state = map(widen, old)
    if grad_scale is not None:
      grad = grad / grad_scale
    param, *state = update(param, grad, *state)
    new_rows.append(
      [_skip_if_inf(found_inf, *pair) for pair in zip(old, (param, grad, *state))]
    )
  new_lists = iter([list(new) for new in zip(*new_rows)])
  return tuple([next(new_lists) if len(old) else [] for old in lists])


def _skip_if_inf(found_inf, old, new):
  """Return `new` in the dtype of `old`; `old` if `found_inf` is 1."""
  new = new.astype(old.dtype)
  return new if found_inf is None else jnp.where(found_inf.reshape(()) == 1, old, new)


def _one_minus_power(decay: float, step):
  """Compute 1 - decay**step, accurately for a decay near one."""
  if decay == 0:
    return jnp.ones_like(step)
  return -jnp.expm1(step * math.log(decay))


def _define_adam(packet, decoupled: bool) -> None:
  """Register Adam (Kingma and Ba, 2015), or AdamW with `decoupled` weight decay."""

  def lowering(
    self,
    grads,
    exp_avgs,
    exp_avg_sqs,
    max_exp_avg_sqs,
    state_steps,
    *,
    lr,
    beta1,
    beta2,
    weight_decay,
    eps,
    amsgrad,
    maximize,
    grad_scale=None,
    found_inf=None,
  ):
    steps = iter(state_steps)
    require_same_length([self, state_steps])

    def update(param, grad, mean, square, *largest):
      step = next(steps)
      grad = -grad if maximize else grad
      if decoupled:
        param = param - lr * weight_decay * param
      else:
        grad = grad + weight_decay * param
      mean = mean + (1 - beta1) * (grad - mean)
      square = beta2 * square + (1 - beta2) * grad * grad
      largest = [jnp.maximum(largest[0], square)] if amsgrad else []
      scale = jnp.sqrt(_one_minus_power(beta2, step).astype(param.dtype))
      denominator = jnp.sqrt(largest[0] if amsgrad else square) / scale + eps
      size = lr / (1 - beta1**step).astype(param.dtype)
      return param - size * mean / denominator, mean, square, *largest

    largest = max_exp_avg_sqs if amsgrad else []
    lists = [self, grads, exp_avgs, exp_avg_sqs, largest]
    *new, largest = _step(update, lists, grad_scale, found_inf)
    return *new, largest or list(max_exp_avg_sqs)

  lowering.__name__ = f"_aten_{packet.__name__}"
  op(packet, static=("beta2",))(lowering)


_define_adam(aten._fused_adam, decoupled=False)
_define_adam(aten._fused_adamw, decoupled=True)


@op(aten._fused_sgd)
def _aten__fused_sgd(
  self,
  grads,
  momentum_buffer_list,
  *,
  weight_decay,
  momentum,
  lr,
  dampening,
  nesterov,
  maximize,
  is_first_step,
  grad_scale=None,
  found_inf=None,
):
  """Run gradient descent, with momentum if there are momentum buffers."""

  def update(param, grad, *buffers):
    grad = -grad if maximize else grad
    grad = grad + weight_decay * param
    if not buffers:
      return (param - lr * grad,)
    (buffer,) = buffers
    buffer = grad if is_first_step else momentum * buffer + (1 - dampening) * grad
    grad = grad + momentum * buffer if nesterov else buffer
    return param - lr * grad, buffer

  lists = [self, grads, momentum_buffer_list]
  return _step(update, lists, grad_scale, found_inf)


@op(aten._fused_adagrad)
def _aten__fused_adagrad(
  self,
  grads,
  state_sums,
  state_steps,
  *,
  lr,
  lr_decay,
  weight_decay,
  eps,
  maximize,
  grad_scale=None,
  found_inf=None,
):
  """Run Adagrad (Duchi et al., 2011); the caller counts the steps."""

  def update(param, grad, total, step):
    grad = -grad if maximize else grad
    grad = grad + weight_decay * param
    size = (lr / (1 + (step - 1) * lr_decay)).astype(param.dtype)
    total = total + grad * grad
    return param - size * grad / (jnp.sqrt(total) + eps), total, step

  lists = [self, grads, state_sums, state_steps]
  return _step(update, lists, grad_scale, found_inf)


@op(aten._fused_adagrad.tensor_lr)
def _aten__fused_adagrad_tensor_lr(*lists, **options):
  """Run Adagrad with a tensor as learning rate; torch's schema returns no steps."""
  return _aten__fused_adagrad(*lists, **options)[:3]
