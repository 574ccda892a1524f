"""The matrix exponential.

Taylor's series of a matrix that was halved until its norm is small, squared back.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from torchax.ops.jaten.solve import require_square
from torchax.ops.names import aten
from torchax.ops.op_base import op

# Degree of the series, and the 1-norm up to which the first term left out,
# norm^(degree + 1) / (degree + 1)!, is below the rounding of 1.
_DEGREE = {jnp.dtype(jnp.float32): (12, 1.4), jnp.dtype(jnp.float64): (18, 1.09)}


def _multiply(left, right):
  return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


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
