"""Non-maximum suppression, compared with a loop over sorted boxes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ops.harness import floats

import torchax
from torchax.errors import TracedStateError
from torchax.interop import jax_jit
from torchax.ops import jtorchvision_nms, mappings


@pytest.fixture(scope="module", autouse=True)
def torchvision_nms():
  """Import torchvision's operator, or define its schema without torchvision."""
  if hasattr(torch.ops.torchvision, "nms"):
    yield
    return
  library = torch.library.Library("torchvision", "FRAGMENT")
  library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
  yield
  library._destroy()


def boxes_and_scores(count, dtype=torch.float32, ties=False):
  corners = floats(count, 2, seed=count, low=0, high=10)
  sizes = floats(count, 2, seed=count + 1, low=1, high=6)
  scores = floats(count, seed=count + 2)
  if ties:
    scores = (scores * 3).round()
  return torch.cat([corners, corners + sizes], dim=1).to(dtype), scores.to(dtype)


def overlap(a, b) -> float:
  width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
  height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
  areas = [(x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in (a, b)]
  union = sum(areas) - width * height
  return width * height / union if union else 0.0


def expected(boxes, scores, threshold) -> list[int]:
  boxes = boxes.double().tolist()
  order = torch.sort(scores, descending=True, stable=True).indices.tolist()
  kept: list[int] = []
  for candidate in order:
    if all(overlap(boxes[k], boxes[candidate]) <= threshold for k in kept):
      kept.append(candidate)
  return kept


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.3, 1.0])
@pytest.mark.parametrize(
  ("count", "ties"), [(1, False), (7, False), (30, True), (100, False), (128, False)]
)
def test_boxes_are_kept_in_order_of_their_scores(count, ties, threshold):
  boxes, scores = boxes_and_scores(count, ties=ties)
  kept = torch.ops.torchvision.nms(boxes.to("jax"), scores.to("jax"), threshold)
  wanted = expected(boxes, scores, threshold)
  assert kept.tolist() == wanted
  assert kept.dtype == mappings.j2t_dtype(mappings.t2j_dtype(torch.int64))
  assert threshold == 1.0 or count < 30 or len(wanted) < count


def test_empty_input_gives_no_indices():
  kept = torch.ops.torchvision.nms(
    torch.zeros(0, 4, device="jax"), torch.zeros(0, device="jax"), 0.5
  )
  assert kept.tolist() == []


def test_boxes_without_area_suppress_nothing():
  boxes = torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 2, 2]]).to("jax")
  scores = torch.tensor([0.1, 0.2, 0.3]).to("jax")
  assert torch.ops.torchvision.nms(boxes, scores, 0.1).tolist() == [2, 1, 0]


def test_arrays_are_accepted_without_torchvision():
  boxes, scores = boxes_and_scores(20)
  kept = jtorchvision_nms.nms(jnp.array(boxes), jnp.array(scores), 0.4)
  assert isinstance(kept, jax.Array) and kept.tolist() == expected(boxes, scores, 0.4)


def test_similar_numbers_of_boxes_share_a_program():
  select = jtorchvision_nms._select
  select.clear_cache()
  for count in range(33, 50):
    boxes, scores = boxes_and_scores(count)
    jtorchvision_nms.nms(jnp.array(boxes), jnp.array(scores), 0.5)
  assert select._cache_size() == 1


@pytest.mark.parametrize("size", [3, 40])
def test_padded_nms_runs_inside_jax_jit(size):
  batches = [boxes_and_scores(30, ties=ties) for ties in (False, True)]
  boxes, scores = (jnp.stack([jnp.array(b[n]) for b in batches]) for n in (0, 1))
  padded = jax.jit(jtorchvision_nms.non_max_suppression_padded, static_argnums=2)
  indices, counts = padded(scores, boxes, size, 0.3)
  assert indices.shape == (2, size)
  for row, batch in enumerate(batches):
    wanted = expected(*batch, 0.3)[:size]
    assert int(counts[row]) == len(wanted)
    np.testing.assert_array_equal(indices[row], wanted + [0] * (size - len(wanted)))


def test_nms_raises_inside_a_compiled_function():
  boxes, scores = (t.to("jax") for t in boxes_and_scores(5))
  with torchax.default_env(), pytest.raises(TracedStateError, match="length of nms"):
    jax_jit(lambda b, s: torch.ops.torchvision.nms(b, s, 0.5))(boxes, scores)


@pytest.mark.parametrize(
  ("boxes", "scores", "message"),
  [
    (torch.ones(3), torch.ones(3), r"boxes should have shape \(n, 4\), got \(3,\)"),
    (torch.ones(3, 5), torch.ones(3), r"got \(3, 5\)"),
    (torch.ones(3, 4), torch.ones(2), r"one number for each of the 3 boxes, got"),
  ],
)
def test_invalid_shapes_raise(boxes, scores, message):
  with pytest.raises(RuntimeError, match=message):
    torch.ops.torchvision.nms(boxes.to("jax"), scores.to("jax"), 0.5)
