"""Linear algebra: factorizations, solvers, inverses, eigenvalues.

Matrices are the last two dimensions. Pivots count from 1 as in LAPACK. An absent
output has shape (0,). `info` is 0 for success. `_linalg_check_errors` reads it and
raises the error; inside a JAX trace there is no value, so it does nothing. Products are
in `matmul.py`, norms in `reduction.py`, symmetric indefinite matrices in `ldl.py`,
functions of matrices in `matrix_functions.py`.
"""

import functools

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torchax.core import out_of_range
from torchax.ops.builtin import Kind, op
from torchax.ops.jaten._arguments import require_one_dtype
from torchax.ops.promotion import int64
from torchax.registry.index_rules import Range
from torchax.registry.names import aten

# --- Shapes and errors --------------------------------------------------------------


def conj_transpose(matrix):
  return jnp.conj(matrix.mT)


def _absent(dtype):
  return jnp.zeros((0,), dtype)


def _broadcast_batches(left, right):
  """Broadcast the batch dimensions of both matrices."""
  batch = jnp.broadcast_shapes(left.shape[:-2], right.shape[:-2])
  return (
    jnp.broadcast_to(left, batch + left.shape[-2:]),
    jnp.broadcast_to(right, batch + right.shape[-2:]),
  )


def _first_true(failed):
  """Return the 1-based index of the first True along the last dimension, or 0."""
  if not failed.shape[-1]:
    return jnp.zeros(failed.shape[:-1], jnp.int32)
  position = jnp.argmax(failed, axis=-1) + 1
  return jnp.where(jnp.any(failed, axis=-1), position, 0).astype(jnp.int32)


_FAILURES = {
  "linalg.cholesky": "The input is not positive-definite",
  "linalg.inv": "The input matrix is singular",
  "torch.linalg.solve": "The input matrix is singular",
}


@op(aten._linalg_check_errors, compiled=False)
def _aten__linalg_check_errors(info, api_name, is_matrix):
  """Raise torch.linalg.LinAlgError with the first failed element of a batch."""
  if isinstance(info, jax.core.Tracer):
    return
  failed = jnp.flatnonzero(info)
  if not failed.size:
    return
  element = "" if is_matrix else f"(Batch element {int(failed[0])}): "
  reason = _FAILURES.get(
    api_name, f"The computation failed with info={int(info.ravel()[failed[0]])}"
  )
  raise torch.linalg.LinAlgError(f"{api_name}: {element}{reason}.")


def needs_no_check(args, kwargs) -> bool:
  """Return False for `check_errors=True`, which reads the concrete value of `info`."""
  return not kwargs.get("check_errors", False)


def check_info(info, name, check_errors):
  if check_errors:
    _aten__linalg_check_errors(info, name, is_matrix=info.ndim == 0)


# --- Triangular systems -------------------------------------------------------------


def _solve_triangular(
  matrix, right, lower, left=True, transpose=False, conjugate=False, unit=False
):
  matrix, right = _broadcast_batches(matrix, right)
  return lax.linalg.triangular_solve(
    matrix,
    right,
    left_side=left,
    lower=lower,
    transpose_a=transpose,
    conjugate_a=conjugate,
    unit_diagonal=unit,
  )


@op(aten.linalg_solve_triangular)
def _aten_linalg_solve_triangular(self, B, upper, left=True, unitriangular=False):
  return _solve_triangular(self, B, not upper, left, unit=unitriangular)


@op(aten.triangular_solve)
def _aten_triangular_solve(self, A, upper=True, transpose=False, unitriangular=False):
  """Solve A X = self; the second result is A with its batches expanded."""
  A, self = _broadcast_batches(A, self)
  solution = _solve_triangular(
    A, self, not upper, transpose=transpose, unit=unitriangular
  )
  return solution, A


# --- Cholesky -----------------------------------------------------------------------


@op(aten.linalg_cholesky_ex, compiled=needs_no_check)
def _aten_linalg_cholesky_ex(self, upper=False, check_errors=False):
  """Factorize; `info` is 1 for any failure.

  XLA fills the factor with NaN and does not report the order of the failed minor.
  """
  source = conj_transpose(self) if upper else self
  factor = jnp.tril(lax.linalg.cholesky(source, symmetrize_input=False))
  diagonal = jnp.diagonal(factor, axis1=-2, axis2=-1)
  info = jnp.any(jnp.isnan(diagonal), axis=-1).astype(jnp.int32)
  check_info(info, "linalg.cholesky", check_errors)
  return conj_transpose(factor) if upper else factor, info


@op(aten.linalg_cholesky, aten.cholesky, compiled=False)
def _aten_cholesky(self, upper=False):
  return _aten_linalg_cholesky_ex(self, upper, check_errors=True)[0]


@op(aten.cholesky_solve)
def _aten_cholesky_solve(self, input2, upper=False):
  """Solve A X = self with the factor `input2` of A."""
  lower = conj_transpose(input2) if upper else input2
  half = _solve_triangular(lower, self, lower=True)
  return _solve_triangular(lower, half, lower=True, transpose=True, conjugate=True)


@op(aten.cholesky_inverse)
def _aten_cholesky_inverse(self, upper=False):
  return _aten_cholesky_solve(jnp.eye(self.shape[-1], dtype=self.dtype), self, upper)


# --- QR and Householder reflectors --------------------------------------------------


@op(aten.linalg_qr)
def _aten_linalg_qr(A, mode="reduced"):
  if mode == "r":
    return _absent(A.dtype), jnp.linalg.qr(A, mode="r")
  return tuple(jnp.linalg.qr(A, mode=mode))


@op(aten.qr)
def _aten_qr(self, some=True):
  return _aten_linalg_qr(self, "reduced" if some else "complete")


@op(aten.geqrf)
def _aten_geqrf(self):
  reflectors, tau = jnp.linalg.qr(self, mode="raw")
  return reflectors.mT, tau


@op(aten.linalg_householder_product)
def _aten_linalg_householder_product(input, tau):
  return lax.linalg.householder_product(input, tau)


@op(aten.ormqr)
def _aten_ormqr(self, input2, input3, left=True, transpose=False):
  """Multiply `input3` by Q, given its reflectors `self` and `input2`."""
  return lax.linalg.ormqr(self, input2, input3, left=left, transpose=transpose)


# --- LU -----------------------------------------------------------------------------


def _lu(matrix):
  """Return LU, pivots from 1, and `info`: the first zero on U's diagonal, or 0."""
  factors, pivots, _ = lax.linalg.lu(matrix)
  diagonal = jnp.diagonal(factors, axis1=-2, axis2=-1)
  return factors, pivots + 1, _first_true(diagonal == 0)


def _require_pivoting(name, pivot):
  if not pivot:
    raise RuntimeError(f"{name}: LU without pivoting is not implemented on jax.")


@op(aten.linalg_lu_factor_ex, compiled=needs_no_check)
def _aten_linalg_lu_factor_ex(A, pivot=True, check_errors=False):
  _require_pivoting("linalg.lu_factor", pivot)
  factors, pivots, info = _lu(A)
  check_info(info, "torch.linalg.lu_factor", check_errors)
  return factors, pivots, info


def _unpack_rules(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True):
  message = (
    "pivots passed to lu_unpack must be between 1 and LU.size(-2) inclusive."
    "Did you properly pass the result of lu_factor?"
  )
  if unpack_pivots:
    yield Range(LU_pivots, 1, LU_data.shape[-2] + 1, RuntimeError, message)


@op(aten.lu_unpack, rules=_unpack_rules)
def _aten_lu_unpack(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True):
  """Return (P, L, U) with A = P L U; outputs not asked for have shape (0,)."""
  rows, columns = LU_data.shape[-2:]
  rank, dtype = min(rows, columns), LU_data.dtype
  permutation_matrix = lower = upper = _absent(dtype)
  if unpack_pivots:
    permutation = lax.linalg.lu_pivots_to_permutation(LU_pivots - 1, rows)
    permutation_matrix = jax.nn.one_hot(permutation, rows, dtype=dtype).mT
    permutation_matrix = fill_if_wrong(permutation_matrix, LU_pivots - 1, rows)
  if unpack_data:
    lower = jnp.tril(LU_data[..., :, :rank], -1) + jnp.eye(rows, rank, dtype=dtype)
    upper = jnp.triu(LU_data[..., :rank, :])
  return permutation_matrix, lower, upper


@op(aten.linalg_lu)
def _aten_linalg_lu(A, pivot=True):
  _require_pivoting("linalg.lu", pivot)
  factors, pivots, _ = _lu(A)
  return _aten_lu_unpack(factors, pivots)


def fill_if_wrong(matrix, indices, rows):
  """Make a matrix NaN if one of its `indices` is not that of a row."""
  is_wrong = out_of_range.is_out_of_range(indices, rows).any(-1)
  return out_of_range.fill_invalid(matrix, is_wrong[..., None, None])


def _lu_solve(factors, pivots, right, adjoint=False):
  """Solve A X = right, or A^H X = right, from P A = L U."""
  factors, right = _broadcast_batches(factors, right)
  rows = factors.shape[-1]
  permutation = lax.linalg.lu_pivots_to_permutation(pivots - 1, rows)
  permutation = jnp.broadcast_to(permutation, right.shape[:-1])
  right = fill_if_wrong(right, pivots - 1, rows)
  if not adjoint:
    right = jnp.take_along_axis(right, permutation[..., None], axis=-2)
    half = _solve_triangular(factors, right, lower=True, unit=True)
    return _solve_triangular(factors, half, lower=False)
  options = {"transpose": True, "conjugate": True}
  half = _solve_triangular(factors, right, lower=False, **options)
  permuted = _solve_triangular(factors, half, lower=True, unit=True, **options)
  inverse = jnp.argsort(permutation, axis=-1)
  return jnp.take_along_axis(permuted, inverse[..., None], axis=-2)


def _lu_solve_rules(LU, pivots, B, left=True, adjoint=False):
  message = (
    "Pivots given to lu_solve must all be smaller or equal to LU.size(-2). "
    "Did you properly pass the result of lu_factor?"
  )
  most = LU.shape[-2] + 1
  yield Range(pivots, -most, most, RuntimeError, message)
  message = (
    "Pivots given to lu_solve must all be greater or equal to 1. "
    "Did you properly pass the result of lu_factor?"
  )
  yield Range(pivots, 1, most, RuntimeError, message)


@op(aten.linalg_lu_solve, rules=_lu_solve_rules)
def _aten_linalg_lu_solve(LU, pivots, B, left=True, adjoint=False):
  if left:
    return _lu_solve(LU, pivots, B, adjoint)
  return conj_transpose(_lu_solve(LU, pivots, conj_transpose(B), not adjoint))


# --- Solving and inverting ----------------------------------------------------------


def _is_vector_side(A, B) -> bool:
  """Return True if B is a batch of vectors, not of matrices."""
  return B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1])


@op(aten._linalg_solve_ex, compiled=needs_no_check)
def _aten__linalg_solve_ex(A, B, left=True, check_errors=False):
  factors, pivots, info = _lu(A)
  check_info(info, "torch.linalg.solve", check_errors)
  if _is_vector_side(A, B):
    solution = _lu_solve(factors, pivots, B[..., None])[..., 0]
  else:
    solution = _aten_linalg_lu_solve(factors, pivots, B, left)
  return solution, factors, pivots, info


@op(aten.linalg_inv_ex, compiled=needs_no_check)
def _aten_linalg_inv_ex(A, check_errors=False):
  factors, pivots, info = _lu(A)
  check_info(info, "linalg.inv", check_errors)
  identity = jnp.broadcast_to(jnp.eye(A.shape[-1], dtype=A.dtype), A.shape)
  return _lu_solve(factors, pivots, identity), info


# --- Determinants -------------------------------------------------------------------


def _sign_of_pivots(pivots, dtype):
  """Return the sign of the permutation: -1 for an odd number of row exchanges."""
  exchanges = jnp.sum(pivots != jnp.arange(1, pivots.shape[-1] + 1), axis=-1)
  return jnp.where(exchanges % 2 == 0, 1, -1).astype(dtype)


@functools.partial(jax.jit, static_argnames="transposed")
def _determinant(matrix, transposed):
  factors, pivots, _ = _lu(matrix.mT if transposed else matrix)
  diagonal = jnp.diagonal(factors, axis1=-2, axis2=-1)
  sign = _sign_of_pivots(pivots, matrix.dtype)
  return sign * jnp.prod(diagonal, axis=-1), factors, pivots


@functools.partial(jax.jit, static_argnames="transposed")
def _sign_and_log_determinant(matrix, transposed):
  factors, pivots, _ = _lu(matrix.mT if transposed else matrix)
  diagonal = jnp.diagonal(factors, axis1=-2, axis2=-1)
  sign = _sign_of_pivots(pivots, matrix.dtype) * jnp.prod(jnp.sign(diagonal), axis=-1)
  return sign, jnp.sum(jnp.log(jnp.abs(diagonal)), axis=-1), factors, pivots


def require_square(name: str, matrix) -> None:
  if matrix.shape[-1] != matrix.shape[-2]:
    raise RuntimeError(
      f"{name}: A must be batches of square matrices, but they are "
      f"{matrix.shape[-2]} by {matrix.shape[-1]} matrices"
    )


def _holds_transposed_factors(A) -> bool:
  """Return True if torch's backward formula takes the LU of A^T: A real, contiguous.

  Contiguity depends on the strides, so these two lowerings must see the tensor.
  """
  return A.is_contiguous() and not A.is_complex()


@op(aten._linalg_det.default, kind=Kind.TENSORS, needs_env=True)
def _aten__linalg_det(A, env):
  require_square("linalg.det", A)
  return env.j2t_iso(_determinant(env.t2j_iso(A), _holds_transposed_factors(A)))


@op(aten._linalg_slogdet.default, kind=Kind.TENSORS, needs_env=True)
def _aten__linalg_slogdet(A, env):
  require_square("linalg.slogdet", A)
  results = _sign_and_log_determinant(env.t2j_iso(A), _holds_transposed_factors(A))
  return env.j2t_iso(results)


# --- Singular values and eigenvalues ------------------------------------------------


def svd(matrix, **options):
  """Call `jnp.linalg.svd`, with NaN for a matrix with infinities, as in LAPACK.

  On the CPU, XLA's algorithm does not terminate for an infinity, but does for NaN.
  """
  has_infinities = jnp.isinf(matrix).any((-2, -1), keepdims=True)
  return jnp.linalg.svd(jnp.where(has_infinities, jnp.nan, matrix), **options)


@op(aten._linalg_svd)
def _aten__linalg_svd(A, full_matrices=False, compute_uv=True, driver=None):
  """Decompose A; `driver` selects one of cuSOLVER's algorithms and is ignored."""
  if not compute_uv:
    values = svd(A, compute_uv=False)
    return _absent(A.dtype), values, _absent(A.dtype)
  return tuple(svd(A, full_matrices=full_matrices))


@op(aten._linalg_eigh)
def _aten_linalg_eigh(A, UPLO="L", compute_v=True):
  """Decompose A from one triangle: the lower one, or the upper one for "U"."""
  lower = UPLO.upper() == "L"
  vectors, values = lax.linalg.eigh(A, lower=lower, symmetrize_input=False)
  return values, vectors if compute_v else _absent(A.dtype)


@op(aten.linalg_eig)
def _aten_linalg_eig(self):
  return tuple(lax.linalg.eig(self, compute_left_eigenvectors=False))


@op(aten._linalg_eigvals, aten.linalg_eigvals)
def _aten_linalg_eigvals(self):
  options = {"compute_left_eigenvectors": False, "compute_right_eigenvectors": False}
  return lax.linalg.eig(self, **options)[0]


# --- Least squares and pseudo-inverses ----------------------------------------------


def _default_rtol(matrix) -> float:
  return float(jnp.finfo(matrix.dtype).eps) * max(matrix.shape[-2:])


def _reciprocals_above(values, cutoff):
  """Return the reciprocals of the values above the cutoff, 0 for the rest."""
  is_above = values > cutoff
  return jnp.where(is_above, 1 / jnp.where(is_above, values, 1), 0)


def _hermitian_pinv(matrix, cutoff_of):
  vectors, values = lax.linalg.eigh(matrix, lower=True, symmetrize_input=False)
  magnitudes = jnp.abs(values)
  cutoff = cutoff_of(jnp.max(magnitudes, axis=-1, keepdims=True))
  inverted = jnp.sign(values) * _reciprocals_above(magnitudes, cutoff)
  return (vectors * inverted[..., None, :]) @ conj_transpose(vectors)


@op(aten.linalg_pinv.atol_rtol_tensor)
def _aten_linalg_pinv_atol_rtol_tensor(self, atol=None, rtol=None, hermitian=False):
  """Compute the pseudo-inverse from singular values above max(atol, rtol * largest)."""
  if rtol is None:
    rtol = _default_rtol(self) if atol is None else 0.0
  atol = jnp.asarray(0.0 if atol is None else atol)[..., None]
  rtol = jnp.asarray(rtol)[..., None]

  def cutoff_of(greatest):
    return jnp.maximum(atol, rtol * greatest).astype(greatest.dtype)

  if self.size == 0:
    return jnp.zeros(self.mT.shape, self.dtype)
  if hermitian:
    return _hermitian_pinv(self, cutoff_of)
  left, values, right = svd(self, full_matrices=False)
  inverted = _reciprocals_above(values, cutoff_of(values[..., :1]))
  return (conj_transpose(right) * inverted[..., None, :]) @ conj_transpose(left)


# Further outputs of each LAPACK driver: rank, residuals, singular values.
_LSTSQ_OUTPUTS = {
  "gels": (False, True, False),
  "gelsy": (True, False, False),
  "gelsd": (True, True, True),
  "gelss": (True, True, True),
}


@op(aten.linalg_lstsq)
def _aten_linalg_lstsq(self, b, rcond=None, driver=None):
  """Compute the solution of least norm, by SVD for every driver.

  As on the CPU, the driver selects which of residuals, rank and singular values are
  present. Every system with more rows than columns has residuals, whatever its rank,
  because the rank depends on data.
  """
  driver = driver or "gelsy"
  require_one_dtype("torch.linalg.lstsq", self, b)
  is_vector = _is_vector_side(self, b)
  right = b[..., None] if is_vector else b
  left_vectors, values, right_vectors = svd(self, full_matrices=False)
  rcond = _default_rtol(self) if rcond is None else rcond
  cutoff = jnp.asarray(rcond, values.dtype) * values[..., :1]
  scaled = _reciprocals_above(values, cutoff)[..., None] * (
    conj_transpose(left_vectors) @ right
  )
  solution = conj_transpose(right_vectors) @ scaled
  rank = jnp.sum(values > cutoff, axis=-1, dtype=int64())
  residuals = jnp.sum(jnp.square(jnp.abs(self @ solution - right)), axis=-2)
  gives_rank, gives_residuals, gives_values = _LSTSQ_OUTPUTS[driver]
  gives_residuals = gives_residuals and self.shape[-2] > self.shape[-1]
  return (
    solution[..., 0] if is_vector else solution,
    residuals if gives_residuals else _absent(values.dtype),
    rank if gives_rank else _absent(rank.dtype),
    values if gives_values else _absent(values.dtype),
  )
