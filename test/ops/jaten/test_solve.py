"""Linear algebra against CPU torch, or by the identity where factors are not unique."""

import pytest
import torch
from ops.harness import Case, check, floats

import torchax

N = 3
SQUARE = floats(N, N) + 2 * torch.eye(N)
BATCH = floats(2, N, N, seed=1) + 2 * torch.eye(N)
TALL = floats(5, N, seed=2)
WIDE = floats(N, 5, seed=3)
RIGHT = floats(N, 2, seed=4)
VECTOR = floats(N, seed=5)
SPD = SQUARE @ SQUARE.T + torch.eye(N)
SPD_BATCH = BATCH @ BATCH.mT + torch.eye(N)
HERMITIAN = torch.complex(SPD, SQUARE - SQUARE.T)
RANK_ONE = TALL[:, :1] @ WIDE[:1, :N]
SPECTRUM = torch.diag(torch.tensor([3.0, 2.0, -1.0]))
LOOSE = {"rtol": 1e-4, "atol": 1e-4, "why": "a backward-stable solver's rounding"}


def product_of_svd(A, full_matrices=False):
  U, S, Vh = torch.linalg.svd(A, full_matrices=full_matrices)
  k = S.shape[-1]
  return U[..., :, :k] * S[..., None, :] @ Vh[..., :k, :], S, U.mH @ U, Vh @ Vh.mH


def product_of_qr(A, mode="reduced"):
  Q, R = torch.linalg.qr(A, mode)
  return Q @ R, Q.mH @ Q


def product_of_eigh(A, UPLO="L"):
  values, vectors = torch.linalg.eigh(A, UPLO)
  return vectors * values @ vectors.mH, values


def residual_of_eig(A):
  values, vectors = torch.linalg.eig(A)
  return (A.to(vectors.dtype) @ vectors - vectors * values).abs()


def product_of_lu(A):
  P, L, U = torch.linalg.lu(A)
  return P @ L @ U, P


def product_of_unpacked_lu(A):
  P, L, U = torch.lu_unpack(*torch.linalg.lu_factor(A))
  return P @ L @ U


def product_of_reflectors(A):
  reflectors, tau = torch.geqrf(A)
  Q = torch.linalg.householder_product(reflectors, tau)
  return Q @ reflectors[..., : A.shape[-1], :].triu()


def q_times_vector(A, other):
  reflectors, tau = torch.geqrf(A)
  return torch.ormqr(reflectors, tau, torch.ormqr(reflectors, tau, other), True, True)


def lu_solve(A, B, left=True, adjoint=False):
  LU, pivots = torch.linalg.lu_factor(A)
  return torch.linalg.lu_solve(LU, pivots, B, left=left, adjoint=adjoint)


def triangular_solve(A, B, **options):
  return torch.triangular_solve(B, A, **options)


def pinv_above(A, atol):
  return torch.linalg.pinv(A, atol=atol, rtol=0.0)


CHOLESKY_CASES = (
  Case(torch.linalg.cholesky, SPD, grad=True, **LOOSE),
  Case(torch.linalg.cholesky, SPD_BATCH, upper=True, grad=True, **LOOSE),
  Case(torch.linalg.cholesky, HERMITIAN, upper=True, **LOOSE),
  Case(torch.linalg.cholesky_ex, SPD, **LOOSE),
  Case(torch.cholesky_solve, RIGHT, SQUARE.tril(), grad=True, **LOOSE),
  Case(torch.cholesky_solve, RIGHT, SQUARE.triu(), upper=True, **LOOSE),
  Case(torch.cholesky_inverse, SQUARE.tril(), **LOOSE),
)

FACTOR_CASES = (
  *(Case(product_of_qr, A, grad=A is TALL, **LOOSE) for A in (TALL, WIDE, BATCH)),
  Case(product_of_qr, TALL, "complete", **LOOSE),
  *(Case(product_of_svd, A, grad=A is SQUARE, **LOOSE) for A in (SQUARE, TALL, WIDE)),
  Case(product_of_svd, TALL, True, **LOOSE),
  Case(torch.linalg.svdvals, BATCH, grad=True, **LOOSE),
  *(Case(product_of_eigh, A, **LOOSE) for A in (SPD, SPD_BATCH[0], HERMITIAN)),
  Case(product_of_eigh, SPD, "U", **LOOSE),
  Case(torch.linalg.eigvalsh, SPD, grad=True, **LOOSE),
  Case(residual_of_eig, SQUARE, **LOOSE),
  Case(torch.linalg.eigvals, SPECTRUM, **LOOSE),
  Case(product_of_lu, SQUARE, grad=True, **LOOSE),
  *(Case(product_of_lu, A, **LOOSE) for A in (TALL, WIDE, BATCH)),
  Case(product_of_unpacked_lu, BATCH, **LOOSE),
  Case(torch.linalg.lu_factor_ex, SQUARE, **LOOSE),
  Case(product_of_reflectors, TALL, **LOOSE),
  Case(q_times_vector, TALL, floats(5, 2), **LOOSE),
)

SOLVE_CASES = (
  Case(torch.linalg.solve, SQUARE, RIGHT, grad=True, **LOOSE),
  Case(torch.linalg.solve, SQUARE, VECTOR, grad=True, **LOOSE),
  Case(torch.linalg.solve, BATCH, RIGHT, grad=True, **LOOSE),
  Case(torch.linalg.solve, SQUARE, RIGHT.T, left=False, grad=True, **LOOSE),
  Case(torch.linalg.solve, HERMITIAN, RIGHT.to(torch.complex64), **LOOSE),
  *(
    Case(lu_solve, SQUARE, B, left, adjoint, grad=True, **LOOSE)
    for B, left in ((RIGHT, True), (RIGHT.T, False))
    for adjoint in (False, True)
  ),
  Case(lu_solve, HERMITIAN, RIGHT.to(torch.complex64), True, True, **LOOSE),
  Case(torch.linalg.inv, SQUARE, grad=True, **LOOSE),
  Case(torch.linalg.inv_ex, BATCH, **LOOSE),
  Case(torch.linalg.inv_ex, torch.zeros(2, N, N)[..., :0, :0]),
  *(
    Case(torch.linalg.solve_triangular, SQUARE, B, upper=upper, left=left, **LOOSE)
    for upper in (True, False)
    for B, left in ((RIGHT, True), (RIGHT.T, False))
  ),
  Case(torch.linalg.solve_triangular, BATCH, RIGHT, upper=True, grad=True, **LOOSE),
  Case(triangular_solve, SQUARE, RIGHT, transpose=True, grad=True, **LOOSE),
  Case(triangular_solve, SQUARE, RIGHT, upper=False, unitriangular=True, **LOOSE),
)

OTHER_CASES = (
  *(
    Case(function, A, grad=A is not HERMITIAN, **LOOSE)
    for function in (torch.linalg.det, torch.linalg.slogdet)
    for A in (SQUARE, BATCH, HERMITIAN)
  ),
  Case(
    lambda A: torch.linalg.det(A.mT), SQUARE, grad=True, name="det_of_view", **LOOSE
  ),
  Case(
    lambda A: torch.linalg.slogdet(A.mT),
    BATCH,
    grad=True,
    name="slogdet_of_view",
    **LOOSE,
  ),
  *(
    Case(torch.linalg.pinv, A, grad=A is TALL, **LOOSE) for A in (TALL, WIDE, RANK_ONE)
  ),
  Case(torch.linalg.pinv, SPECTRUM, hermitian=True, **LOOSE),
  Case(pinv_above, SPECTRUM, 1.5, **LOOSE),
  Case(torch.linalg.matrix_rank, RANK_ONE),
  *(
    Case(torch.linalg.lstsq, *system, driver=driver, **LOOSE)
    for driver in (None, "gels", "gelsd")
    for system in ((TALL, floats(5, 2)), (TALL, floats(5)), (WIDE, RIGHT))
  ),
  Case(torch.linalg.matrix_power, SQUARE, 3, grad=True, **LOOSE),
  Case(torch.linalg.matrix_norm, SQUARE, "nuc", **LOOSE),
  Case(torch.linalg.cond, SQUARE, **LOOSE),
)

CASES = CHOLESKY_CASES + FACTOR_CASES + SOLVE_CASES + OTHER_CASES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_equal_torch_on_the_cpu(case):
  check(case)


SINGULAR = (
  (torch.linalg.cholesky, (-SPD,)),
  (torch.linalg.inv, (torch.zeros(N, N),)),
  (torch.linalg.solve, (torch.zeros(N, N), VECTOR)),
)


@pytest.mark.parametrize("row", SINGULAR, ids=lambda row: row[0].__name__)
def test_a_failed_factorization_raises_lin_alg_error(row):
  function, args = row
  with torchax.default_env(), pytest.raises(torch.linalg.LinAlgError):
    function(*(arg.to("jax") for arg in args))


def test_an_ex_function_reports_the_failure_in_info():
  with torchax.default_env():
    _, info = torch.linalg.cholesky_ex(-SPD.to("jax"))
    assert info.item() != 0
    _, info = torch.linalg.inv_ex(torch.zeros(N, N, device="jax"))
    assert info.item() == 1


def test_non_square_matrices_raise():
  with torchax.default_env(), pytest.raises(RuntimeError):
    torch.linalg.inv(TALL.to("jax"))


def test_svd_of_a_matrix_with_an_infinity_is_nan():
  """XLA's algorithm for the CPU would not terminate."""
  matrices = torch.eye(3).expand(2, 3, 3).clone()
  matrices[0, 0, 0] = torch.inf
  values = torch.linalg.svdvals(matrices.to("jax")).cpu()
  assert values[0].isnan().all()
  torch.testing.assert_close(values[1], torch.ones(3))
