"""Resizing, through `torch.nn.functional`."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from ops.harness import Case, check, floats, ints

import torchax
from torchax.ops import jax_reimplement, jimage

LINE, PLANE, SPACE = floats(2, 3, 7), floats(1, 2, 7, 6), floats(1, 2, 4, 5, 3)
BYTES = ints(1, 2, 6, 7, high=256, dtype=torch.uint8)


def resized(image, mode, size=None, *, grad=True, **kwargs):
  name = f"{mode}-{size}-{kwargs}"
  return Case(F.interpolate, image, size, mode=mode, grad=grad, name=name, **kwargs)


NEAREST = (
  resized(LINE, "nearest", 5),
  resized(PLANE, "nearest", (14, 12)),
  resized(PLANE, "nearest", (5, 9)),
  resized(SPACE, "nearest", (8, 5, 4)),
  resized(PLANE, "nearest-exact", (5, 9)),
  resized(PLANE, "nearest", scale_factor=2),
  resized(PLANE, "nearest", scale_factor=(0.6, 1.7), grad=False),
  resized(BYTES, "nearest", (4, 9), grad=False),
)
LINEAR = (
  resized(LINE, "linear", 5),
  resized(PLANE, "bilinear", (5, 9)),
  resized(PLANE, "bilinear", (5, 9), align_corners=True),
  resized(PLANE, "bilinear", (1, 6), align_corners=True),
  resized(PLANE, "bilinear", scale_factor=1.7),
  resized(SPACE, "trilinear", (6, 3, 3)),
  resized(PLANE, "bicubic", (5, 9)),
  resized(PLANE, "bicubic", (5, 9), align_corners=True),
  resized(PLANE.bfloat16(), "bilinear", (5, 9)),
)
ANTIALIASED = (
  resized(PLANE, "bilinear", (3, 9), antialias=True),
  resized(PLANE, "bicubic", (3, 9), antialias=True),
  resized(PLANE, "bicubic", (3, 9), antialias=True, align_corners=True),
)


@pytest.mark.parametrize("case", (*NEAREST, *LINEAR, *ANTIALIASED), ids=str)
def test_resize(case):
  check(case)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_inference_mode_resizes_by_factors(mode):
  expected = F.interpolate(PLANE, scale_factor=1.6, mode=mode)
  with torchax.default_env(), torch.inference_mode():
    actual = F.interpolate(PLANE.to("jax"), scale_factor=1.6, mode=mode)
  torch.testing.assert_close(actual.cpu(), expected)


def test_bytes_are_rounded():
  expected = F.interpolate(BYTES, (4, 9), mode="bilinear")
  with torchax.default_env():
    actual = F.interpolate(BYTES.to("jax"), (4, 9), mode="bilinear")
  difference = actual.cpu().int() - expected.int()
  assert actual.dtype == torch.uint8 and difference.abs().max() <= 1


@pytest.mark.parametrize("align_corners", [False, True])
def test_bicubic_helper_is_torch_bicubic(align_corners):
  array = jnp.asarray(PLANE.numpy())
  actual = jimage.interpolate_bicubic_no_aa(array, 5, 9, align_corners)
  expected = F.interpolate(PLANE, (5, 9), mode="bicubic", align_corners=align_corners)
  torch.testing.assert_close(torch.tensor(actual.tolist()), expected)


def test_weights_of_an_output_element_sum_to_one():
  for antialias in (False, True):
    weights = jax_reimplement.compute_weight_mat(
      6, 4, 4 / 6, 0.0, jimage.triangle_kernel, antialias
    )
    assert weights.shape == (6, 4)
    assert abs(weights.sum(0) - 1).max() < 1e-6


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_double_precision_is_kept(mode):
  image = PLANE.double()
  expected = F.interpolate(image, (5, 9), mode=mode)
  with jax.enable_x64(True), torchax.default_env():
    actual = F.interpolate(image.to("jax"), (5, 9), mode=mode).cpu()
  torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
