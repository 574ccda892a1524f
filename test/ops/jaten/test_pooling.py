"""Pooling, compared with CPU torch."""

import jax
import pytest
import torch
import torch.nn.functional as F
from ops.harness import Case, check, floats, ints

import torchax
from torchax.ops import mappings
from torchax.ops.jaten import pooling

PLANE, VOLUME = floats(2, 3, 7, 8), floats(2, 2, 5, 6, 4)
TIES = ints(2, 2, 6, 6, high=3).float()


def unpool(function, pool, values, *args):
  pooled, indices = pool(values, *args, return_indices=True)
  return function(pooled, indices, *args, output_size=values.shape)


CASES = (
  *(
    Case(F.max_pool2d, values, *args, return_indices=True, grad=True, name="max_pool2d")
    for values, args in (
      (PLANE, (2,)),
      (PLANE[0], (2,)),
      (PLANE, (3, 2, 1)),
      (PLANE, ((3, 2), (2, 1), (1, 0), (1, 2))),
      (PLANE, (3, 2, 1, 1, True)),
      (PLANE, (2, 3, 1, 1, True)),
      (TIES, (3, 1, 1)),
      (PLANE.bfloat16(), (3, 2)),
      (torch.full((1, 1, 4, 4), -torch.inf), (3, 2, 1)),
    )
  ),
  Case(F.max_pool2d, ints(1, 2, 5, 5), 2, return_indices=True),
  Case(F.max_pool2d, PLANE[:0], 2),
  Case(F.max_pool2d, torch.tensor([[[[1.0, torch.nan], [3.0, 4.0]]]]), 2),
  Case(F.max_pool1d, floats(2, 3, 8), 3, 2, 1, grad=True),
  Case(F.max_pool3d, VOLUME, 2, return_indices=True, grad=True),
  Case(F.max_pool3d, VOLUME, 3, 2, 1, 1, True, return_indices=True, grad=True),
  *(
    Case(F.avg_pool2d, values, *args, grad=True)
    for values, args in (
      (PLANE, (2,)),
      (PLANE[0], (2,)),
      (PLANE, (3, 2, 1)),
      (PLANE, (3, 2, 1, True)),
      (PLANE, (3, 2, 1, True, False)),
      (PLANE, ((3, 2), (2, 1), (1, 0), False, False)),
      (PLANE, (2, 3, 1, True)),
      (PLANE, (2, 2, 0, False, True, 3)),
      (PLANE.bfloat16(), (3, 2, 1)),
      (PLANE.half(), (3, 2, 1)),
    )
  ),
  Case(F.avg_pool2d, ints(1, 2, 5, 5, low=-9), 2),
  Case(F.avg_pool1d, floats(2, 3, 9), 3, 2, 1, grad=True),
  Case(F.avg_pool1d, floats(2, 3, 8), 3, 2, 1, True, False, grad=True),
  Case(F.avg_pool3d, VOLUME, 2, grad=True),
  Case(F.avg_pool3d, VOLUME, (3, 2, 2), 2, 1, True, False, grad=True),
  *(
    Case(F.adaptive_avg_pool2d, values, size, grad=True)
    for values, size in (
      (PLANE, (1, 1)),
      (PLANE, (7, 4)),
      (PLANE, (3, 5)),
      (PLANE[0], (9, 3)),
      (PLANE.bfloat16(), (3, 4)),
      (PLANE, (None, 3)),
    )
  ),
  Case(F.adaptive_avg_pool1d, floats(2, 3, 7), 3, grad=True),
  Case(F.adaptive_avg_pool3d, VOLUME, (2, 3, 3), grad=True),
  Case(F.adaptive_avg_pool3d, VOLUME, (1, 1, 1), grad=True),
  *(
    Case(
      F.adaptive_max_pool2d,
      values,
      size,
      return_indices=True,
      grad=True,
      name="adaptive_max_pool2d",
    )
    for values, size in ((PLANE, (7, 4)), (PLANE, (3, 5)), (TIES, (4, 2)))
  ),
  Case(F.adaptive_max_pool1d, floats(2, 3, 7), 3, grad=True),
  Case(F.adaptive_max_pool3d, VOLUME, (2, 3, 3), return_indices=True, grad=True),
  Case(unpool, F.max_unpool2d, F.max_pool2d, PLANE, 2, 2, grad=True),
  Case(unpool, F.max_unpool3d, F.max_pool3d, VOLUME, 2, 2, grad=True),
  Case(unpool, F.max_unpool1d, F.max_pool1d, floats(2, 3, 8), 2, 2),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pooling(case):
  check(case)


def test_gradients_of_tied_maxima_equal_torch():
  leaf = TIES.clone().requires_grad_()
  F.max_pool2d(leaf, 3, 1, 1).sum().backward()

  def total(array):
    values, _ = pooling._aten_max_pool2d_with_indices(array, (3, 3), (1, 1), (1, 1))
    return values.sum()

  gradient = jax.grad(total)(mappings.t2j(TIES))
  torch.testing.assert_close(mappings.j2t(gradient), leaf.grad)


@pytest.mark.parametrize(
  "function, args",
  (
    (F.max_pool2d, (3, 2, 2)),
    (F.max_pool2d, (9, 1)),
    (F.avg_pool2d, (3, 2, 2)),
    (F.avg_pool2d, (9, 1)),
  ),
  ids=("max padding", "max size", "average padding", "average size"),
)
def test_invalid_windows_raise(function, args):
  message = "pad should be|too small"
  with pytest.raises(RuntimeError, match=message):
    function(PLANE, *args)
  with torchax.default_env():
    plane = PLANE.to("jax")
    with pytest.raises(RuntimeError, match=message):
      function(plane, *args)


@pytest.mark.parametrize("stride", (0, (1, -1, 1)))
def test_unpooling_raises_for_strides_below_one(stride):
  pooled, indices = F.max_pool3d(VOLUME, 2, return_indices=True)
  for device in ("cpu", "jax"):
    with torchax.default_env(), pytest.raises(RuntimeError, match="greater than zero"):
      F.max_unpool3d(pooled.to(device), indices.to(device), 2, stride)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_adaptive_max_pool_without_channels_is_empty(rank):
  function = getattr(torch.nn.functional, f"adaptive_max_pool{rank}d")
  with torchax.default_env():
    for shape in ((0, *(4,) * rank), (0, 2, *(4,) * rank)):
      expected = function(torch.ones(shape, device="cpu"), 2)
      assert function(torch.ones(shape, device="jax"), 2).shape == expected.shape
    with pytest.raises(RuntimeError, match="non-zero size"):
      function(torch.ones(2, 0, *(4,) * rank, device="jax"), 2)
