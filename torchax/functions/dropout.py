"""Lowerings of the dropout functions of `torch.nn.functional`.

torch's composite kernels take several operations. Each function here makes one draw,
with the numbers of the composite kernel.
"""

import warnings
from collections.abc import Sequence

import torch

from torchax.compat import torch_compat
from torchax.core.static_values import StaticValue
from torchax.dispatch.batched_gradients import over_batches
from torchax.functions.builtin import register_function
from torchax.ops.builtin import op
from torchax.ops.jaten import _numbers
from torchax.ops.jaten.random import _aten_native_dropout as native_dropout
from torchax.ops.jaten.random import prepare_dropout
from torchax.registry.names import F, aten, functions
from torchax.registry.operators import Kind
from torchax.rng import samplers

# Keeps mean 0 and variance 1 of SELU's outputs: alpha · scale of its negative branch
# (Klambauer et al. 2017, https://arxiv.org/abs/1706.02515).
_ALPHA_PRIME = 1.7580993408473766


# Dropout as one operation, and its mask alone.
_library = torch.library.Library("torchax", "DEF")
_library.define("dropout(Tensor input, float p) -> Tensor")
_library.define("keep_mask(Tensor input, SymInt[] size, float p) -> Tensor")
_forward = torch.ops.torchax.dropout.default
_keep_mask = torch.ops.torchax.keep_mask.default


@op(
  _forward,
  kind=Kind.SAMPLER,
  static=("p",),
  prepare=prepare_dropout,
  is_exact=True,
  by_element=True,
)
def _dropout_forward(key, input, p):
  return native_dropout(key, input, p)[0]


_prepare_probability = _numbers.probability("p", is_kept=True)


def _prepare_mask(arguments: dict) -> None:
  arguments["size"] = StaticValue(tuple(arguments["size"]))
  _prepare_probability(arguments)


@op(
  _keep_mask,
  kind=Kind.SAMPLER,
  static=("p", "size"),
  prepare=_prepare_mask,
  distribution="bernoulli_",
  is_exact=True,
  by_element=True,
)
def _drawn_mask(key, input, size, p):
  return samplers.bernoulli(key, size, p)


def keep_mask(input: torch.Tensor, shape: Sequence[int], keep: float) -> torch.Tensor:
  """Draw a bool mask, True with probability `keep`, with the numbers of `bernoulli_`.

  Args:
    input: any tensor of the environment that draws.
    shape: shape of the mask.
    keep: the probability, a Python number.
  """
  return input._env.dispatch(_keep_mask, (), (input, shape, keep), None)


class _Dropout(torch_compat.OwnFunction):
  """Dropout and its gradient, which is dropout with the key of the forward pass.

  No mask is saved: forward and backward draw the same one.
  """

  @staticmethod
  def forward(ctx, input, p, draw):
    ctx.p, ctx.draw = p, draw
    if draw is not None:
      return input._env.redraw(_forward, draw, (input, p))
    result, ctx.draw = input._env.draw(_forward, (input, p))
    return result

  @staticmethod
  @over_batches
  def backward(ctx, grad):
    return _Dropout.apply(grad, ctx.p, ctx.draw), None, None


def _check(p: float, error: type[Exception] = ValueError) -> None:
  """Raise for a bad probability; torch's C++ functions raise RuntimeError for it."""
  if not 0.0 <= p <= 1.0:
    raise error(f"dropout probability has to be between 0 and 1, but got {p}")


def _finish(input, result, inplace: bool):
  return input.copy_(result) if inplace else result


@register_function(F.dropout, kind=Kind.TENSORS)
def _dropout(input, p=0.5, training=True, inplace=False):
  _check(p)
  if not training or p == 0.0 or not input.numel():
    return input
  p = float(p)  # may be a tensor
  if torch.is_grad_enabled() and input.requires_grad:
    result = torch_compat.apply_function(_Dropout, input, p, None)
  else:
    result = input._env.dispatch(_forward, (), (input, p), None)
  return _finish(input, result, inplace)


@register_function(functions.dropout, kind=Kind.TENSORS)
def _torch_dropout(input, p, train):
  _check(p, RuntimeError)
  return _dropout(input, p, train)


@register_function(functions.dropout_, kind=Kind.TENSORS)
def _torch_dropout_(input, p, train):
  _check(p, RuntimeError)
  return _dropout(input, p, train, inplace=True)


def _noise(input, keep: float, shape) -> torch.Tensor:
  return aten.bernoulli.p(input.detach().new_empty(shape), keep)


def _feature_shape(input) -> tuple[int, ...]:
  if input.dim() < 2:
    raise RuntimeError(
      "Feature dropout requires at least 2 dimensions in the input, but got shape "
      f"{list(input.shape)}."
    )
  return (*input.shape[:2], *[1] * (input.dim() - 2))


def _feature_dropout(input, p, training, inplace=False):
  _check(p)
  if not training or p == 0.0 or not input.numel():
    return input
  if p == 1.0:
    return _finish(input, input * 0.0, inplace)
  noise = _noise(input, 1.0 - p, _feature_shape(input)) / (1.0 - p)
  return _finish(input, input * noise, inplace)


def _with_batch(function, input, batched_dims: int, *args):
  if input.dim() == batched_dims:
    return function(input, *args)
  batched = input.unsqueeze(0)
  result = function(batched, *args)
  # In place, the batched view wrote through to `input`.
  return input if result is batched else result.squeeze(0)


def _check_dims(name: str, input, allowed: tuple[int, int]) -> None:
  """Raise for a wrong rank in `dropout1d`; warn in the others, as torch does."""
  if input.dim() in allowed:
    return
  said = (
    f"{name}: Expected {allowed[0]}D or {allowed[1]}D input, but received a "
    f"{input.dim()}D input."
  )
  if name == "dropout1d":
    raise RuntimeError(said)
  warnings.warn(f"{said} Use dropout or dropout1d for it.", stacklevel=2)


@register_function(F.dropout1d, kind=Kind.TENSORS)
def _dropout1d(input, p=0.5, training=True, inplace=False):
  _check_dims("dropout1d", input, (2, 3))
  return _with_batch(_feature_dropout, input, 3, p, training, inplace)


@register_function(F.dropout2d, kind=Kind.TENSORS)
def _dropout2d(input, p=0.5, training=True, inplace=False):
  # torch reads a 3-d input as (N, C, L), not as one (C, H, W).
  _check_dims("dropout2d", input, (3, 4))
  return _feature_dropout(input, p, training, inplace)


@register_function(F.dropout3d, kind=Kind.TENSORS)
def _dropout3d(input, p=0.5, training=True, inplace=False):
  _check_dims("dropout3d", input, (4, 5))
  return _with_batch(_feature_dropout, input, 5, p, training, inplace)


@register_function(functions.feature_dropout, kind=Kind.TENSORS)
def _torch_feature_dropout(input, p, train):
  _check(p, RuntimeError)
  return _feature_dropout(input, p, train)


def _scaled_alpha_dropout(input, p, training, inplace, shape):
  _check(p)
  if not training or p == 0.0 or not input.numel():
    return input
  if p == 1.0:
    return _finish(input, input * 0.0, inplace)
  noise = _noise(input, 1.0 - p, shape)
  scale = ((_ALPHA_PRIME**2 * p + 1) * (1 - p)) ** -0.5
  shift = (noise - 1) * (_ALPHA_PRIME * scale) + _ALPHA_PRIME * scale * p
  return _finish(input, input * (noise * scale) + shift, inplace)


@register_function(F.alpha_dropout, kind=Kind.TENSORS)
def _alpha_dropout(input, p=0.5, training=False, inplace=False):
  return _scaled_alpha_dropout(input, p, training, inplace, tuple(input.shape))


@register_function(functions.alpha_dropout, kind=Kind.TENSORS)
def _torch_alpha_dropout(input, p, train):
  _check(p, RuntimeError)
  return _alpha_dropout(input, p, train)


@register_function(F.feature_alpha_dropout, kind=Kind.TENSORS)
def _feature_alpha_dropout(input, p=0.5, training=False, inplace=False):
  if not training:
    _check(p)
    return input
  return _scaled_alpha_dropout(input, p, training, inplace, _feature_shape(input))


@register_function(functions.feature_alpha_dropout, kind=Kind.TENSORS)
def _torch_feature_alpha_dropout(input, p, train):
  _check(p, RuntimeError)
  return _feature_alpha_dropout(input, p, train)
