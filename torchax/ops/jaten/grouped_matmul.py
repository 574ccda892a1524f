"""Products of groups: each group of rows or columns with a matrix of its own.

This is how a mixture of experts multiplies: sorted by expert, the words of each expert
are one group. Groups are given by the offsets at which they end. Products of whole
matrices are in `matmul.py`.
"""

import jax.numpy as jnp
from jax import lax

from torchax.core import mappings
from torchax.ops.builtin import op
from torchax.registry.names import aten

# Rows of the left matrix and columns of the right one are groups of the inner
# dimension, each of which gives a matrix.
_INNER_GROUPS = lax.RaggedDotDimensionNumbers(
  dot_dimension_numbers=(((1,), (0,)), ((), ())),
  lhs_ragged_dimensions=[1],
  rhs_group_dimensions=[],
)


def _require_grouped(self, mat2, offs, bias, out_dtype) -> None:
  """Raises where torch does."""
  shapes = f"got shapes {self.shape} and {mat2.shape}"
  if self.ndim not in (2, 3) or mat2.ndim not in (2, 3):
    raise RuntimeError(
      f"_grouped_mm expects matrices of 2 or 3 dimensions, but {shapes}."
    )
  if self.dtype != mat2.dtype:
    raise RuntimeError(
      f"_grouped_mm expects matrices of one dtype, but got {self.dtype} and "
      f"{mat2.dtype}. Convert one of them with `.to(...)`."
    )
  if not jnp.issubdtype(self.dtype, jnp.floating):
    raise RuntimeError(f"_grouped_mm expects floating point, but got {self.dtype}.")
  if self.shape[-1] != mat2.shape[-2]:
    raise RuntimeError(f"_grouped_mm expects one inner size, but {shapes}.")
  if (offs is None) != (self.ndim == mat2.ndim == 3):
    raise RuntimeError(
      "_grouped_mm expects `offs` exactly where one of the matrices has 2 dimensions, "
      f"but {shapes} {'without' if offs is None else 'and'} `offs`."
    )
  groups = [m.shape[0] for m in (self, mat2, offs) if m is not None and m.ndim != 2]
  if any(count != groups[0] for count in groups):
    raise RuntimeError(
      f"_grouped_mm expects one number of groups, but {shapes}"
      + (f" and {offs.shape[0]} offsets." if offs is not None else ".")
    )
  if offs is not None and offs.dtype != jnp.int32:
    raise RuntimeError(f"_grouped_mm expects `offs` in int32, but got {offs.dtype}.")
  if bias is not None:
    raise RuntimeError("_grouped_mm has no bias in torch; add it to the result.")
  if out_dtype is not None and mappings.t2j_dtype(out_dtype) != self.dtype:
    raise RuntimeError(
      f"_grouped_mm returns the dtype of the matrices, {self.dtype}, but "
      f"out_dtype={out_dtype} was asked for. Convert the result."
    )


@op(aten._grouped_mm)
def _aten__grouped_mm(self, mat2, offs=None, bias=None, out_dtype=None):
  """What is past the last offset is zero, where torch leaves it unwritten."""
  _require_grouped(self, mat2, offs, bias, out_dtype)
  if offs is None:
    return jnp.matmul(self, mat2)
  sizes = jnp.diff(offs, prepend=0)
  if self.ndim == mat2.ndim:
    return lax.ragged_dot_general(self, mat2, sizes, _INNER_GROUPS)
  if self.ndim == 2:
    return lax.ragged_dot(self, mat2, sizes)
  columns = lax.ragged_dot(mat2.T, jnp.swapaxes(self, 1, 2), sizes)
  return columns.T


# The operations that the library transformers puts in place of `_grouped_mm` while
# torch.compile traces.


@op("transformers::grouped_mm_fallback")
def _grouped_mm_fallback(input, weight, offs):
  return lax.ragged_dot(input, weight, jnp.diff(offs, prepend=0))


@op("transformers::grouped_mm_fallback_backward")
def _grouped_mm_fallback_backward(input, weight, offs, grad_output):
  sizes = jnp.diff(offs, prepend=0)
  grad_input = lax.ragged_dot(grad_output, jnp.swapaxes(weight, 1, 2), sizes)
  grad_weight = lax.ragged_dot_general(input.T, grad_output, sizes, _INNER_GROUPS)
  return grad_input, grad_weight
