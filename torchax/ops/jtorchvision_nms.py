"""Non-maximum suppression: `torchvision.ops.nms`, for jax tensors and for arrays.

The lowering is registered by name, so torchvision may be missing or imported later.
Boxes are rows (x1, y1, x2, y2) with x1 <= x2 and y1 <= y2.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torchax.errors import TracedStateError
from torchax.ops.builtin import op
from torchax.ops.promotion import int64


def _areas(boxes: jax.Array) -> jax.Array:
  return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def _overlaps(box: jax.Array, boxes: jax.Array) -> jax.Array:
  """Return the intersection over union of a box (4,) with others (n, 4).

  It is NaN for two boxes without area.
  """
  low = jnp.maximum(box[:2], boxes[:, :2])
  high = jnp.minimum(box[2:], boxes[:, 2:])
  common = jnp.prod(jnp.maximum(high - low, 0), axis=-1)
  return common / (_areas(box) + _areas(boxes) - common)


def _keep_mask(boxes: jax.Array, count, iou_threshold) -> jax.Array:
  """Return the mask (n,) of boxes to keep, among boxes (n, 4) sorted best first.

  A kept box suppresses every later one that overlaps it too much. Rows from `count`
  on are padding.
  """
  positions = jnp.arange(len(boxes))

  def suppress(position, is_kept):
    too_near = _overlaps(boxes[position], boxes) > iou_threshold
    return is_kept & ~(is_kept[position] & too_near & (positions > position))

  return lax.fori_loop(0, count, suppress, positions < count)


@jax.jit
def _select(boxes, scores, count, iou_threshold):
  """Return the order of the boxes, best first, and the mask of kept boxes in it."""
  # Equal scores keep their order; padding comes last.
  is_real = jnp.arange(len(scores)) < count
  order = jnp.lexsort((jnp.where(is_real, -scores, 0), ~is_real))
  return order, _keep_mask(boxes[order], count, iou_threshold)


def _require_shapes(boxes, scores) -> None:
  if boxes.ndim != 2 or boxes.shape[1] != 4:
    raise RuntimeError(f"boxes should have shape (n, 4), got {tuple(boxes.shape)}.")
  if scores.shape != boxes.shape[:1]:
    raise RuntimeError(
      f"scores should have one number for each of the {len(boxes)} boxes, got the "
      f"shape {tuple(scores.shape)}."
    )


@op("torchvision::nms", compiled=False)
def nms(boxes, scores, iou_threshold):
  """Return the indices of the boxes that no better box overlaps too much, best first.

  The number of boxes is padded to a power of two, so that few programs are compiled.

  Args:
    boxes: floats of shape (n, 4).
    scores: floats of shape (n,).
    iou_threshold: a box is dropped where its intersection over union with a better
      one is greater.

  Returns:
    An int64 array (narrowed without x64) of shape (kept,).

  Raises:
    RuntimeError: the shapes differ from these.
    TracedStateError: called inside a compiled function, where the length of the
      result is unknown; use `non_max_suppression_padded` there.

  References:
    https://docs.pytorch.org/vision/stable/generated/torchvision.ops.nms.html
  """
  _require_shapes(boxes, scores)
  if isinstance(boxes, jax.core.Tracer) or isinstance(scores, jax.core.Tracer):
    raise TracedStateError(
      "The length of nms depends on the numbers of its boxes, so it cannot run inside "
      "a compiled function. Call it outside, or use "
      "torchax.ops.jtorchvision_nms.non_max_suppression_padded."
    )
  count = len(boxes)
  fill = (1 << max(count - 1, 0).bit_length()) - count
  boxes = jnp.pad(boxes, ((0, fill), (0, 0)))
  order, is_kept = _select(boxes, jnp.pad(scores, (0, fill)), count, iou_threshold)
  chosen = np.asarray(order)[np.asarray(is_kept)]
  return jnp.asarray(chosen, int64())


def non_max_suppression_padded(scores, boxes, max_output_size, iou_threshold):
  """Run `nms` with a result of fixed size, as compiled functions need it.

  Args:
    scores: floats of shape (..., n).
    boxes: floats of shape (..., n, 4).
    max_output_size: largest number of indices to return, a Python integer.
    iou_threshold: as in `nms`.

  Returns:
    Indices of the kept boxes, best first, of shape (..., max_output_size) and padded
    with zeros; and the number of kept boxes, of shape (...).

  References:
    https://www.tensorflow.org/api_docs/python/tf/image/non_max_suppression_padded
  """
  if scores.ndim > 1:
    return jax.vmap(non_max_suppression_padded, in_axes=(0, 0, None, None))(
      scores, boxes, max_output_size, iou_threshold
    )
  _require_shapes(boxes, scores)
  order, is_kept = _select(boxes, scores, len(boxes), iou_threshold)
  (positions,) = jnp.nonzero(is_kept, size=max_output_size, fill_value=-1)
  indices = jnp.where(positions < 0, 0, order[positions])
  count = jnp.minimum(is_kept.sum(), max_output_size)
  return indices.astype(int64()), count
