"""The tensor that tests of this folder compile, convert and differentiate."""

import pytest
from ops.harness import floats

from torchax.tensor import Tensor


@pytest.fixture
def x() -> Tensor:
  return floats(3, 4).to("jax")
