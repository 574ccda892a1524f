"""Matrix products, grouped products, and pairwise distances.

The operands and the result of an ATen product have one dtype: bfloat16 products
accumulate in float32 and round once, integers stay integers. Precision is JAX's
`default_matmul_precision`. Factorizations are in `solve.py`.
"""

import functools
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from torchax.core import mappings
from torchax.ops.builtin import op
from torchax.ops.jaten import _numbers
from torchax.ops.jaten._arguments import factor_in, require_factor, require_one_dtype
from torchax.ops.jaten.reduction import norm_of_magnitudes
from torchax.ops.promotion import is_exact, promote, widen
from torchax.registry.names import aten

# torch's threshold for computing Euclidean distances through one matrix product.
DISTANCE_MATMUL_SIZE = 25


def _product(name, left, right, alpha=1):
  """Return the product, of halves in float32 if a factor `alpha` is to scale it."""
  require_one_dtype(name, left, right)
  return jnp.matmul(left, right, preferred_element_type=_accumulator(left, alpha))


def _accumulator(array, alpha):
  return None if _is_one(alpha) else widen(array).dtype


def _is_one(factor) -> bool:
  return isinstance(factor, int | float) and factor == 1


def _scale(array, factor):
  """Return `factor * array` in the dtype of `array`; 0 gives zeros even for NaN."""
  if _is_one(factor):
    return array
  factor = factor_in(array.dtype, factor)
  return jnp.where(factor == 0, jnp.zeros_like(array), factor * array)


def _scale_product(product, alpha):
  """Return `alpha * product`, where 0 * NaN is NaN: only `beta` drops its operand."""
  if _is_one(alpha):
    return product
  if is_exact(product) and not is_exact(alpha):
    return _scale(product, alpha)
  return product * factor_in(product.dtype, alpha)


def _affine(self, product, beta, alpha):
  if self.ndim > product.ndim:
    raise RuntimeError(
      f"expand: the number of sizes of the result, {list(product.shape)}, must be "
      f"greater or equal to that of the tensor added, {list(self.shape)}."
    )
  # Factors are not rounded to half precision, nor is the product with one.
  total = _scale(widen(self), beta) + _scale_product(widen(product), alpha)
  return total.astype(self.dtype)


# --- Products of two ----------------------------------------------------------------


@op(aten.mm.default)
def _aten_mm(self, mat2):
  return _product("mm", self, mat2)


@op(aten.bmm.default)
def _aten_bmm(self, mat2):
  return _product("bmm", self, mat2)


def _wide_product(left, right, out_dtype):
  return jnp.matmul(left, right, preferred_element_type=mappings.t2j_dtype(out_dtype))


@op(aten.mm.dtype, aten.bmm.dtype)
def _aten_mm_dtype(self, mat2, out_dtype):
  """Return the accumulator in `out_dtype` instead of rounding it."""
  return _wide_product(self, mat2, out_dtype)


@op(aten.mv)
def _aten_mv(self, vec):
  return _product("mv", self, vec)


@op(aten.dot)
def _aten_dot(self, tensor):
  return _product("dot", self, tensor)


@op(aten.vdot)
def _aten_vdot(self, other):
  return _aten_dot(jnp.conj(self), other)


@op(aten.matmul)
def _aten_matmul(self, other):
  return _product("matmul", self, other)


@op(aten.outer, aten.ger)
def _aten_outer(self, vec2):
  left, right = promote(self, vec2)
  return left[:, None] * right[None, :]


@op(aten.linear)
def linear(input, weight, bias=None):
  product = _product("linear", input, weight.T)
  return product if bias is None else product + bias


@op(aten.tensordot)
def _aten_tensordot(self, other, dims_self, dims_other):
  return jnp.tensordot(self, other, axes=(tuple(dims_self), tuple(dims_other)))


# --- Products with a sum ------------------------------------------------------------


@op(aten.addmm.default, aten.addmv)
def _aten_addmm(self, mat1, mat2, beta=1, alpha=1):
  """Return `beta * self + alpha * (mat1 @ mat2)`; for addmv, `mat2` is a vector."""
  require_one_dtype("addmm", self, mat1, mat2)
  return _affine(self, _product("addmm", mat1, mat2, alpha), beta, alpha)


@op(aten.addmm.dtype, aten.baddbmm.dtype)
def _aten_addmm_dtype(self, mat1, mat2, out_dtype, beta=1, alpha=1):
  product = _wide_product(mat1, mat2, out_dtype)
  return _affine(self.astype(product.dtype), product, beta, alpha)


@op(aten.baddbmm.default)
def _aten_baddbmm(self, batch1, batch2, beta=1, alpha=1):
  require_one_dtype("baddbmm", self, batch1, batch2)
  return _affine(self, _product("baddbmm", batch1, batch2, alpha), beta, alpha)


@op(aten.addbmm)
def _aten_addbmm(self, batch1, batch2, beta=1, alpha=1):
  """Sum the products of all batches, in one contraction."""
  require_one_dtype("addbmm", self, batch1, batch2)
  dtype = _accumulator(self, alpha)
  total = jnp.einsum("bij,bjk->ik", batch1, batch2, preferred_element_type=dtype)
  return _affine(self, total, beta, alpha)


@op(aten.addr)
def _aten_addr(self, vec1, vec2, beta=1, alpha=1):
  self, vec1, vec2 = promote(self, vec1, vec2)
  require_factor("beta", self.dtype, beta)
  require_factor("alpha", self.dtype, alpha)
  return _affine(self, _aten_outer(widen(vec1), widen(vec2)), beta, alpha)


@op(aten.sparse_sampled_addmm)
def _aten_sparse_addmm(self, mat1, mat2, beta=1, alpha=1):
  """Use the product only where `self` is nonzero: the dense form of the operation."""
  product = jnp.where(self != 0, _product("sampled_addmm", mat1, mat2), 0)
  return _affine(self, product, beta, alpha)


@op(aten._trilinear)
def _aten_trilinear(i1, i2, i3, expand1, expand2, expand3, sumdim, unroll_dim=1):
  """Expand each operand at its `expand` dims, multiply, and sum over `sumdim`.

  `unroll_dim` only controls torch's loop.
  """
  factors = (
    jnp.expand_dims(operand, tuple(dims))
    for operand, dims in ((i1, expand1), (i2, expand2), (i3, expand3))
  )
  product = functools.reduce(operator.mul, factors)
  return jnp.sum(product, axis=tuple(sumdim))


# --- Contractions -------------------------------------------------------------------


def _sublist_equation(terms: Sequence[Sequence[int]]) -> str:
  """Translate torch's numeric subscripts; 0 … 51 are the letters A … Z, a … z."""

  def letter(subscript):
    if subscript is Ellipsis:
      return "..."
    return chr(ord("A") + subscript if subscript < 26 else ord("a") + subscript - 26)

  return ",".join("".join(map(letter, term)) for term in terms)


def einsum(equation, *operands) -> jax.Array:
  """Compute an Einstein summation of arrays, with either of torch's signatures.

  Args:
    equation: subscripts such as `"bij,bjk->bik"`, or the first operand of the form
      `einsum(operand, [0, 1], operand, [1, 2], ..., [0, 2])`.
    *operands: the arrays, or one sequence of them.

  Raises:
    ValueError: there is no operand.

  >>> einsum("ij,ij->", jnp.ones((2, 3)), jnp.ones((2, 3))).item()
  6.0
  """
  if not isinstance(equation, str):
    arguments = (equation, *operands)
    pairs = len(arguments) // 2 * 2
    output = "->" + _sublist_equation(arguments[pairs:]) if len(arguments) % 2 else ""
    equation = _sublist_equation(arguments[1:pairs:2]) + output
    operands = arguments[0:pairs:2]
  elif len(operands) == 1 and isinstance(operands[0], list | tuple):
    operands = tuple(operands[0])
  if not operands:
    raise ValueError("einsum(): must provide at least one operand")
  return jnp.einsum(equation, *promote(*operands), optimize="optimal")


@op(aten.einsum)
def _aten_einsum(equation, tensors, path=None):
  return einsum(equation, *tensors)


# --- Distances ----------------------------------------------------------------------


def _norm_of_last(difference, p):
  """Return the p-norm over the last dimension; p may be 0 or infinite."""
  magnitude = jnp.abs(difference)
  if not isinstance(p, tuple) and math.isinf(p):
    return jnp.max(magnitude, axis=-1, initial=0)
  return norm_of_magnitudes(magnitude, p, -1, False)


def _norm_gradient(difference, norm, p):
  """Return d norm / d difference; at the origin it is 0, torch's subgradient."""
  is_plain = not isinstance(p, tuple)
  if is_plain and p == 0:
    return jnp.zeros_like(difference)
  if is_plain and p == 1:
    return jnp.sign(difference)
  norm = norm[..., None]
  magnitude = jnp.abs(difference)
  if is_plain and math.isinf(p):
    return jnp.where(magnitude == norm, jnp.sign(difference), 0)
  unit = jnp.where(norm == 0, 1, norm)
  less = p[0] - 1 if isinstance(p, tuple) else p - 1
  steep = jnp.where(magnitude == 0, 1, magnitude / unit) ** less
  gradient = jnp.sign(difference) * steep
  return jnp.where((norm == 0) | (magnitude == 0), 0, gradient)


def _pairwise_difference(x1, x2):
  return x1[..., :, None, :] - x2[..., None, :, :]


@op(aten._euclidean_dist)
def _aten_euclidean_dist(x1, x2):
  """Compute √(|a|² + |b|² - 2ab) as one matrix product.

  It loses precision by cancellation if rows are near each other, as in torch.
  """
  squared1 = jnp.sum(jnp.square(x1), axis=-1, keepdims=True)
  squared2 = jnp.sum(jnp.square(x2), axis=-1, keepdims=True)
  left = jnp.concatenate([-2 * x1, squared1, jnp.ones_like(squared1)], axis=-1)
  right = jnp.concatenate([x2, jnp.ones_like(squared2), squared2], axis=-1)
  squared = jnp.matmul(left, jnp.swapaxes(right, -1, -2))
  return jnp.sqrt(jnp.maximum(squared, 0))


def _check_cdist(x1, x2, p=2.0, compute_mode=None):
  if p < 0:
    raise RuntimeError(f"cdist only supports non-negative p values, but got p={p}.")


_prepare_p = _numbers.norm_order("p")


@op(aten._cdist_forward, check=_check_cdist, static=("p",), prepare=_prepare_p)
def _aten_cdist_forward(x1, x2, p, compute_mode=None):
  # compute_mode: None or 0 decides by size, 1 always uses the product, 2 never.
  is_large = max(x1.shape[-2], x2.shape[-2]) > DISTANCE_MATMUL_SIZE
  if p == 2 and (compute_mode == 1 or (not compute_mode and is_large)):
    return _aten_euclidean_dist(x1, x2)
  return _norm_of_last(_pairwise_difference(x1, x2), p)


@op(aten.cdist, check=_check_cdist, static=("p",), prepare=_prepare_p)
def _aten_cdist(x1, x2, p=2.0, compute_mode=None):
  return _aten_cdist_forward(x1, x2, p, compute_mode)


@op(aten._cdist_backward, static=("p",), prepare=_prepare_p)
def _aten_cdist_backward(grad, x1, x2, p, cdist):
  """Return the gradient of `x1`; for that of `x2` torch swaps the operands."""
  slope = _norm_gradient(_pairwise_difference(x1, x2), cdist, p)
  gradient = jnp.sum(grad[..., None] * slope, axis=-2)
  extra = tuple(range(gradient.ndim - x1.ndim))
  return jnp.sum(gradient, axis=extra)


def _upper_pairs(rows: int):
  return jnp.triu_indices(rows, k=1)


@op(aten._pdist_forward, static=("p",), prepare=_prepare_p)
def _aten__pdist_forward(self, p=2.0):
  """Return the distances of all pairs i < j of rows, in upper-triangle order."""
  first, second = _upper_pairs(self.shape[0])
  return _norm_of_last(self[first] - self[second], p)


@op(aten._pdist_backward, static=("p",), prepare=_prepare_p)
def _aten__pdist_backward(grad, self, p, pdist):
  first, second = _upper_pairs(self.shape[0])
  slope = grad[:, None] * _norm_gradient(self[first] - self[second], pdist, p)
  return jnp.zeros_like(self).at[first].add(slope).at[second].add(-slope)


# --- Grouped products ---------------------------------------------------------------
# Each group of rows or columns has a matrix of its own. A mixture of experts uses it:
# the tokens, sorted by expert, form one group per expert. `offs` has the end of each.

# The groups divide the inner dimension; each gives a matrix of the result.
_INNER_GROUPS = lax.RaggedDotDimensionNumbers(
  dot_dimension_numbers=(((1,), (0,)), ((), ())),
  lhs_ragged_dimensions=[1],
  rhs_group_dimensions=[],
)


def require_groups(left, right, offs, bias) -> None:
  """Raise torch's errors for operands that do not fit each other or their offsets.

  Raises:
    RuntimeError: a dimension, a size or the offsets are wrong, or there is a bias.
  """
  is_flat = (left.ndim == 2, right.ndim == 2)
  stacked = [matrices.shape[0] for matrices in (left, right) if matrices.ndim == 3]
  if offs is not None:
    stacked += [*offs.shape]
  for is_right, message in (
    (left.ndim in (2, 3), "mat_a has to be 2 or 3d"),
    (right.ndim in (2, 3), "mat_b has to be 2 or 3d"),
    (
      any(is_flat) == (offs is not None),
      "Have to provide offsets if there is a 2d matrix, or no offset if both matrices "
      "are 3d",
    ),
    (
      all(is_flat) or left.shape[-1] == right.shape[-2],
      "contraction dimension of mat_a and mat_b must match",
    ),
    (offs is None or offs.ndim == 1, "offs has to be 1D"),
    (offs is None or offs.dtype == jnp.int32, "Offsets have to be int32"),
    (
      len(set(stacked)) <= 1,
      f"{'matrix batch sizes have' if any(is_flat) else 'batched dimension has'} "
      "to match",
    ),
    (bias is None, "Bias not supported yet"),
  ):
    if not is_right:
      raise RuntimeError(message)


def grouped_product(left, right, offs, dtype):
  """Multiply group by group; rows past the last offset are 0, not uninitialized.

  Args:
    left, right: matrices whose rows, columns or inner dimension are grouped, or stacks
      of matrices; they fit (`require_groups`).
    offs: int32 array with the end of each group; None for two stacks.
    dtype: dtype of the sums and of the result.
  """
  if offs is None:
    dims = (((2,), (1,)), ((0,), (0,)))
    return lax.dot_general(left, right, dims, preferred_element_type=dtype)
  sizes = jnp.diff(offs, prepend=0)
  options: dict = {"preferred_element_type": dtype}
  if left.ndim == right.ndim:
    return lax.ragged_dot_general(left, right, sizes, _INNER_GROUPS, **options)
  if left.ndim == 2:
    return lax.ragged_dot(left, right, sizes, **options)
  return lax.ragged_dot(right.T, jnp.swapaxes(left, 1, 2), sizes, **options).T


@op(aten._grouped_mm, meta=False)
def _aten__grouped_mm(self, mat2, offs=None, bias=None, out_dtype=None):
  """Multiply group by group, in any floating-point dtype."""
  if self.dtype != mat2.dtype or not jnp.issubdtype(self.dtype, jnp.floating):
    raise TypeError(  # dispatch raises torch's error in its place
      "_grouped_mm expects matrices of one floating-point dtype, but got "
      f"{self.dtype} and {mat2.dtype}."
    )
  require_groups(self, mat2, offs, bias)
  if out_dtype not in (None, mappings.j2t_dtype(self.dtype)):
    raise RuntimeError("Grouped gemm output dtype must match `mat_a` dtype")
  return grouped_product(self, mat2, offs, None)


# The library transformers uses these instead of `_grouped_mm` under torch.compile.


@op("transformers::grouped_mm_fallback")
def _grouped_mm_fallback(input, weight, offs):
  return lax.ragged_dot(input, weight, jnp.diff(offs, prepend=0))


@op("transformers::grouped_mm_fallback_backward")
def _grouped_mm_fallback_backward(input, weight, offs, grad_output):
  sizes = jnp.diff(offs, prepend=0)
  grad_input = lax.ragged_dot(grad_output, jnp.swapaxes(weight, 1, 2), sizes)
  grad_weight = lax.ragged_dot_general(input.T, grad_output, sizes, _INNER_GROUPS)
  return grad_input, grad_weight
