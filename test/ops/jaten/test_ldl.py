"""LDL factors, pivots and solutions against LAPACK."""

import jax
import pytest
import torch
from ops.harness import Case, check, floats

import torchax

N = 5
SQUARE = floats(3, N, N)
SYMMETRIC = SQUARE + SQUARE.mT
# With a zero diagonal every pivot is a 2x2 block.
HOLLOW = SYMMETRIC - SYMMETRIC.diagonal(dim1=-2, dim2=-1).diag_embed()
COMPLEX = torch.complex(SQUARE, floats(3, N, N, seed=1))
HERMITIAN = COMPLEX + COMPLEX.mH
RIGHT = floats(3, N, 2, seed=2)
LOOSE = {"rtol": 2e-4, "atol": 2e-4, "why": "sums of products in another order"}


def solve(A, B, hermitian=False):
  LD, pivots = torch.linalg.ldl_factor(A, hermitian=hermitian)
  return torch.linalg.ldl_solve(LD, pivots, B, hermitian=hermitian)


factor = torch.linalg.ldl_factor_ex
CASES = (
  Case(factor, SYMMETRIC, **LOOSE),
  Case(factor, HOLLOW, **LOOSE),
  Case(factor, HERMITIAN, hermitian=True, **LOOSE),
  Case(factor, COMPLEX, **LOOSE),
  Case(factor, torch.zeros(3, 3)),
  Case(factor, torch.zeros(0, 3, 3)),
  Case(factor, torch.zeros(2, 0, 0)),
  Case(solve, SYMMETRIC, RIGHT, **LOOSE),
  Case(solve, HOLLOW, RIGHT, **LOOSE),
  Case(solve, HOLLOW[0], RIGHT, **LOOSE),
  Case(solve, HERMITIAN, RIGHT.to(torch.complex64), True, **LOOSE),
  Case(solve, COMPLEX + COMPLEX.mT, RIGHT.to(torch.complex64), **LOOSE),
  Case(solve, torch.zeros(0, 3, 3), torch.zeros(0, 3, 2)),
  Case(solve, torch.zeros(2, 0, 0), torch.zeros(2, 0, 1)),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_factors_equal_lapack(case):
  check(case)


def test_float64_is_kept():
  A, B = HOLLOW.double(), RIGHT.double()
  with jax.enable_x64(True), torchax.default_env():
    actual = solve(A.to("jax"), B.to("jax")).cpu()
  torch.testing.assert_close(actual, solve(A, B), rtol=1e-11, atol=1e-11)
