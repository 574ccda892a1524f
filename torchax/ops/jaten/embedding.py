"""Embedding look-ups, bags of embeddings, and their gradients.

An index outside the table raises if its value is known. Otherwise its row is NaN, and
so are the gradients written with it. `padding_idx` is -1 if there is none.
"""

import enum

import jax
import jax.numpy as jnp

from torchax.core import out_of_range
from torchax.ops.builtin import op
from torchax.ops.jaten import _numbers, _on_host
from torchax.ops.jaten._extrema import highest
from torchax.ops.jaten.indexing import add_at
from torchax.ops.promotion import widen
from torchax.registry.index_rules import Condition, Range
from torchax.registry.names import aten

# embedding_renorm_ scales to just below the limit: aten/src/ATen/native/Embedding.cpp.
RENORM_MARGIN = 1e-7


class BagMode(enum.IntEnum):
  """Reduction of the rows of a bag, with ATen's numbers."""

  SUM = 0
  MEAN = 1
  MAX = 2


def _rows(weight, indices):
  return out_of_range.read(
    weight, out_of_range.negative_to_size(indices, weight.shape[0])
  )


def _counts(indices, num_weights):
  """Count the lookups of each row of the table."""
  rows = out_of_range.clip(indices, num_weights)
  return jnp.zeros(num_weights, jnp.int32).at[rows].add(1, mode="drop")


def _is_used(indices, padding_idx):
  """Return a mask of the indices other than the padding's."""
  return jnp.full(indices.shape, padding_idx < 0) | (indices != padding_idx)


def _add_rows(rows, indices, num_weights, scale_grad_by_freq, padding_idx):
  """Add up gradients `rows` (n, d) by index in a table of zeros."""
  if scale_grad_by_freq:
    rows = rows / _counts(indices, num_weights)[indices][:, None]
  rows = jnp.where(_is_used(indices, padding_idx)[:, None], rows, 0)
  table = jnp.zeros((num_weights, rows.shape[-1]), rows.dtype)
  broken = out_of_range.is_out_of_range(indices, num_weights)
  inside = out_of_range.clip(indices, num_weights)
  return out_of_range.write(table, inside, rows, add_at, broken)


def _table_rules(weight, indices, *rest, **named):
  if weight.ndim != 2:
    return  # the lowering raises for the shape
  yield Range(indices, 0, weight.shape[0], IndexError, "index out of range in self")


_PADDING: dict = {"static": ("padding_idx",), "prepare": _numbers.as_they_are}


@op(aten.embedding, rules=_table_rules, on_host=_on_host.embedding, **_PADDING)
def _aten_embedding(
  weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False
):
  """Look up rows; the last two options concern only `embedding_dense_backward`."""
  return _rows(weight, indices)


@op(
  aten.embedding_dense_backward,
  on_host=_on_host.embedding_dense_backward,
  **_PADDING,
)
def _aten_embedding_dense_backward(
  grad_output, indices, num_weights, padding_idx, scale_grad_by_freq
):
  flat = indices.reshape(-1)
  rows = widen(grad_output).reshape(flat.size, grad_output.shape[-1])
  table = _add_rows(rows, flat, num_weights, scale_grad_by_freq, padding_idx)
  return table.astype(grad_output.dtype)


def _renorm_rules(self, indices, *rest, **named):
  message = "select(): index {number} out of range for tensor of size "
  message += f"{list(self.shape)} at dimension 0"
  yield Range(indices, 0, self.shape[0], IndexError, message)


@op(aten.embedding_renorm, rules=_renorm_rules)
def _aten_embedding_renorm_(self, indices, max_norm, norm_type):
  """Scale the indexed rows whose norm exceeds `max_norm` down to it."""
  wide = widen(self)
  norms = jnp.sum(jnp.abs(wide) ** norm_type, axis=1, keepdims=True) ** (1 / norm_type)
  norms = jnp.where(
    norm_type == jnp.inf, highest(jnp.abs(wide), 1, keepdims=True), norms
  )
  asked = (_counts(indices.reshape(-1), self.shape[0]) > 0)[:, None]
  scale = jnp.where(asked & (norms > max_norm), max_norm / (norms + RENORM_MARGIN), 1)
  is_broken = jnp.any(out_of_range.is_out_of_range(indices, self.shape[0]))
  return out_of_range.fill_invalid((wide * scale).astype(self.dtype), is_broken)


# ---- bags


def _bag_maximum(rows, member, bags, num_bags, indices):
  """Return the maximum of each bag and its row in the table; zeros for an empty bag."""
  fixed = jax.lax.stop_gradient(jnp.where(member[:, None], rows, -jnp.inf))
  peaks = jax.ops.segment_max(fixed, bags, num_bags)
  # The first position with its bag's maximum wins.
  positions = jnp.arange(rows.shape[0])[:, None]
  reaches = ((fixed == peaks[bags]) | jnp.isnan(fixed)) & member[:, None]
  winner = jax.ops.segment_min(
    jnp.where(reaches, positions, rows.shape[0]), bags, num_bags
  )
  filled = winner < rows.shape[0]
  winner = jnp.where(filled, winner, 0)
  if not rows.shape[0]:
    return jnp.zeros(winner.shape, rows.dtype), winner.astype(indices.dtype)
  output = jnp.where(filled, jnp.take_along_axis(rows, winner, axis=0), 0)
  return output, jnp.where(filled, indices[winner], 0).astype(indices.dtype)


_NO_ROW = (
  "Index {position} of input takes value {number} which is not in the valid range "
  "[0, {high})"
)
_NO_START = (
  "offsets[-1] can not be greater than input's length {last} but got offsets[-1] of "
  "{number}"
)
_LATE_START = (
  "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start "
  "from position 0."
)


def _bag_rules(weight, indices, offsets, *rest, **named):
  count = indices.shape[0]
  yield Range(indices, 0, weight.shape[0], RuntimeError, _NO_ROW)
  yield Condition(offsets, lambda starts: starts[:1] != 0, RuntimeError, _LATE_START)
  yield Range(offsets, 0, count + 1, RuntimeError, _NO_START)
  yield Condition(
    offsets,
    lambda starts: starts[1:] < starts[:-1],
    RuntimeError,
    "embedding_bag expects offsets in ascending order.",
  )


def _are_starts(offsets, count) -> jax.Array:
  """Return True if the offsets start at 0, ascend and are at most `count`."""
  return (
    jnp.all(offsets[:1] == 0)
    & jnp.all(offsets[1:] >= offsets[:-1])
    & jnp.all(offsets <= count)
  )


@op(aten._embedding_bag, aten._embedding_bag_forward_only, rules=_bag_rules, **_PADDING)
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
  """Return output, bag of each index, bag sizes, and maximum rows (mode max)."""
  num_bags = offsets.shape[0] - (1 if include_last_offset else 0)
  # Offsets are the starts of the bags.
  positions = jnp.arange(indices.shape[0], dtype=offsets.dtype)
  bags = jnp.searchsorted(offsets[:num_bags], positions, side="right") - 1
  bags = bags.astype(indices.dtype)
  member = _is_used(indices, padding_idx)
  sizes = jax.ops.segment_sum(member.astype(indices.dtype), bags, num_bags)
  rows = widen(_rows(weight, indices))
  # Rows of the padding are masked below; invalid offsets make all others NaN.
  rows = out_of_range.fill_invalid(rows, ~_are_starts(offsets, indices.shape[0]))
  if mode == BagMode.MAX:
    output, maximum = _bag_maximum(rows, member, bags, num_bags, indices)
    return output.astype(weight.dtype), bags, sizes, maximum
  if per_sample_weights is not None:
    rows = rows * widen(per_sample_weights)[:, None]
  output = jax.ops.segment_sum(jnp.where(member[:, None], rows, 0), bags, num_bags)
  if mode == BagMode.MEAN:
    output = output / jnp.maximum(sizes, 1)[:, None]
  return output.astype(weight.dtype), bags, sizes, jnp.zeros_like(sizes)


@op(aten._embedding_bag_dense_backward, **_PADDING)
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
  if mode == BagMode.MAX:
    columns = jnp.arange(grad.shape[1])
    addend = jnp.where((bag_size > 0)[:, None], widen(grad), 0)
    table = jnp.zeros((num_weights, grad.shape[1]), addend.dtype)
    return table.at[maximum_indices, columns].add(addend).astype(grad.dtype)
  rows = widen(grad)[offset2bag]
  if mode == BagMode.MEAN:
    rows = rows / jnp.maximum(bag_size, 1)[offset2bag][:, None]
  if per_sample_weights is not None:
    rows = rows * widen(per_sample_weights)[:, None]
  table = _add_rows(rows, indices, num_weights, scale_grad_by_freq, padding_idx)
  return table.astype(grad.dtype)


@op(aten._embedding_bag_backward, **_PADDING)
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
  return _aten__embedding_bag_dense_backward(
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


@op(aten._embedding_bag_per_sample_weights_backward, **_PADDING)
def _aten__embedding_bag_per_sample_weights_backward(
  grad, weight, indices, offsets, offset2bag, mode, padding_idx=-1
):
  rows = widen(_rows(weight, indices))
  products = jnp.sum(widen(grad)[offset2bag] * rows, axis=1)
  return jnp.where(_is_used(indices, padding_idx), products, 0).astype(grad.dtype)
