"""Functions of matrices: the exponential, the square root, the polar decomposition.

The exponential is Taylor's series of a matrix that was halved until its norm is small,
squared back. The other two come from eigenvalues and singular values. Their own
derivatives are finite where eigenvalues are equal, which those of the factors are not.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from torchax.ops.builtin import op
from torchax.ops.jaten.solve import require_square, singular
from torchax.registry.names import aten

# Degree of the series, and the 1-norm up to which the first term left out,
# norm^(degree + 1) / (degree + 1)!, is below the rounding of 1.
_DEGREE = {jnp.dtype(jnp.float32): (12, 1.4), jnp.dtype(jnp.float64): (18, 1.09)}


def _multiply(left, right):
  return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def _adjoint(matrix):
  return jnp.conj(matrix.mT)


# --- The exponential ----------------------------------------------------------------


def _taylor(matrix, degree):
  """Σ Aᵏ/k! to the degree, with few products: polynomials in A⁴ (Paterson-Stockmeyer).

  The largest terms, the identity and A, are added last.
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
  """Half precision is computed in float32."""
  require_square("linalg.matrix_exp", self)
  if self.size == 0:
    return self
  wide = self.astype(jnp.promote_types(self.dtype, jnp.float32))
  return _exponential(wide).astype(self.dtype)


# --- The square root and the polar decomposition ------------------------------------


def _require_lapack_dtype(name: str, matrix):
  """Raises as torch does for half precision and for integers."""
  dtype = matrix.dtype
  if not jnp.issubdtype(dtype, jnp.inexact) or jnp.finfo(dtype).bits < 32:
    raise NotImplementedError(
      f"{name}: Expected a tensor of float32, float64, complex64 or complex128, but "
      f"got {dtype}."
    )


def _divided_by_sums(vectors, values, matrix):
  """X with S X + X S = matrix, for S of these eigenvectors and eigenvalues."""
  inner = _multiply(_multiply(_adjoint(vectors), matrix), vectors)
  inner = inner / (values[..., :, None] + values[..., None, :])
  return _multiply(_multiply(vectors, inner), _adjoint(vectors))


def _rebuilt(vectors, values):
  return _multiply(vectors * values[..., None, :], _adjoint(vectors))


def _square_root_factors(matrix):
  """Eigenvectors and eigenvalues of the root; 0 for what rounding has made negative."""
  vectors, values = lax.linalg.eigh(matrix, lower=True, symmetrize_input=False)
  return vectors, jnp.sqrt(jnp.maximum(values, 0))


@jax.custom_jvp
def _square_root(matrix):
  return _rebuilt(*_square_root_factors(matrix))


@_square_root.defjvp
def _square_root_jvp(primals, tangents):
  """X dX + dX X = dA, where dA is as Hermitian as A."""
  vectors, roots = _square_root_factors(*primals)
  change = (tangents[0] + _adjoint(tangents[0])) / 2
  return _rebuilt(vectors, roots), _divided_by_sums(vectors, roots, change)


@op(aten.linalg_matrix_sqrth)
def _aten_linalg_matrix_sqrth(self) -> jax.Array:
  """Reads the lower triangle only."""
  require_square("linalg.matrix_sqrth", self)
  _require_lapack_dtype("linalg.matrix_sqrth", self)
  return _square_root(self)


def _polar_factors(matrix):
  """(U, eigenvectors of H, eigenvalues of H) with the matrix U H."""
  left, values, right = singular(matrix, full_matrices=False)
  return _multiply(left, right), _adjoint(right), values


@jax.custom_jvp
def _polar(matrix):
  unitary, vectors, values = _polar_factors(matrix)
  return unitary, _rebuilt(vectors, values)


@_polar.defjvp
def _polar_jvp(primals, tangents):
  """From dA = dU H + U dH.

  Inside the columns of U it is dU = U W with W H + H W = Uᴴ dA - dAᴴ U. Outside of
  them, which only a tall matrix has, dU = dA H⁻¹.
  """
  unitary, vectors, values = _polar_factors(*primals)
  hermitian = _rebuilt(vectors, values)
  inside = _multiply(_adjoint(unitary), tangents[0])
  turn = _divided_by_sums(vectors, values, inside - _adjoint(inside))
  unitary_change = _multiply(unitary, turn)
  if unitary.shape[-2] > unitary.shape[-1]:
    outside = tangents[0] - _multiply(unitary, inside)
    scaled = _multiply(outside, vectors) / values[..., None, :]
    unitary_change += _multiply(scaled, _adjoint(vectors))
  hermitian_change = inside - _multiply(turn, hermitian)
  return (unitary, hermitian), (unitary_change, hermitian_change)


@op(aten.linalg_polar)
def _aten_linalg_polar(A):
  """(U, H) by singular values, as torch has it on the CPU."""
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
