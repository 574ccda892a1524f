"""Convolutions against CPU torch."""

import pytest
import torch.nn.functional as F
from ops.harness import Case, check, floats

SUMS = dict(atol=1e-5, rtol=1e-5, why="sums of many products, in another order")
GRADIENTS = dict(SUMS, grad=True)

IMAGE, KERNELS, BIAS = floats(2, 4, 7, 6), floats(6, 4, 3, 2, seed=1), floats(6, seed=2)
GROUPED = floats(6, 2, 3, 2, seed=1)
TRANSPOSED = floats(4, 3, 3, 2, seed=1)
VOLUMES = floats(2, 4, 5, 4, 6)

CASES = (
  Case(F.conv2d, IMAGE, KERNELS, BIAS, grad=True, **SUMS),
  Case(F.conv2d, IMAGE, KERNELS, grad=True, **SUMS),
  Case(F.conv2d, IMAGE, KERNELS, None, (2, 1), (1, 2), grad=True, **SUMS),
  Case(F.conv2d, IMAGE, KERNELS, None, 2, 2, 2, grad=True, **SUMS),
  Case(F.conv2d, IMAGE, GROUPED, BIAS, 1, 1, 1, 2, grad=True, **SUMS),
  Case(F.conv2d, IMAGE[0], KERNELS, BIAS, grad=True, **SUMS),
  Case(F.conv_tbc, floats(5, 2, 3), floats(2, 3, 4, seed=1), floats(4), 1, **GRADIENTS),
  Case(F.conv2d, IMAGE, KERNELS, BIAS, padding="same", grad=True, **SUMS),
  Case(F.conv2d, IMAGE, KERNELS, BIAS, padding="valid", **SUMS),
  Case(F.conv2d, IMAGE[:0], KERNELS, BIAS, **SUMS),
  Case(F.conv2d, IMAGE, floats(4, 1, 3, 3), None, 1, 1, 1, 4, grad=True, **SUMS),
  Case(F.conv2d, IMAGE, floats(8, 1, 3, 2), None, (2, 1), 1, (1, 2), 4, **GRADIENTS),
  Case(F.conv2d, floats(1, 9, 12, 12), floats(9, 1, 9, 9), groups=9, **GRADIENTS),
  Case(F.conv1d, floats(2, 20, 9), floats(10, 2, 3), None, 2, 1, 1, 10, **GRADIENTS),
  Case(F.conv1d, floats(2, 3, 9), floats(4, 3, 3, seed=1), grad=True, **SUMS),
  Case(
    F.conv3d,
    floats(2, 3, 5, 4, 6),
    floats(4, 3, 2, 3, 2, seed=1),
    floats(4, seed=2),
    (1, 2, 1),
    (0, 1, 1),
    grad=True,
    **SUMS,
  ),
  Case(F.conv_transpose2d, IMAGE, TRANSPOSED, floats(3), grad=True, **SUMS),
  Case(
    F.conv_transpose2d,
    IMAGE,
    TRANSPOSED,
    floats(6),
    (3, 2),
    (1, 2),
    (2, 1),
    2,
    (1, 2),
    grad=True,
    **SUMS,
  ),
  Case(F.conv_transpose2d, IMAGE, floats(4, 2, 3, 3), None, 2, 1, 1, 4, **GRADIENTS),
  Case(
    F.conv_transpose1d,
    floats(2, 20, 5),
    floats(20, 1, 3),
    stride=1,
    output_padding=1,
    groups=10,
    dilation=2,
    **GRADIENTS,
  ),
  Case(F.conv_transpose1d, floats(2, 3, 5), floats(3, 4, 3), stride=2, **SUMS),
  Case(F.conv_transpose3d, floats(1, 2, 3, 3, 3), floats(2, 2, 2, 2, 2), **SUMS),
  Case(F.conv3d, VOLUMES, floats(4, 2, 2, 3, 1), None, 2, 1, (2, 1, 2), 2, **GRADIENTS),
  Case(F.conv3d, VOLUMES[:0], floats(3, 4, 2, 2, 2), stride=2, **SUMS),
  Case(F.conv_transpose3d, VOLUMES, floats(4, 3, 2, 3, 2), None, 2, 1, **GRADIENTS),
  Case(
    F.conv_transpose3d,
    VOLUMES,
    floats(4, 2, 2, 1, 2),
    stride=(1, 2, 1),
    output_padding=(1, 2, 0),
    groups=2,
    dilation=(3, 3, 1),
    **GRADIENTS,
  ),
  # Strides whose product is over 4: the program omits the zeros of a dilated input.
  Case(F.conv_transpose2d, IMAGE, floats(4, 3, 4, 4), stride=4, **GRADIENTS),
  Case(
    F.conv_transpose2d,
    IMAGE,
    floats(4, 3, 5, 2),
    stride=(2, 3),
    padding=(3, 1),
    output_padding=(1, 2),
    groups=2,
    **GRADIENTS,
  ),
  Case(F.conv_transpose2d, IMAGE[:0], floats(4, 3, 4, 4), stride=4, **GRADIENTS),
  Case(F.conv_transpose1d, floats(2, 3, 5), floats(3, 2, 16), None, 8, 4, **GRADIENTS),
  Case(F.conv2d, floats(2, 3, 16, 17), floats(4, 3, 5, 6), stride=5, **GRADIENTS),
  Case(
    F.conv2d,
    IMAGE.bfloat16(),
    KERNELS.bfloat16(),
    BIAS.bfloat16(),
    grad=True,
  ),
  Case(F.conv2d, IMAGE.bfloat16(), floats(4, 1, 3, 3).bfloat16(), groups=4, grad=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolution(case):
  check(case)
