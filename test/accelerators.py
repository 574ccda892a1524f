"""Differences between devices that tests take into account."""

import jax
import pytest

ON_CPU = jax.default_backend() == "cpu"


def cpu_only(reason: str) -> pytest.MarkDecorator:
  """Skip a test of something that torchax does only on CPU devices."""
  return pytest.mark.skipif(not ON_CPU, reason=reason)
