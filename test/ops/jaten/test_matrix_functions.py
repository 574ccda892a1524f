"""The matrix exponential, the square root and the polar decomposition."""

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.test_util import check_grads
from ops.harness import Case, check, floats

import torchax
from torchax.ops import mappings
from torchax.ops.jaten.matrix_functions import (
  _aten_linalg_matrix_sqrth,
  _aten_linalg_polar,
)

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
def test_results_equal_torch_on_the_cpu(case):
  check(case)


def test_double_precision_is_kept():
  matrix = 3 * BATCH.double()
  with jax.enable_x64(True), torchax.default_env():
    actual = exp(matrix.to("jax")).cpu()
  torch.testing.assert_close(actual, exp(matrix), rtol=1e-13, atol=1e-13)


# torch has these two operations only since 2.15, so the tests call the lowerings. The
# matrices are real and complex in double precision, some with equal eigenvalues.
COMPLEX = torch.complex(BATCH.double(), floats(3, 4, 4, seed=1).double())
EQUAL = 2 * torch.eye(4).double()


def definite(matrix):
  return matrix @ matrix.mH + torch.eye(matrix.shape[-1], dtype=matrix.dtype)


def root_of_hermitian_part(array):
  return _aten_linalg_matrix_sqrth((array + array.conj().mT) / 2)


def largest(array) -> float:
  return float(jnp.max(jnp.abs(array), initial=0))


@pytest.mark.parametrize(
  "matrix",
  (definite(BATCH.double()), definite(COMPLEX), EQUAL, EQUAL[:0, :0], EQUAL[None][:0]),
  ids=("real", "complex", "equal", "empty", "no-batch"),
)
def test_matrix_sqrth_squared_is_the_matrix(matrix):
  with jax.enable_x64(True):
    array = mappings.t2j(matrix)
    root = jax.jit(_aten_linalg_matrix_sqrth)(array)
    assert root.dtype == array.dtype
    assert largest(root @ root - array) < 1e-13
    if array.size:
      check_grads(root_of_hermitian_part, (array,), 1, rtol=1e-5, atol=1e-5)


def test_matrix_sqrth_reads_lower_triangle_and_clamps_negatives():
  array = jnp.array([[4.0, 100.0], [0.0, -1e-9]])
  assert _aten_linalg_matrix_sqrth(array).tolist() == [[2, 0], [0, 0]]


@pytest.mark.parametrize(
  "matrix",
  (BATCH.double(), COMPLEX, BATCH[..., :2].double(), COMPLEX[..., :2], EQUAL)
  + (EQUAL[:, :0], EQUAL[None][:0]),
  ids=("real", "complex", "tall", "tall-complex", "equal", "no-columns", "no-batch"),
)
def test_polar_factors_are_unitary_and_hermitian(matrix):
  with jax.enable_x64(True):
    array = mappings.t2j(matrix)
    unitary, hermitian = jax.jit(_aten_linalg_polar)(array)
    assert unitary.dtype == hermitian.dtype == array.dtype
    assert largest(unitary @ hermitian - array) < 1e-14
    assert largest(unitary.conj().mT @ unitary - jnp.eye(array.shape[-1])) < 1e-14
    assert largest(hermitian - hermitian.conj().mT) < 1e-14
    assert (jnp.linalg.eigvalsh(hermitian) > 0).all()
    if array.size:
      check_grads(_aten_linalg_polar, (array,), 1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  ("function", "array", "error", "message"),
  (
    (_aten_linalg_polar, jnp.ones((2, 3)), RuntimeError, "at least as many rows"),
    (_aten_linalg_polar, jnp.ones(3), RuntimeError, "at least 2 dimensions"),
    (_aten_linalg_polar, jnp.ones((2, 2), int), NotImplementedError, "int"),
    (_aten_linalg_matrix_sqrth, jnp.ones((2, 3)), RuntimeError, "square"),
    (
      _aten_linalg_matrix_sqrth,
      jnp.ones((2, 2), jnp.bfloat16),
      NotImplementedError,
      "bfloat16",
    ),
  ),
)
def test_invalid_matrices_raise(function, array, error, message):
  with pytest.raises(error, match=message):
    function(array)
