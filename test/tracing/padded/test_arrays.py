"""Padding of arguments and cropping of results, by numpy and on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from torchax.tracing.padded import arrays
from torchax.tracing.padded.arrays import crop, pad


@pytest.fixture(params=["numpy", "device"])
def where(request, monkeypatch):
  if request.param == "device":
    monkeypatch.setattr(arrays, "_is_on_host", lambda array: False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_pad_appends_zeros_and_crop_removes_them(where, dtype):
  array = jnp.arange(6).reshape(2, 3).astype(dtype)
  padded = pad(array, (4, 3))
  assert padded.dtype == array.dtype and padded.shape == (4, 3)
  assert np.array_equal(padded[2:], np.zeros((2, 3), array.dtype))
  assert np.array_equal(crop(padded, (2, 3)), array)


def test_committed_array_stays_on_its_device(where):
  device = jax.devices()[0]
  padded = pad(jax.device_put(jnp.ones(3), device), (4,))
  assert padded.committed and crop(padded, (2,)).committed
  assert not pad(jnp.ones(3), (4,)).committed
