"""Fixtures of padded programs: an environment, and padding that shows in results."""

import jax
import numpy as np
import pytest

import torchax
from torchax.tracing.padded import arrays, bucketed


@pytest.fixture(autouse=True)
def env():
  with torchax.default_env() as environment:
    yield environment


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
  """Fill the padding of arguments with NaN, or a large integer."""

  def pad(array, shape):
    values = np.asarray(array)
    is_float = np.issubdtype(values.dtype, np.floating)
    whole = np.full(shape, np.nan if is_float else 10**6, values.dtype)
    whole[tuple(map(slice, values.shape))] = values
    return jax.device_put(whole)

  monkeypatch.setattr(bucketed, "pad", pad)
  monkeypatch.setattr(arrays, "pad", pad)
