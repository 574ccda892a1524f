"""Rules for operations on values: elementwise ones, reductions, products, sorting.

They fill padding with a value that does not change the result: zero in a sum, the
smallest number in a maximum.
"""

from typing import Any

import numpy as np
from jax import lax

from torchax.core.mappings import limits
from torchax.rng import threefry
from torchax.tracing.padded.program import (
  Operation,
  Size,
  fill,
  is_sized,
  is_true,
  rule,
  true_index,
)

_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy cos cosh
digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max
min mul name ne neg nextafter not one_minus_square optimization_barrier or polygamma
polynomial population_count pow pvary random_gamma_grad real reduce_precision
regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
"""


rule(*_ELEMENTWISE.split())(Operation.bind)


@rule("with_derivative")
def _with_derivative(operation: Operation, *operands) -> list:
  return list(operands[: operation.params["counts"][0]])


@rule("with_derivatives_of")
def _with_derivatives_of(operation: Operation, *operands) -> list:
  return list(operands[-operation.params["count"] :])


_ADDITIVE = {"reduce_sum", "reduce_window_sum", "cumsum", "reduce_or", "reduce_xor"}


def neutral(name: str, dtype) -> Any:
  """Return the padding that changes no result of a reduction."""
  if name in _ADDITIVE:
    return 0
  if name in ("reduce_prod", "cumprod"):
    return 1
  if name == "reduce_and":
    return ~np.zeros((), dtype)
  least, largest = limits(dtype)
  return largest if name.endswith("min") else least


_REDUCTIONS = ["sum", "prod", "max", "min", "and", "or", "xor"]


@rule("argmax", "argmin", *[f"reduce_{name}" for name in _REDUCTIONS])
def _reduce(operation: Operation, operand) -> list:
  value = neutral(operation.name, operand.dtype)
  axes = operation.params["axes"]
  return operation.bind(fill(operand, operation.inputs[0], axes, value))


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulate(operation: Operation, operand) -> list:
  if operation.params["reverse"]:
    value = neutral(operation.name, operand.dtype)
    operand = fill(operand, operation.inputs[0], (operation.params["axis"],), value)
  return operation.bind(operand)


@rule("reduce")
def _reduce_by_function(operation: Operation, *operands) -> list:
  count = len(operands) // 2
  arrays, initial = operands[:count], operands[count:]
  axes = operation.params["dimensions"]
  filled = [
    fill(array, shape, axes, value)
    for array, shape, value in zip(arrays, operation.inputs, initial)
  ]
  return operation.bind(*filled, *initial)


@rule("dot_general")
def _dot_general(operation: Operation, left, right) -> list:
  contracted, _ = operation.params["dimension_numbers"]
  shapes = operation.inputs
  # Both operands: zero times an infinite padding is NaN.
  left = fill(left, shapes[0], contracted[0], 0)
  right = fill(right, shapes[1], contracted[1], 0)
  return operation.bind(left, right)


@rule("sort")
def _sort(operation: Operation, *operands) -> list:
  params, shape = operation.params, operation.inputs[0]
  axis = params["dimension"]
  if not isinstance(shape[axis], Size):
    return operation.bind(*operands)
  is_padding = ~is_true(shape, axis, operands[0].shape)
  _, *results = lax.sort(
    (is_padding.astype(np.int32), *operands),
    dimension=axis,
    is_stable=params["is_stable"],
    num_keys=params["num_keys"] + 1,
  )
  return results


@rule("top_k", sized=("k",))
def _top_k(operation: Operation, operand) -> list:
  axis = operation.params.get("axis", operand.ndim - 1)
  operand = fill(operand, operation.inputs[0], (axis,), limits(operand.dtype)[0])
  return operation.bind(operand)


# Operations on whole matrices, which may be padded along their batch axes.
@rule(
  "cholesky",
  "eigh",
  "householder_product",
  "lu",
  "lu_pivots_to_permutation",
  "qr",
  "svd",
  "triangular_solve",
  "geqrf",
)
def _matrices(operation: Operation, *operands) -> list:
  if any(is_sized(shape[-2:]) for shape in operation.inputs):
    raise operation.refuse("the matrices themselves are padded")
  return operation.bind(*operands)


@rule("random_bits", sized=("shape",))
def _random_bits(operation: Operation, key) -> list:
  """Compute the bits of each element from its index at the true size."""
  index = true_index(operation.outputs[0], np.uint32)
  bits = threefry.bits_at(key, index, operation.params["bit_width"])
  if bits is None:
    raise operation.refuse("only draws of threefry2x32 can be computed by index")
  return [bits]
