"""`flex_attention`: attention with a function of scores and a mask of blocks.

torch's functions take one score and four indices. `jax.vmap` runs them on a block of
scores, so that a look-up by one index stays one along that dimension. Blocks that the
mask hides are skipped, see `_blockwise_attention.py`. `graphs/higher_order.py` calls
this module for torch's operator.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from torchax.ops.builtin import op
from torchax.ops.jaten import _blockwise_attention as blockwise


def attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  blocks: Sequence[jax.Array | None],
  score_operands: Sequence[jax.Array],
  mask_operands: Sequence[jax.Array],
  scale: float | jax.Array,
  *,
  score_mod: Callable[..., jax.Array],
  mask_mod: Callable[..., jax.Array],
  block_size: tuple[int, int],
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Compute `torch.nn.attention.flex_attention.flex_attention`.

  Args:
    query: (b, heads, l, e).
    key, value: (b or 1, key heads, s, e) and (b or 1, key heads, s, v).
    blocks: `kv_num_blocks` (b or 1, heads or 1, row blocks) and `kv_indices` (…, key
      blocks) of a `BlockMask`, the same two of its full blocks; those may be None.
    score_operands, mask_operands: further arguments of the functions, arrays and
      numbers.
    scale: factor of the scores, before `score_mod`.
    score_mod: `(score, b, head, row, column, *score_operands) -> score`, of 0-d arrays.
    mask_mod: `(b, head, row, column, *mask_operands) -> bool`; applies inside of
      blocks that are not full.
    block_size: rows and columns of a block of the mask.

  Returns:
    Attention (b, heads, l, v), then logsumexp and maximum of each row's scores
    (b, heads, l), both divided by ln 2 as torch's kernels return them.
  """
  batch, heads, rows = query.shape[:3]
  key, value = (
    jnp.broadcast_to(t, (batch, *t.shape[1:])).astype(query.dtype) for t in (key, value)
  )
  partial = _dense_blocks(*blocks[:2])
  full = jnp.zeros_like(partial) if blocks[2] is None else _dense_blocks(*blocks[2:])
  step, visible = _steps(partial | full, block_size, (rows, key.shape[2]))
  has_blocks = visible.size > 1

  def modify(scores, rows, columns, operands):
    score_operands, mask_operands, partial, full = operands
    indices = jnp.arange(batch), jnp.arange(heads), rows, columns
    scores = _over_indices(score_mod, 1)(scores, *indices, *score_operands)
    seen = _over_indices(mask_mod, 0)(*indices, *mask_operands)
    at = (..., (rows // block_size[0])[:, None], columns // block_size[1])
    return jnp.where(seen & partial[at] | full[at], scores, -jnp.inf)

  output, *statistics = blockwise.modified_attention(
    query,
    key,
    value,
    modify,
    jax.tree.map(jnp.asarray, (score_operands, mask_operands, partial, full)),
    scale,
    step[0] if has_blocks else None,
    visible if has_blocks else None,
    step[1] if has_blocks else blockwise.BLOCK,
  )
  return output, *(s / math.log(2) for s in statistics)


def _over_indices(function: Callable, scores: int) -> Callable:
  """Map a function over batch, head, row and column, innermost last.

  Args:
    function: `(*scores, b, head, row, column, *operands) -> result`, of 0-d arrays.
    scores: number of leading arguments that have all four dimensions.
  """

  def mapped(*args):
    over = function
    for dim in reversed(range(4)):
      axes = [0 if n == dim else None for n in range(4)]
      rest = len(args) - scores - 4
      over = jax.vmap(over, ([*[0] * scores, *axes, *[None] * rest]))
    return over(*args)

  return mapped


def _dense_blocks(counts, indices) -> jax.Array:
  """Return the listed blocks (…, row blocks, key blocks) as a bool array."""
  number = indices.shape[-1]
  indices = jnp.where(jnp.arange(number) < counts[..., None], indices, number)
  none = jnp.zeros((*indices.shape[:-1], number), bool)
  return jnp.put_along_axis(none, indices, True, axis=-1, inplace=False, mode="drop")


def _steps(listed, block_size, lengths) -> tuple[list[int], jax.Array]:
  """Return the sizes of the blocks to compute, and which of them are visible.

  Small blocks of the mask are computed together.
  """
  visible = jnp.any(listed, axis=(0, 1))
  steps = []
  for axis, (size, length) in enumerate(zip(block_size, lengths)):
    together = max(1, blockwise.BLOCK // size)
    if size * together >= length:
      visible, step = jnp.any(visible, axis, keepdims=True), length
    else:
      step = size * together
      padding = [(0, 0), (0, 0)]
      padding[axis] = (0, -visible.shape[axis] % together)
      visible = jnp.pad(visible, padding)
      shape = [*visible.shape[:axis], -1, together, *visible.shape[axis + 1 :]]
      visible = jnp.any(visible.reshape(shape), axis + 1)
    steps.append(step)
  return steps, visible


@op("flex_lib::zeros_and_scatter")
def _zeros_and_scatter(shape, indices, vals):
  """Return the gradient of an array that torch's unfused form indexes."""
  return jnp.zeros(shape, vals.dtype).at[tuple(indices)].add(vals)
