"""Assertions of exported programs; they compute nothing and may raise."""

from torchax.core import mappings
from torchax.ops.builtin import Kind, op
from torchax.registry.names import aten
from torchax.tensor import is_traced


@op(aten._assert_scalar, kind=Kind.TENSORS)
def _aten__assert_scalar(self, assert_msg):
  """Raise RuntimeError if the number is zero."""
  if not self:
    raise RuntimeError(assert_msg)


_ZERO = "Expected Tensor with single nonzero value, but got zero"


@op(aten._assert_async, kind=Kind.TENSORS)
def _aten__assert_async(self, assert_msg=_ZERO):
  """Raise RuntimeError if the element is zero; a traced element is not checked."""
  if self.numel() != 1:
    raise RuntimeError(
      f"_assert_async expects one element, but got shape {list(self.shape)}."
    )
  if not is_traced(self) and not self:
    raise RuntimeError(assert_msg)


@op(aten._functional_assert_async, kind=Kind.TENSORS)
def _aten__functional_assert_async(self, assert_msg, dep_token):
  _aten__assert_async(self, assert_msg)
  return dep_token


@op(aten._assert_tensor_metadata, kind=Kind.TENSORS)
def _aten__assert_tensor_metadata(a, size=None, stride=None, dtype=None):
  """Raise RuntimeError if the tensor has another size or dtype.

  Strides are not compared, because XLA chooses the layout. A 64-bit dtype equals the
  dtype that JAX stores instead.
  """
  if size is not None and tuple(size) != tuple(a.shape):
    raise RuntimeError(
      f"Tensor sizes mismatch! Expected: {list(size)}, got: {list(a.shape)}."
    )
  if dtype is not None and mappings.t2j_dtype(dtype) != mappings.t2j_dtype(a.dtype):
    raise RuntimeError(f"Tensor dtype mismatch! Expected: {dtype}, got: {a.dtype}.")
