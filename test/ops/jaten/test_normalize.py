"""Normalization layers, compared with CPU torch."""

import pytest
import torch
import torch.nn.functional as F
from ops.harness import Case, check, floats

SUMS = dict(atol=1e-5, rtol=1e-5, why="means of many terms, in another order")

ROWS, IMAGE = floats(3, 4, 6), floats(3, 4, 5, 2, low=-2.0, high=3.0)
WEIGHT, BIAS = floats(6, seed=1), floats(6, seed=2)
SCALE, SHIFT = floats(4, seed=1), floats(4, seed=2)
MEAN, VARIANCE = floats(4, seed=3), floats(4, seed=4, low=0.5, high=2.0)


def batch_norm(input, mean, variance, *args, **kwargs):
  """Also return the running statistics, which training changes in place."""
  mean, variance = mean.detach().clone(), variance.detach().clone()
  output = F.batch_norm(input, mean, variance, *args, **kwargs)
  return output, mean, variance


CASES = (
  Case(F.layer_norm, ROWS, (6,), WEIGHT, BIAS, grad=True, **SUMS),
  Case(F.layer_norm, ROWS, (6,), grad=True, **SUMS),
  Case(F.layer_norm, ROWS, (6,), WEIGHT, None, 0.1, grad=True, **SUMS),
  Case(F.layer_norm, ROWS, (4, 6), floats(4, 6), floats(4, 6), grad=True, **SUMS),
  Case(
    F.layer_norm,
    ROWS.bfloat16(),
    (6,),
    WEIGHT.bfloat16(),
    BIAS.bfloat16(),
    grad=True,
  ),
  Case(torch.native_layer_norm, ROWS, (6,), WEIGHT, BIAS, 1e-5, **SUMS),
  Case(torch._weight_norm, ROWS, floats(3, 1, 1), 0, grad=True, **SUMS),
  Case(torch._weight_norm, ROWS, floats(1, 1, 6), 2, grad=True, **SUMS),
  Case(F.rms_norm, ROWS, (6,), WEIGHT, grad=True, **SUMS),
  Case(F.rms_norm, ROWS, (4, 6), None, 1e-3, grad=True, **SUMS),
  Case(
    F.rms_norm,
    ROWS * 1e-3,
    (6,),
    grad=True,
    rtol=1e-5,
    atol=1e-4,
    why="differences of numbers of size 1000, one rounding of which is 6e-5",
  ),
  Case(F.rms_norm, ROWS.half(), (6,), WEIGHT.half(), grad=True),
  Case(F.group_norm, IMAGE, 2, SCALE, SHIFT, grad=True, **SUMS),
  Case(F.group_norm, IMAGE, 4, grad=True, **SUMS),
  Case(F.group_norm, IMAGE[:, :, 0, 0], 2, SCALE, grad=True, **SUMS),
  Case(
    F.group_norm,
    IMAGE.bfloat16(),
    2,
    SCALE.bfloat16(),
    SHIFT.bfloat16(),
    grad=True,
  ),
  Case(F.instance_norm, IMAGE, weight=SCALE, bias=SHIFT, grad=True, **SUMS),
  Case(batch_norm, IMAGE, MEAN, VARIANCE, SCALE, SHIFT, True, grad=True, **SUMS),
  Case(batch_norm, IMAGE, MEAN, VARIANCE, None, None, True, 0.3, grad=True, **SUMS),
  Case(batch_norm, IMAGE, MEAN, VARIANCE, SCALE, SHIFT, False, grad=True, **SUMS),
  Case(batch_norm, IMAGE[:, :, 0, 0], MEAN, VARIANCE, training=True, **SUMS),
  Case(F.batch_norm, IMAGE, None, None, SCALE, SHIFT, training=True, grad=True, **SUMS),
  Case(batch_norm, IMAGE.bfloat16(), MEAN, VARIANCE, SCALE, SHIFT, True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_normalize(case):
  check(case)


def test_a_wrong_normalized_shape_raises():
  with pytest.raises(RuntimeError, match="normalized_shape"):
    check(Case(F.layer_norm, ROWS, (5,)))
