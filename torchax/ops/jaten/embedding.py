"""Embedding look-ups, bags of embeddings, and their gradients.

An index outside the table cannot raise inside a compiled function: its row reads as
NaN, and no gradient comes from it. `padding_idx` is -1 where there is none.
"""

import enum

import jax
import jax.numpy as jnp

from torchax.ops.builtin import op
from torchax.ops.jaten._opmath import widen
from torchax.ops.names import aten

# embedding_renorm_ scales to just below the limit: aten/src/ATen/native/Embedding.cpp.
RENORM_MARGIN = 1e-7


class BagMode(enum.IntEnum):
  """How a bag combines its rows; the values are ATen's."""

  SUM = 0
  MEAN = 1
  MAX = 2


def _rows(weight, indices):
  return weight.at[indices].get(mode="fill", fill_value=jnp.nan)


def _counts(indices, num_weights):
  """How often each row of the table is asked for."""
  return jnp.zeros(num_weights, jnp.int32).at[indices].add(1, mode="drop")


def _add_rows(rows, indices, num_weights, dtype):
  """A table with each of `rows` (n, d) added where its index says, in float32."""
  table = jnp.zeros((num_weights, rows.shape[-1]), widen(rows).dtype)
  return table.at[indices].add(widen(rows), mode="drop").astype(dtype)


@op(aten.embedding)
def _aten_embedding(
  weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False
):
  """The gradient's options are for `embedding_dense_backward`."""
  if weight.ndim != 2:
    raise RuntimeError(f"'weight' must be 2-D, but got shape {weight.shape}.")
  return _rows(weight, indices)


@op(aten.embedding_dense_backward)
def _aten_embedding_dense_backward(
  grad_output, indices, num_weights, padding_idx, scale_grad_by_freq
):
  flat = indices.reshape(-1)
  rows = widen(grad_output).reshape(flat.size, grad_output.shape[-1])
  if scale_grad_by_freq:
    rows = rows / _counts(flat, num_weights)[flat][:, None]
  rows = jnp.where((flat == padding_idx)[:, None], 0, rows)
  return _add_rows(rows, flat, num_weights, grad_output.dtype)


@op(aten.embedding_renorm)
def _aten_embedding_renorm_(self, indices, max_norm, norm_type):
  """Rows that are asked for and longer than `max_norm` shrink to it."""
  wide = widen(self)
  norms = jnp.sum(jnp.abs(wide) ** norm_type, axis=1, keepdims=True) ** (1 / norm_type)
  norms = jnp.where(
    norm_type == jnp.inf, jnp.max(jnp.abs(wide), axis=1, keepdims=True), norms
  )
  asked = (_counts(indices.reshape(-1), self.shape[0]) > 0)[:, None]
  scale = jnp.where(asked & (norms > max_norm), max_norm / (norms + RENORM_MARGIN), 1)
  return (wide * scale).astype(self.dtype)


# ---- bags


def _bag_of_index(indices, offsets, num_bags):
  """The bag that each index belongs to: offsets are where the bags start."""
  positions = jnp.arange(indices.shape[0], dtype=offsets.dtype)
  bags = jnp.searchsorted(offsets[:num_bags], positions, side="right") - 1
  return bags.astype(indices.dtype)


def _bag_maximum(rows, member, bags, num_bags, indices):
  """Maximum of each bag, and the table row it came from; zeros for an empty bag."""
  fixed = jax.lax.stop_gradient(jnp.where(member[:, None], rows, -jnp.inf))
  peaks = jax.ops.segment_max(fixed, bags, num_bags)
  # The first position that reaches its bag's maximum.
  positions = jnp.arange(rows.shape[0])[:, None]
  reaches = (fixed == peaks[bags]) & member[:, None]
  winner = jax.ops.segment_min(
    jnp.where(reaches, positions, rows.shape[0]), bags, num_bags
  )
  filled = winner < rows.shape[0]
  winner = jnp.where(filled, winner, 0)
  if not rows.shape[0]:
    return jnp.zeros(winner.shape, rows.dtype), winner.astype(indices.dtype)
  output = jnp.where(filled, jnp.take_along_axis(rows, winner, axis=0), 0)
  return output, jnp.where(filled, indices[winner], 0).astype(indices.dtype)


@op(aten._embedding_bag, aten._embedding_bag_forward_only)
def _aten__embedding_bag(
  weight,
  indices,
  offsets,
  scale_grad_by_freq=False,
  mode=0,
  sparse=False,
  per_sample_weights=None,
  include_last_offset=False,
  padding_idx=-1,
):
  """Returns output, bag of each index, bag sizes, and maximum rows (mode max)."""
  if per_sample_weights is not None and mode != BagMode.SUM:
    raise RuntimeError("embedding_bag: per_sample_weights needs mode='sum'.")
  num_bags = offsets.shape[0] - (1 if include_last_offset else 0)
  bags = _bag_of_index(indices, offsets, num_bags)
  member = indices != padding_idx
  sizes = jax.ops.segment_sum(member.astype(indices.dtype), bags, num_bags)
  rows = widen(_rows(weight, indices))
  if mode == BagMode.MAX:
    output, maximum = _bag_maximum(rows, member, bags, num_bags, indices)
    return output.astype(weight.dtype), bags, sizes, maximum
  if per_sample_weights is not None:
    rows = rows * widen(per_sample_weights)[:, None]
  output = jax.ops.segment_sum(jnp.where(member[:, None], rows, 0), bags, num_bags)
  if mode == BagMode.MEAN:
    output = output / jnp.maximum(sizes, 1)[:, None]
  return output.astype(weight.dtype), bags, sizes, jnp.zeros_like(sizes)


def _bag_gradient(
  grad,
  indices,
  offset2bag,
  bag_size,
  maximum_indices,
  num_weights,
  scale_grad_by_freq,
  mode,
  per_sample_weights,
  padding_idx,
):
  if mode == BagMode.MAX:
    columns = jnp.arange(grad.shape[1])
    taken = jnp.where((bag_size > 0)[:, None], widen(grad), 0)
    table = jnp.zeros((num_weights, grad.shape[1]), taken.dtype)
    return table.at[maximum_indices, columns].add(taken).astype(grad.dtype)
  rows = widen(grad)[offset2bag]
  if mode == BagMode.MEAN:
    rows = rows / jnp.maximum(bag_size, 1)[offset2bag][:, None]
  if per_sample_weights is not None:
    rows = rows * widen(per_sample_weights)[:, None]
  if scale_grad_by_freq:
    rows = rows / _counts(indices, num_weights)[indices][:, None]
  rows = jnp.where((indices != padding_idx)[:, None], rows, 0)
  return _add_rows(rows, indices, num_weights, grad.dtype)


@op(aten._embedding_bag_backward)
def _aten__embedding_bag_backward(
  grad,
  indices,
  offsets,
  offset2bag,
  bag_size,
  maximum_indices,
  num_weights,
  scale_grad_by_freq,
  mode,
  sparse,
  per_sample_weights,
  padding_idx=-1,
):
  if sparse:
    raise NotImplementedError(
      "torchax has no sparse gradients: build the EmbeddingBag with sparse=False."
    )
  return _bag_gradient(
    grad,
    indices,
    offset2bag,
    bag_size,
    maximum_indices,
    num_weights,
    scale_grad_by_freq,
    mode,
    per_sample_weights,
    padding_idx,
  )


@op(aten._embedding_bag_dense_backward)
def _aten__embedding_bag_dense_backward(
  grad,
  indices,
  offset2bag,
  bag_size,
  maximum_indices,
  num_weights,
  scale_grad_by_freq,
  mode,
  per_sample_weights,
  padding_idx=-1,
):
  return _bag_gradient(
    grad,
    indices,
    offset2bag,
    bag_size,
    maximum_indices,
    num_weights,
    scale_grad_by_freq,
    mode,
    per_sample_weights,
    padding_idx,
  )


@op(aten._embedding_bag_per_sample_weights_backward)
def _aten__embedding_bag_per_sample_weights_backward(
  grad, weight, indices, offsets, offset2bag, mode, padding_idx=-1
):
  rows = widen(_rows(weight, indices))
  products = jnp.sum(widen(grad)[offset2bag] * rows, axis=1)
  return jnp.where(indices != padding_idx, products, 0).astype(grad.dtype)
