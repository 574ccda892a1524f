"""The cross entropy of a linear layer's outputs, some rows at a time.

`torch.nn.functional.linear_cross_entropy` with `options` never holds the logits of all
rows. The operations register themselves when torch imports them, so they are named by
strings here. With a reduction the forward pass makes the gradients too; without one,
torch's backward pass calls ATen operations.
"""

import jax
import jax.numpy as jnp
from jax import lax

from torchax.ops import mappings
from torchax.ops.op_base import op


def _row_weights(target, weight, ignore_index, classes, dtype):
  """The weight of each row's class, 0 where it is ignored; and usable targets."""
  ignored = target == ignore_index
  target = jnp.where(ignored, 0, target)
  weights = jnp.ones(classes, dtype) if weight is None else weight.astype(dtype)
  return jnp.where(ignored, 0, weights[target]), target


def _chunks(array, size):
  """(rows, …) as (chunks, size, …), filled up with zeros."""
  rows = array.shape[0]
  count = -(-rows // size)
  padded = jnp.pad(array, [(0, count * size - rows)] + [(0, 0)] * (array.ndim - 1))
  return padded.reshape(count, size, *array.shape[1:])


def _losses(layer, rows, targets, weights):
  """(weighted losses, softmax) of a chunk."""
  matrix, bias = layer
  logits = rows @ matrix.T + bias
  logarithms = jax.nn.log_softmax(logits, axis=-1)
  picked = jnp.take_along_axis(logarithms, targets[:, None], axis=-1)[:, 0]
  return -weights * picked, jnp.exp(logarithms)


def _loss_and_gradients(layer, chunks):
  """The sum of the losses, and its gradients by rows, matrix and bias."""
  matrix, bias = layer

  def add_chunk(sums, chunk):
    loss, of_matrix, of_bias = sums
    rows, targets, weights = chunk
    losses, slopes = _losses(layer, rows, targets, weights)
    slopes = slopes - jax.nn.one_hot(targets, len(matrix), dtype=slopes.dtype)
    slopes = slopes * weights[:, None]
    sums = loss + losses.sum(), of_matrix + slopes.T @ rows, of_bias + slopes.sum(0)
    return sums, slopes @ matrix

  start = (jnp.zeros((), matrix.dtype), jnp.zeros_like(matrix), jnp.zeros_like(bias))
  (loss, of_matrix, of_bias), of_rows = lax.scan(add_chunk, start, chunks)
  return loss, of_rows.reshape(-1, of_rows.shape[-1]), of_matrix, of_bias


def _layer(matrix, bias, dtype):
  bias = jnp.zeros(len(matrix), dtype) if bias is None else bias.astype(dtype)
  return matrix.astype(dtype), bias


def _compute_dtype(input, acc_dtype):
  return jnp.promote_types(input.dtype, mappings.t2j_dtype(acc_dtype))


@op("torch_nn::_linear_cross_entropy_batch_chunked", static=("label_smoothing",))
def _linear_cross_entropy_batch_chunked(
  input,
  linear_weight,
  target,
  linear_bias,
  weight,
  reduction,
  ignore_index,
  label_smoothing,
  batch_chunk_size,
  acc_policy,
  acc_dtype,
  allow_retain_graph,
  compute_input_grad,
  compute_linear_weight_grad,
  compute_linear_bias_grad,
):
  """(loss, gradients of input, matrix and bias); one not wanted has no elements."""
  if reduction not in ("mean", "sum") or label_smoothing:
    raise NotImplementedError(
      "linear_cross_entropy by chunks expects the reduction mean or sum and no label "
      f"smoothing, but got {reduction!r} and {label_smoothing}. Pass options=None."
    )
  dtype = _compute_dtype(input, acc_dtype)
  layer = _layer(linear_weight, linear_bias, dtype)
  weights, targets = _row_weights(target, weight, ignore_index, len(layer[0]), dtype)
  if reduction == "mean":
    weights = weights / weights.sum()  # NaN where nothing counts, as in torch
  arrays = (input.astype(dtype), targets, weights)
  chunks = tuple(_chunks(array, max(batch_chunk_size, 1)) for array in arrays)
  loss, of_rows, of_matrix, of_bias = _loss_and_gradients(layer, chunks)
  if reduction == "mean":
    loss = jnp.where(jnp.isnan(weights).all(), jnp.nan, loss)

  def wanted(gradient, is_wanted):
    empty = jnp.zeros((0,) * gradient.ndim)
    return (gradient if is_wanted else empty).astype(input.dtype)

  return (
    loss.astype(input.dtype),
    wanted(of_rows[: len(input)], compute_input_grad),
    wanted(of_matrix, compute_linear_weight_grad),
    wanted(of_bias, compute_linear_bias_grad),
  )


@op("torch_nn::_linear_cross_entropy_batch_chunked_no_reduction")
def _linear_cross_entropy_batch_chunked_no_reduction(
  input,
  linear_weight,
  target,
  linear_bias,
  weight,
  ignore_index,
  batch_chunk_size,
  acc_policy,
  acc_dtype,
):
  """The loss of each row."""
  dtype = _compute_dtype(input, acc_dtype)
  layer = _layer(linear_weight, linear_bias, dtype)
  weights, targets = _row_weights(target, weight, ignore_index, len(layer[0]), dtype)
  arrays = (input.astype(dtype), targets, weights)
  chunks = tuple(_chunks(array, max(batch_chunk_size, 1)) for array in arrays)
  losses = lax.map(lambda chunk: _losses(layer, *chunk)[0], chunks)
  return losses.reshape(-1)[: len(input)].astype(input.dtype)
