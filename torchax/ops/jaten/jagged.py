"""Jagged and padded forms of sequences: operations of torch's jagged nested tensors.

Sequence i of `values` has the rows from `offsets[0][i]` to `offsets[0][i + 1]`. torch
keeps `offsets` in a list, which has one entry for one ragged dimension.
"""

import jax.numpy as jnp

from torchax.ops.builtin import op
from torchax.registry.names import aten


def _only(offsets):
  if len(offsets) != 1:
    raise NotImplementedError(
      f"Jagged tensors expect one ragged dimension, but got {len(offsets)}. Pad the "
      "other ones."
    )
  return offsets[0]


@op(aten._jagged_to_padded_dense_forward)
def _aten__jagged_to_padded_dense_forward(
  values, offsets, max_lengths, padding_value=0.0
):
  """Pad to (sequences, max_lengths[0], …); longer sequences are cut."""
  offsets = _only(offsets)
  rows = offsets[:-1, None] + jnp.arange(max_lengths[0])
  is_row = rows < offsets[1:, None]
  is_row = is_row.reshape(is_row.shape + (1,) * (values.ndim - 1))
  filler = jnp.asarray(padding_value, values.dtype)
  if not values.shape[0]:
    return jnp.full((*rows.shape, *values.shape[1:]), filler)
  return jnp.where(is_row, values.at[rows].get(mode="clip"), filler)


@op(aten._padded_dense_to_jagged_forward)
def _aten__padded_dense_to_jagged_forward(dense, offsets, total_L):
  """Return the `total_L` rows of all sequences; 0 beyond the end of `dense`."""
  offsets = _only(offsets)
  rows = jnp.arange(total_L)
  sequence = jnp.searchsorted(offsets, rows, side="right") - 1
  position = rows - offsets[sequence]
  return dense.at[sequence, position].get(mode="fill", fill_value=0)
