"""LDL factorization of symmetric indefinite matrices, and its linear systems.

A = L D Lᵀ, or L D Lᴴ if Hermitian; D has 1x1 and 2x2 blocks. Factors and pivots are
packed as in LAPACK's `sytrf` and `hetrf` for a lower triangle: D and the columns of L
share the matrix. An entry of `pivots` is k, counted from 1, if its row was exchanged
with row k. Both entries of a 2x2 block are -k; its second row was exchanged. Other
factorizations are in `solve.py`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from torchax.ops.builtin import op
from torchax.ops.jaten.solve import check_info, fill_if_wrong, needs_no_check
from torchax.registry.index_rules import Range
from torchax.registry.names import aten

# Least ratio of a pivot on the diagonal to the largest element of its column (Bunch &
# Kaufman, "Some stable methods for calculating inertia", Math. Comp. 31, 1977).
ALPHA = (1 + math.sqrt(17)) / 8


def _magnitude(x) -> jax.Array:
  """Return |x|; for complex numbers |re| + |im|, as LAPACK."""
  return jnp.abs(jnp.real(x)) + jnp.abs(jnp.imag(x)) if jnp.iscomplexobj(x) else abs(x)


def _transposition(size, first, second):
  """Return the permutation of `size` entries that exchanges two."""
  order = jnp.arange(size)
  return order.at[first].set(second).at[second].set(first)


def _choose_pivot(work, k):
  """Return (row to exchange, True for a 2x2 block, True for a zero column)."""
  rows = jnp.arange(work.shape[-1])
  diagonal = _magnitude(jnp.diagonal(work))
  column = jnp.where(rows > k, _magnitude(work[:, k]), 0)
  largest = jnp.argmax(column)
  in_column = column[largest]
  row = jnp.where((rows >= k) & (rows != largest), _magnitude(work[largest]), 0)
  in_row = jnp.max(row)
  is_zero = (jnp.maximum(diagonal[k], in_column) == 0) | jnp.isnan(diagonal[k])
  ratio = in_column / jnp.where(in_row == 0, 1, in_row)
  stays = is_zero | (diagonal[k] >= ALPHA * in_column)
  stays |= diagonal[k] >= ALPHA * in_column * ratio
  has_two = ~stays & ~(diagonal[largest] >= ALPHA * in_row)
  return jnp.where(stays, k, largest), has_two, is_zero


def _eliminate_one(work, k, conjugated):
  """Eliminate column k from the trailing submatrix by a 1x1 pivot."""
  below = jnp.arange(work.shape[-1]) > k
  pivot = work[k, k]
  column = jnp.where(below, work[:, k], 0)
  factor = column / jnp.where(pivot == 0, 1, pivot)
  work = work - factor[:, None] * conjugated(column)[None, :]
  return work.at[:, k].set(jnp.where(below, factor, work[:, k]))


def _eliminate_two(work, k, conjugated):
  """Eliminate columns k and k + 1 by a 2x2 pivot, scaled by its off-diagonal."""
  following = jnp.minimum(k + 1, work.shape[-1] - 1)
  below = jnp.arange(work.shape[-1]) > following
  beside = work[following, k]
  beside = jnp.where(beside == 0, 1, beside)
  first, second = (jnp.where(below, work[:, j], 0) for j in (k, following))
  upper = work[k, k] / conjugated(beside)
  lower = work[following, following] / beside
  determinant = upper * lower - 1
  left = (first * lower - second) / (conjugated(beside) * determinant)
  right = (second * upper - first) / (beside * determinant)
  product = left[:, None] * conjugated(first) + right[:, None] * conjugated(second)
  for column_index, factor in ((k, left), (following, right)):
    column = jnp.where(below, factor, work[:, column_index])
    product = product.at[:, column_index].set(work[:, column_index] - column)
  return work - product


def _factor(matrix, hermitian):
  """Return factors, pivots, and info: the first zero column, from 1, or 0."""
  size = matrix.shape[-1]
  conjugated = jnp.conj if hermitian else (lambda x: x)
  rows = jnp.arange(size)

  def step(state):
    k, work, pivots, info = state
    pivot, has_two, is_zero = _choose_pivot(work, k)
    info = jnp.where(is_zero & (info == 0), k + 1, info)
    order = _transposition(size, jnp.where(has_two, k + 1, k), pivot)
    remaining = rows >= k
    block = remaining[:, None] & remaining[None, :]
    work = jnp.where(block, work[order][:, order], work)
    one, two = (f(work, k, conjugated) for f in (_eliminate_one, _eliminate_two))
    work = jnp.where(has_two, two, jnp.where(is_zero, work, one))
    in_block = (rows == k) | (has_two & (rows == k + 1))
    number = jnp.where(has_two, -pivot - 1, pivot + 1)
    pivots = jnp.where(in_block, number, pivots).astype(jnp.int32)
    return jnp.where(has_two, k + 2, k + 1), work, pivots, info

  lower = jnp.tril(matrix)
  if hermitian:
    lower = lower - 1j * jnp.diag(jnp.imag(jnp.diagonal(lower)))
    lower = lower.astype(matrix.dtype)
  symmetric = lower + conjugated(jnp.tril(matrix, -1)).T
  start = (jnp.int32(0), symmetric, jnp.zeros(size, jnp.int32), jnp.int32(0))
  _, packed, pivots, info = lax.while_loop(lambda state: state[0] < size, step, start)
  return jnp.tril(packed), pivots, info


@op(aten.linalg_ldl_factor_ex, compiled=needs_no_check)
def _aten_linalg_ldl_factor_ex(self, hermitian=False, check_errors=False):
  """Factor a matrix by its lower triangle."""
  if self.size == 0:
    pivots = jnp.zeros(self.shape[:-1], jnp.int32)
    return self, pivots, jnp.zeros(self.shape[:-2], jnp.int32)
  hermitian = hermitian and jnp.iscomplexobj(self)
  factor = functools.partial(_factor, hermitian=hermitian)
  factors, pivots, info = jnp.vectorize(factor, signature="(n,n)->(n,n),(n),()")(self)
  check_info(info, "torch.linalg.ldl_factor_ex", check_errors)
  return factors, pivots, info


def _starts_of_pairs(pivots):
  """Return a mask of the first rows of 2x2 blocks: every other negative pivot."""

  def step(is_second, pivot):
    is_first = (pivot < 0) & ~is_second
    return is_first, is_first

  return lax.scan(step, jnp.zeros((), bool), pivots)[1]


def _solve(packed, pivots, right, conjugated):
  size = packed.shape[-1]
  rows = jnp.arange(size)
  starts = _starts_of_pairs(pivots)
  targets = jnp.abs(pivots) - 1

  def columns(k):
    """Return the columns k and k + 1 of L; the second is zero for a 1x1 block."""
    following = jnp.minimum(k + 1, size - 1)
    below = rows > jnp.where(starts[k], k + 1, k)
    second = jnp.where(below & starts[k], packed[:, following], 0)
    return jnp.where(below, packed[:, k], 0), second, following

  def exchange(k, solution):
    return solution[_transposition(size, jnp.where(starts[k], k + 1, k), targets[k])]

  def forward(k, solution):
    first, second, following = columns(k)
    result = exchange(k, solution)
    result = result - first[:, None] * result[k] - second[:, None] * result[following]
    return jnp.where(_is_block(starts, k), result, solution)

  def backward(step, solution):
    k = size - 1 - step
    first, second, following = columns(k)
    changed = solution.at[k].add(-(conjugated(first) @ solution))
    changed = changed.at[following].add(-(conjugated(second) @ solution))
    return jnp.where(_is_block(starts, k), exchange(k, changed), solution)

  solution = lax.fori_loop(0, size, forward, right)
  solution = _solve_blocks(packed, starts, solution, conjugated)
  return lax.fori_loop(0, size, backward, solution)


def _is_block(starts, k):
  """Return False for the second row of a 2x2 block, which the first row handles."""
  return ~((k > 0) & starts[k - 1])


def _solve_blocks(packed, starts, right, conjugated):
  """Solve D X = right, for all blocks at once."""
  diagonal = jnp.diagonal(packed)
  beside = jnp.where(starts, jnp.append(jnp.diagonal(packed, -1), 1), 1)
  upper = diagonal / conjugated(beside)
  lower = jnp.roll(diagonal, -1) / beside
  following = jnp.roll(right, -1, 0)
  # The 2x2 solution of LAPACK, scaled by the off-diagonal element.
  scaled_first = right / conjugated(beside)[:, None]
  scaled_second = following / beside[:, None]
  determinant = (upper * lower - 1)[:, None]
  first = (lower[:, None] * scaled_first - scaled_second) / determinant
  second = (upper[:, None] * scaled_second - scaled_first) / determinant
  is_second = jnp.roll(starts, 1)[:, None]
  single = right / diagonal[:, None]
  pairs = jnp.where(is_second, jnp.roll(second, 1, 0), single)
  return jnp.where(starts[:, None], first, pairs)


def _pivot_rules(LD, pivots, B, hermitian=False):
  most = LD.shape[-2] + 1
  message = (
    "Pivots given to ldl_solve must all satisfy |pivot| <= LD.size(-2). "
    "Did you properly pass the result of ldl_factor?"
  )
  yield Range(pivots, 1 - most, most, RuntimeError, message)


@op(aten.linalg_ldl_solve, rules=_pivot_rules)
def _aten_linalg_ldl_solve(LD, pivots, B, hermitian=False):
  batch = jnp.broadcast_shapes(LD.shape[:-2], B.shape[:-2])
  if B.size == 0 or LD.size == 0:
    return jnp.zeros(batch + B.shape[-2:], B.dtype)
  conjugated = jnp.conj if hermitian else (lambda x: x)
  solve = functools.partial(_solve, conjugated=conjugated)
  right = fill_if_wrong(B, jnp.abs(pivots) - 1, LD.shape[-1])
  return jnp.vectorize(solve, signature="(n,n),(n),(n,k)->(n,k)")(LD, pivots, right)
