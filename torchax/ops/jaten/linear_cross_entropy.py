"""Cross entropy of a linear layer's outputs, one chunk of rows at a time.

`torch.nn.functional.linear_cross_entropy` with `options` never stores the logits of all
rows. torch registers the operations when it imports their module, so strings name them
here. With a reduction, the forward pass computes the gradients too. Without one,
torch's backward pass calls ATen operations.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from torchax.core import mappings, out_of_range
from torchax.ops.builtin import op
from torchax.ops.jaten._arguments import require_one_dtype
from torchax.ops.promotion import widen
from torchax.registry.index_rules import Range


class _ClassTargets(NamedTuple):
  """Class targets: a class index per row, and a mask that is False for ignored rows."""

  indices: jax.Array
  is_counted: jax.Array

  def _row_weights(self, weights):
    indices = out_of_range.negative_to_size(self.indices, len(weights))
    return jnp.where(self.is_counted, out_of_range.read(weights, indices), 0)

  def losses(self, log_softmax, weights):
    picked = jnp.take_along_axis(log_softmax, self.indices[:, None], -1, mode="clip")
    return -self._row_weights(weights) * picked[:, 0]

  def logit_grads(self, softmax, weights):
    """Return the gradient of the losses with respect to the logits."""
    one_hot = jax.nn.one_hot(self.indices, softmax.shape[-1], dtype=softmax.dtype)
    return (softmax - one_hot) * self._row_weights(weights)[:, None]

  def divisor(self, weights):
    """Return the divisor of the mean: the sum of the rows' weights."""
    return self._row_weights(weights).sum()


class _ProbabilityTargets(NamedTuple):
  """Probability targets of shape (rows, classes); in torch since 2.15."""

  values: jax.Array

  def losses(self, log_softmax, weights):
    return -(self.values * weights * log_softmax).sum(axis=-1)

  def logit_grads(self, softmax, weights):
    weighted = self.values * weights
    return softmax * weighted.sum(axis=-1, keepdims=True) - weighted

  def divisor(self, weights):
    return jnp.asarray(len(self.values), weights.dtype)


def _targets(target, ignore_index):
  """Return probability targets for a float dtype, as torch; else class targets."""
  if jnp.issubdtype(target.dtype, jnp.floating):
    return _ProbabilityTargets(target)
  is_counted = target != ignore_index
  return _ClassTargets(jnp.where(is_counted, target, 0), is_counted)


def _class_rules(
  input, linear_weight, target, linear_bias, weight, *rest, ignore_index=None, **named
):
  if ignore_index is None:
    # First positional argument after the reduction, which one schema lacks.
    ignore_index = next(value for value in rest if not isinstance(value, str))
  message = "index {number} is out of bounds for dimension 1 with size {high}"
  classes = linear_weight.shape[0]
  yield Range(target, 0, classes, RuntimeError, message, ignored=ignore_index)


def _chunks(arrays, size):
  """Split each array of a tree, (rows, …), into (chunks, size, …), padded with 0."""

  def split(array):
    count = -(-array.shape[0] // size)
    padding = count * size - array.shape[0]
    padded = jnp.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1))
    return padded.reshape(count, size, *array.shape[1:])

  return jax.tree.map(split, arrays)


def _log_softmax(layer, rows):
  """Return the log-softmax of the logits of a chunk, in float32 for half precision.

  Logits overflow in float16, the `acc_dtype` that torch passes for an unknown device.
  """
  matrix, bias = layer
  wide = jnp.promote_types(matrix.dtype, jnp.float32)
  logits = jnp.matmul(rows, matrix.T, preferred_element_type=wide)
  return jax.nn.log_softmax(logits + bias, axis=-1)


def _loss_and_gradients(layer, weights, scale, chunks):
  """Return the scaled sum of losses and its gradients for rows, matrix and bias."""
  matrix, bias = layer

  def add_chunk(sums, chunk):
    loss, matrix_grad, bias_grad = sums
    rows, targets = chunk
    log_softmax = _log_softmax(layer, rows)
    loss = loss + (targets.losses(log_softmax, weights) * scale).sum()
    logit_grads = targets.logit_grads(jnp.exp(log_softmax), weights) * scale
    logit_grads = logit_grads.astype(matrix.dtype)
    sums = loss, matrix_grad + logit_grads.T @ rows, bias_grad + logit_grads.sum(0)
    return sums, logit_grads @ matrix

  start = (jnp.zeros((), weights.dtype), jnp.zeros_like(matrix), jnp.zeros_like(bias))
  (loss, matrix_grad, bias_grad), row_grads = lax.scan(add_chunk, start, chunks)
  return loss, row_grads.reshape(-1, row_grads.shape[-1]), matrix_grad, bias_grad


def _operands(input, matrix, target, bias, weight, ignore_index, chunk_size, acc_dtype):
  """Return (matrix, bias), class weights, targets and chunks, in the compute dtype.

  A chunk is a pair of `chunk_size` rows and their targets.
  """
  require_one_dtype("linear_cross_entropy", input, matrix)
  dtype = jnp.promote_types(input.dtype, mappings.t2j_dtype(acc_dtype))
  bias = jnp.zeros(len(matrix), dtype) if bias is None else bias.astype(dtype)
  weights = widen(jnp.ones(len(matrix), dtype) if weight is None else weight)
  targets = _targets(target, ignore_index)
  chunks = _chunks((input.astype(dtype), targets), max(chunk_size, 1))
  return (matrix.astype(dtype), bias), weights, targets, chunks


@op(
  "torch_nn::_linear_cross_entropy_batch_chunked",
  static=("label_smoothing",),
  rules=_class_rules,
)
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
  """Return (loss, gradients of input, matrix and bias), empty if not requested."""
  if reduction not in ("mean", "sum") or label_smoothing:
    raise NotImplementedError(
      "linear_cross_entropy in chunks expects the reduction mean or sum and no label "
      f"smoothing, but got {reduction!r} and {label_smoothing}. Pass options=None."
    )
  layer, weights, targets, chunks = _operands(
    *(input, linear_weight, target, linear_bias, weight),
    *(ignore_index, batch_chunk_size, acc_dtype),
  )
  # If all rows are ignored the mean is NaN, 0 times infinity, as in torch.
  scale = 1 / targets.divisor(weights) if reduction == "mean" else 1
  loss, row_grads, matrix_grad, bias_grad = _loss_and_gradients(
    layer, weights, scale, chunks
  )
  if reduction == "mean" and not len(input):
    loss = jnp.full_like(loss, jnp.nan)

  def requested(gradient, is_requested):
    empty = jnp.zeros((0,) * gradient.ndim)
    return (gradient if is_requested else empty).astype(input.dtype)

  return (
    loss.astype(input.dtype),
    requested(row_grads[: len(input)], compute_input_grad),
    requested(matrix_grad, compute_linear_weight_grad),
    requested(bias_grad, compute_linear_bias_grad),
  )


@op("torch_nn::_linear_cross_entropy_batch_chunked_no_reduction", rules=_class_rules)
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
  """Return the loss of each row."""
  layer, weights, _, chunks = _operands(
    *(input, linear_weight, target, linear_bias, weight),
    *(ignore_index, batch_chunk_size, acc_dtype),
  )

  def chunk_losses(chunk):
    rows, targets = chunk
    return targets.losses(_log_softmax(layer, rows), weights)

  losses = lax.map(chunk_losses, chunks)
  return losses.reshape(-1)[: len(input)].astype(input.dtype)
