"""Assertions of exported programs."""

import pytest
import torch

from torchax.interop import jax_jit

aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("env")


def test_matching_metadata_is_accepted():
  x = torch.ones(2, 3, device="jax")
  checked = aten._assert_tensor_metadata(x, [2, 3], None, torch.float32)
  assert checked is None
  aten._assert_tensor_metadata(torch.arange(3).to("jax"), [3], None, torch.int64)


@pytest.mark.parametrize(
  ("args", "message"),
  [
    (([3, 2],), "sizes mismatch"),
    ((None, None, torch.bfloat16), "dtype mismatch"),
  ],
)
def test_different_metadata_raises(args, message):
  x = torch.ones(2, 3)
  with pytest.raises(RuntimeError, match=message):
    aten._assert_tensor_metadata(x, *args)
  with pytest.raises(RuntimeError, match=message):
    aten._assert_tensor_metadata(x.to("jax"), *args)


def test_assert_scalar_raises_for_zero(env):
  run = env._get_op_or_decomp(aten._assert_scalar).func
  run(1, "not shown")
  with pytest.raises(RuntimeError, match="x > 0"):
    run(False, "x > 0")


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_assert_async_raises_for_zero(device):
  aten._assert_async(torch.ones(1, device=device))
  aten._assert_async(torch.tensor(2.0).to(device), "not shown")
  with pytest.raises(RuntimeError, match="single nonzero value"):
    aten._assert_async(torch.zeros(1, device=device))
  with pytest.raises(RuntimeError, match="x > 0"):
    aten._assert_async(torch.tensor(False).to(device), "x > 0")
  with pytest.raises(RuntimeError):
    aten._assert_async(torch.ones(2, device=device))


def test_assert_async_ignores_traced_elements(env):
  with env:
    x = torch.zeros(1, device="jax")
    assert torch.equal(jax_jit(_assert_and_double)(x), x)


def _assert_and_double(x):
  torch._assert_async(x)
  return x * 2
