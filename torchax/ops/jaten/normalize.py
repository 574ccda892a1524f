"""Layer, group, batch, RMS and weight normalization, and their gradients.

Statistics of half-precision inputs are computed and returned in float32, as on CUDA.
The operations that also update running statistics in place call the pure
`_native_batch_norm_legit_functional` and copy its results (last section).
"""

import math

import jax.numpy as jnp
import torch
from jax import lax

from torchax.ops.builtin import Kind, op
from torchax.ops.promotion import widen
from torchax.registry.names import aten


def _moments(self, axes):
  """Return mean and biased variance over `axes`, with the axes kept as size 1."""
  mean = jnp.mean(self, axis=axes, keepdims=True)
  return mean, jnp.mean(lax.square(self - mean), axis=axes, keepdims=True)


def _affine(normalized, weight, bias):
  """Multiply by the weight and add the bias; either may be None."""
  if weight is not None:
    normalized = normalized * widen(weight)
  return normalized if bias is None else normalized + widen(bias)


def _centered_gradient(grad_normalized, normalized, rstd, axes):
  """Return the gradient of x in (x - mean(x)) * rstd(x), through the statistics too."""
  mean_grad = jnp.mean(grad_normalized, axis=axes, keepdims=True)
  projection = jnp.mean(grad_normalized * normalized, axis=axes, keepdims=True)
  return rstd * (grad_normalized - mean_grad - normalized * projection)


def _select_outputs(output_mask, *results):
  return tuple(
    result() if wanted else None for wanted, result in zip(output_mask, results)
  )


# ---- Layer normalization


def _trailing_axes(input, normalized_shape) -> tuple[int, ...]:
  count = len(normalized_shape)
  if not count or input.shape[input.ndim - count :] != tuple(normalized_shape):
    raise RuntimeError(
      f"Given normalized_shape={list(normalized_shape)}, expected input with shape "
      f"[*, {', '.join(map(str, normalized_shape))}], but got input of size "
      f"{list(input.shape)}"
    )
  return tuple(range(input.ndim - count, input.ndim))


def _check_parameter(name, parameter, normalized_shape):
  if parameter is not None and parameter.shape != tuple(normalized_shape):
    raise RuntimeError(
      f"Expected {name} to be of same shape as normalized_shape, but got {name} of "
      f"shape {parameter.shape} and normalized_shape = {tuple(normalized_shape)}"
    )


@op(aten.native_layer_norm)
def _aten_native_layer_norm(input, normalized_shape, weight, bias, eps):
  axes = _trailing_axes(input, normalized_shape)
  _check_parameter("weight", weight, normalized_shape)
  _check_parameter("bias", bias, normalized_shape)
  wide = widen(input)
  mean, variance = _moments(wide, axes)
  rstd = lax.rsqrt(variance + eps)
  output = _affine((wide - mean) * rstd, weight, bias)
  return output.astype(input.dtype), mean, rstd


@op(aten.native_layer_norm_backward)
def _aten_native_layer_norm_backward(
  grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask
):
  axes = _trailing_axes(input, normalized_shape)
  outer = tuple(range(axes[0]))
  grad, rstd = widen(grad_out), widen(rstd)
  normalized = (widen(input) - widen(mean)) * rstd

  def grad_input():
    gradient = _centered_gradient(_affine(grad, weight, None), normalized, rstd, axes)
    return gradient.astype(input.dtype)

  def grad_weight():
    return jnp.sum(grad * normalized, axis=outer).astype(weight.dtype)

  def grad_bias():
    return jnp.sum(grad, axis=outer).astype(bias.dtype)

  wanted = (output_mask[0], output_mask[1] and weight is not None)
  wanted += (output_mask[2] and bias is not None,)
  return _select_outputs(wanted, grad_input, grad_weight, grad_bias)


# ---- RMS normalization


@op(aten._fused_rms_norm)
def _aten__fused_rms_norm(input, normalized_shape, weight, eps=None):
  """Normalize by the RMS; `eps` defaults to the machine epsilon of the opmath dtype."""
  axes = _trailing_axes(input, normalized_shape)
  _check_parameter("weight", weight, normalized_shape)
  wide = widen(input)
  eps = jnp.finfo(wide.dtype).eps if eps is None else eps
  rstd = lax.rsqrt(jnp.mean(lax.square(wide), axis=axes, keepdims=True) + eps)
  return _affine(wide * rstd, weight, None).astype(input.dtype), rstd


@op(aten._fused_rms_norm_backward)
def _aten__fused_rms_norm_backward(
  grad_out, input, normalized_shape, rstd, weight, output_mask
):
  axes = _trailing_axes(input, normalized_shape)
  outer = tuple(range(axes[0]))
  grad, rstd = widen(grad_out), widen(rstd)
  normalized = widen(input) * rstd

  def grad_input():
    inner = _affine(grad, weight, None)
    projection = jnp.mean(inner * normalized, axis=axes, keepdims=True)
    return (rstd * (inner - normalized * projection)).astype(input.dtype)

  def grad_weight():
    return jnp.sum(grad * normalized, axis=outer).astype(weight.dtype)

  wanted = (output_mask[0], output_mask[1] and weight is not None)
  return _select_outputs(wanted, grad_input, grad_weight)


# ---- Group normalization


def _channels(parameter, group):
  """Reshape a (C,) parameter to (1, group, C / group, 1), like the grouped input."""
  return None if parameter is None else parameter.reshape(1, group, -1, 1)


@op(aten.native_group_norm)
def _aten_native_group_norm(input, weight, bias, N, C, HxW, group, eps):
  """Return the output, and mean and reciprocal deviation of shape (N, group)."""
  wide = widen(input).reshape(N, group, C // group, HxW)
  mean, variance = _moments(wide, (2, 3))
  rstd = lax.rsqrt(variance + eps)
  normalized = (wide - mean) * rstd
  output = _affine(normalized, _channels(weight, group), _channels(bias, group))
  output = output.reshape(input.shape).astype(input.dtype)
  return output, mean.reshape(N, group), rstd.reshape(N, group)


@op(aten.native_group_norm_backward)
def _aten_native_group_norm_backward(
  grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask
):
  grouped = (N, group, C // group, HxW)
  grad, rstd = widen(grad_out).reshape(grouped), widen(rstd).reshape(N, group, 1, 1)
  normalized = (widen(input).reshape(grouped) - widen(mean).reshape(rstd.shape)) * rstd
  parameter_dtype = input.dtype if weight is None else weight.dtype

  def grad_input():
    inner = _affine(grad, _channels(weight, group), None)
    gradient = _centered_gradient(inner, normalized, rstd, (2, 3))
    return gradient.reshape(input.shape).astype(input.dtype)

  def grad_weight():
    total = jnp.sum(grad * normalized, axis=(0, 3))
    return total.reshape(C).astype(parameter_dtype)

  def grad_bias():
    return jnp.sum(grad, axis=(0, 3)).reshape(C).astype(parameter_dtype)

  return _select_outputs(output_mask, grad_input, grad_weight, grad_bias)


# ---- Batch normalization, pure


def _batch_axes(input) -> tuple[int, ...]:
  return (0, *range(2, input.ndim))


def _per_channel(statistic, input):
  """Reshape a (C,) array to broadcast with (N, C, …)."""
  if statistic is None:
    return None
  return widen(statistic).reshape((1, -1) + (1,) * (input.ndim - 2))


def _normalize_batch(input, weight, bias, mean, invstd):
  normalized = (widen(input) - _per_channel(mean, input)) * _per_channel(invstd, input)
  output = _affine(normalized, _per_channel(weight, input), _per_channel(bias, input))
  return output.astype(input.dtype)


def _batch_norm_training(input, weight, bias, eps):
  """Return output, mean, reciprocal deviation and biased variance of the batch."""
  mean, variance = _moments(widen(input), _batch_axes(input))
  mean, variance = mean.reshape(-1), variance.reshape(-1)
  invstd = lax.rsqrt(variance + eps)
  return _normalize_batch(input, weight, bias, mean, invstd), mean, invstd, variance


def _batch_norm_inference(input, weight, bias, running_mean, running_var, eps):
  """Return the output and empty statistics: the backward reads the running ones."""
  invstd = lax.rsqrt(widen(running_var) + eps)
  output = _normalize_batch(input, weight, bias, running_mean, invstd)
  empty = jnp.zeros((0,), widen(input).dtype)
  return output, empty, empty


def _update_running(running, batch, momentum):
  mixed = (1 - momentum) * widen(running) + momentum * batch
  return mixed.astype(running.dtype)


@op(aten._native_batch_norm_legit_functional)
def _aten__native_batch_norm_legit_functional(
  input, weight, bias, running_mean, running_var, training, momentum, eps
):
  if not training:
    outputs = _batch_norm_inference(input, weight, bias, running_mean, running_var, eps)
    return (*outputs, running_mean, running_var)
  output, mean, invstd, variance = _batch_norm_training(input, weight, bias, eps)
  count = input.size // max(input.shape[1], 1)
  # Bessel's correction: the running variance is the unbiased one.
  unbiased = variance * (count / (count - 1) if count > 1 else math.nan)
  new_mean = _update_running(running_mean, mean, momentum)
  new_var = _update_running(running_var, unbiased, momentum)
  return output, mean, invstd, new_mean, new_var


@op(aten._native_batch_norm_legit.no_stats)
def _aten__native_batch_norm_legit_no_stats(
  input, weight, bias, training, momentum, eps
):
  return _batch_norm_training(input, weight, bias, eps)[:3]


@op(aten._native_batch_norm_legit_no_training)
def _aten__native_batch_norm_legit_no_training(
  input, weight, bias, running_mean, running_var, momentum, eps
):
  return _batch_norm_inference(input, weight, bias, running_mean, running_var, eps)


@op(aten.native_batch_norm_backward)
def _aten_native_batch_norm_backward(
  grad_out,
  input,
  weight,
  running_mean,
  running_var,
  save_mean,
  save_invstd,
  train,
  eps,
  output_mask,
):
  axes = _batch_axes(input)
  mean = save_mean if train else running_mean
  invstd = save_invstd if train else lax.rsqrt(widen(running_var) + eps)
  invstd = _per_channel(invstd, input)
  grad = widen(grad_out)
  normalized = (widen(input) - _per_channel(mean, input)) * invstd
  parameter_dtype = widen(input).dtype if weight is None else weight.dtype

  def grad_input():
    inner = _affine(grad, _per_channel(weight, input), None)
    if train:
      return _centered_gradient(inner, normalized, invstd, axes).astype(input.dtype)
    return (inner * invstd).astype(input.dtype)

  def grad_weight():
    return jnp.sum(grad * normalized, axis=axes).astype(parameter_dtype)

  def grad_bias():
    return jnp.sum(grad, axis=axes).astype(parameter_dtype)

  return _select_outputs(output_mask, grad_input, grad_weight, grad_bias)


# ---- Weight normalization


@op(aten._weight_norm_interface_backward)
def _aten__weight_norm_interface_backward(grad_w, saved_v, saved_g, saved_norms, dim):
  """Return the gradients of w = g v / |v|, with one norm per index of `dim`.

  The gradient of v is orthogonal to v (Salimans and Kingma 2016,
  https://arxiv.org/abs/1602.07868, equation 3).
  """
  grad, v, g, norms = map(widen, (grad_w, saved_v, saved_g, saved_norms))
  axes = tuple(axis for axis in range(v.ndim) if axis != dim % v.ndim)
  unit = v / norms
  grad_g = jnp.sum(grad * unit, axis=axes, keepdims=True)
  grad_v = g / norms * (grad - grad_g * unit)
  return grad_v.astype(saved_v.dtype), grad_g.astype(saved_g.dtype)


# ---- Batch normalization that updates running statistics


@op(aten.native_batch_norm, aten._native_batch_norm_legit.default, kind=Kind.TENSORS)
def _aten_native_batch_norm(
  input, weight, bias, running_mean, running_var, training, momentum, eps
):
  """Normalize a batch; in training, update the running statistics if present."""
  if running_mean is None or running_var is None:
    if not training:
      raise RuntimeError(
        "Expected running_mean and running_var to be defined when training=False."
      )
    return aten._native_batch_norm_legit.no_stats(
      input, weight, bias, training, momentum, eps
    )
  *outputs, new_mean, new_var = aten._native_batch_norm_legit_functional(
    input, weight, bias, running_mean, running_var, training, momentum, eps
  )
  if training:
    running_mean.copy_(new_mean)
    running_var.copy_(new_var)
  return tuple(outputs)


@op(aten.cudnn_batch_norm, kind=Kind.TENSORS)
def _aten_cudnn_batch_norm(input, *arguments):
  """Call `native_batch_norm` and return an empty reserve, unused by the backward."""
  outputs = _aten_native_batch_norm(input, *arguments)
  return (*outputs, torch.empty(0, dtype=torch.uint8, device=input.device))
