"""Functions of matrices: exponential, square root and polar decomposition.

The exponential uses scaling and squaring with a Taylor series. The other two are
computed from eigenvalues and singular values. They have custom derivatives, which stay
finite for equal eigenvalues; derivatives through the factors do not.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from torchax.ops.builtin import op
from torchax.ops.jaten.solve import conj_transpose, require_square, svd
from torchax.registry.names import aten

# Degree of the series, and the largest 1-norm for it: there the first omitted term,
# norm^(degree + 1) / (degree + 1)!, is below the rounding error of 1.
_DEGREE = {jnp.dtype(jnp.float32): (12, 1.4), jnp.dtype(jnp.float64): (18, 1.09)}


def _multiply(left, right):
  return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


# --- The exponential ----------------------------------------------------------------


def _taylor(matrix, degree):
  """Sum Aᵏ/k! up to the degree with few products, as polynomials in A⁴.

  This is the Paterson-Stockmeyer method. The largest terms are added last.
  """
  identity = jnp.broadcast_to(
    jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape
  )
  square = _multiply(matrix, matrix)
  powers = (identity, matrix, square, _multiply(square, matrix))
  fourth = _multiply(square, square)
  total = jnp.zeros_like(matrix)
  for start in reversed(range(0, degree + 1, 4)):
    total = _multiply(total, fourth) if start + 4 <= degree else total
    ends = min(start + 4, degree + 1)
    for power in reversed(range(start, ends)):
      total = total + powers[power - start] / math.factorial(power)
  return total


def _exponential(matrix):
  real = jnp.finfo(matrix.dtype).dtype
  degree, bound = _DEGREE[real]
  norm = jnp.max(jnp.sum(jnp.abs(matrix), axis=-2), axis=-1)
  halvings = jnp.ceil(jnp.log2(jnp.maximum(norm / bound, 1)))
  halvings = jnp.where(jnp.isfinite(halvings), halvings, 0).astype(jnp.int32)
  scaled = matrix * jnp.exp2(-halvings.astype(real))[..., None, None]

  def square(step, power):
    is_needed = (step < halvings)[..., None, None]
    return jnp.where(is_needed, _multiply(power, power), power)

  return lax.fori_loop(0, jnp.max(halvings), square, _taylor(scaled, degree))


@op(aten.linalg_matrix_exp, aten.matrix_exp)
def _aten_linalg_matrix_exp(self) -> jax.Array:
  """Compute half precision in float32."""
  if self.size == 0:
    return self
  wide = self.astype(jnp.promote_types(self.dtype, jnp.float32))
  return _exponential(wide).astype(self.dtype)


# --- The square root and the polar decomposition ------------------------------------


def _require_lapack_dtype(name: str, matrix):
  """Raise torch's error for half precision and integers."""
  dtype = matrix.dtype
  if not jnp.issubdtype(dtype, jnp.inexact) or jnp.finfo(dtype).bits < 32:
    raise NotImplementedError(
      f"{name}: Expected a tensor of float32, float64, complex64 or complex128, but "
      f"got {dtype}."
    )


def _solve_sylvester(vectors, values, matrix):
  """Solve S X + X S = matrix, for S with these eigenvectors and eigenvalues."""
  inner = _multiply(_multiply(conj_transpose(vectors), matrix), vectors)
  inner = inner / (values[..., :, None] + values[..., None, :])
  return _multiply(_multiply(vectors, inner), conj_transpose(vectors))


def _compose(vectors, values):
  return _multiply(vectors * values[..., None, :], conj_transpose(vectors))


def _square_root_factors(matrix):
  """Return eigenvectors and eigenvalues of the root; clamp negative eigenvalues to 0.

  Rounding can make the eigenvalues of a positive semidefinite matrix negative.
  """
  vectors, values = lax.linalg.eigh(matrix, lower=True, symmetrize_input=False)
  return vectors, jnp.sqrt(jnp.maximum(values, 0))


@jax.custom_jvp
def _square_root(matrix):
  return _compose(*_square_root_factors(matrix))


@_square_root.defjvp
def _square_root_jvp(primals, tangents):
  """Solve X dX + dX X = dA, with dA made Hermitian like A."""
  vectors, roots = _square_root_factors(*primals)
  change = (tangents[0] + conj_transpose(tangents[0])) / 2
  return _compose(vectors, roots), _solve_sylvester(vectors, roots, change)


@op(aten.linalg_matrix_sqrth)
def _aten_linalg_matrix_sqrth(self) -> jax.Array:
  """Compute the root; only the lower triangle is read."""
  require_square("linalg.matrix_sqrth", self)
  _require_lapack_dtype("linalg.matrix_sqrth", self)
  return _square_root(self)


def _polar_factors(matrix):
  """Return (U, eigenvectors of H, eigenvalues of H) of the matrix U H."""
  left, values, right = svd(matrix, full_matrices=False)
  return _multiply(left, right), conj_transpose(right), values


@jax.custom_jvp
def _polar(matrix):
  unitary, vectors, values = _polar_factors(matrix)
  return unitary, _compose(vectors, values)


@_polar.defjvp
def _polar_jvp(primals, tangents):
  """Solve dA = dU H + U dH.

  In the column space of U, dU = U W with W H + H W = Uᴴ dA - dAᴴ U. In its orthogonal
  complement, which only a tall matrix has, dU = dA H⁻¹.
  """
  unitary, vectors, values = _polar_factors(*primals)
  hermitian = _compose(vectors, values)
  inside = _multiply(conj_transpose(unitary), tangents[0])
  turn = _solve_sylvester(vectors, values, inside - conj_transpose(inside))
  unitary_change = _multiply(unitary, turn)
  if unitary.shape[-2] > unitary.shape[-1]:
    outside = tangents[0] - _multiply(unitary, inside)
    scaled = _multiply(outside, vectors) / values[..., None, :]
    unitary_change += _multiply(scaled, conj_transpose(vectors))
  hermitian_change = inside - _multiply(turn, hermitian)
  return (unitary, hermitian), (unitary_change, hermitian_change)


@op(aten.linalg_polar)
def _aten_linalg_polar(A):
  """Return (U, H) from singular values, as torch does on the CPU."""
  if A.ndim < 2:
    raise RuntimeError(
      "linalg.polar: The input tensor A must have at least 2 dimensions, but got "
      f"shape {A.shape}."
    )
  if A.shape[-2] < A.shape[-1]:
    raise RuntimeError(
      "linalg.polar: input must have at least as many rows as columns, but got "
      f"{A.shape[-2]} by {A.shape[-1]} matrices"
    )
  _require_lapack_dtype("linalg.polar", A)
  return _polar(A)
