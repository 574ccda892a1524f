"""The matrix exponential, of small and of large matrices."""

import jax
import pytest
import torch
from ops.harness import Case, check, floats

import torchax

BATCH = floats(3, 4, 4)
exp = torch.linalg.matrix_exp
SQUARED = {"rtol": 1e-5, "atol": 1e-5, "why": "each squaring doubles the rounding"}

CASES = (
  Case(exp, BATCH, grad=True),
  Case(exp, BATCH * torch.tensor([1e-3, 1.0, 8.0])[:, None, None], **SQUARED),
  Case(exp, torch.complex(BATCH, floats(3, 4, 4, seed=1))),
  Case(exp, torch.zeros(2, 0, 0)),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_gives_what_cpu_torch_gives(case):
  check(case)


def test_double_precision_is_kept():
  matrix = 3 * BATCH.double()
  with jax.enable_x64(True), torchax.default_env():
    actual = exp(matrix.to("jax")).cpu()
  torch.testing.assert_close(actual, exp(matrix), rtol=1e-13, atol=1e-13)
