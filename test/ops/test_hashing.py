"""Hashes of tensors against CPU torch."""

import jax
import pytest
import torch
from ops.harness import floats, ints

import torchax

FLOATS = floats(3, 4)
INTS = ints(3, 4, low=-9)


@pytest.mark.parametrize("values", [FLOATS, FLOATS.bfloat16(), FLOATS.double(), INTS])
@pytest.mark.parametrize("dims", [{}, {"dim": 1}, {"dim": (-1,), "keepdim": True}])
def test_it_gives_what_cpu_torch_gives(values, dims):
  with jax.enable_x64(True), torchax.default_env():
    actual = torch.hash_tensor(values.to("jax"), **dims).cpu()
  expected = torch.hash_tensor(values, **dims)
  assert actual.dtype == expected.dtype == torch.uint64
  assert actual.shape == expected.shape
  assert actual.tolist() == expected.tolist()


def test_integers_have_the_lower_half_without_x64():
  with torchax.default_env():
    actual = torch.hash_tensor(INTS.to("jax")).item()
  assert actual == torch.hash_tensor(INTS).item() % 2**32


def test_the_bits_of_floats_need_x64():
  with torchax.default_env(), pytest.raises(RuntimeError, match="x64"):
    torch.hash_tensor(FLOATS.to("jax"))


@pytest.mark.parametrize(
  "error, values, dims",
  [(RuntimeError, INTS[:0], {}), (IndexError, INTS[:0], {"dim": 0})],
)
def test_nothing_has_no_hash(error, values, dims):
  with torchax.default_env(), pytest.raises(error):
    torch.hash_tensor(values.to("jax"), **dims)
