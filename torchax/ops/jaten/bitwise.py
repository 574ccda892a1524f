"""Bitwise logic and shifts of integers and bools, and hashes of the bits of tensors.

`__and__`, `__or__` and `__xor__` are the bitwise operators; for bools they are the
logical ones. `logical_*` of any dtype is in `pointwise.py`.
"""

import jax.numpy as jnp
from jax import lax

from torchax.compat import jax_compat
from torchax.ops.builtin import op
from torchax.ops.jaten import _on_host
from torchax.ops.promotion import promote
from torchax.registry.names import aten


def _broadcast(self, other):
  """Promote and broadcast both operands to one dtype and shape."""
  return jnp.broadcast_arrays(*promote(self, other))


@op(aten.bitwise_and, aten.__and__, on_host=_on_host.POINTWISE["bitwise_and"])
def _aten_bitwise_and(self, other):
  return lax.bitwise_and(*_broadcast(self, other))


@op(aten.bitwise_or, aten.__or__, on_host=_on_host.POINTWISE["bitwise_or"])
def _aten_bitwise_or(self, other):
  return lax.bitwise_or(*_broadcast(self, other))


@op(aten.bitwise_xor, aten.__xor__)
def _aten_bitwise_xor(self, other):
  return lax.bitwise_xor(*_broadcast(self, other))


@op(aten.bitwise_not, on_host=_on_host.POINTWISE["bitwise_not"])
def _aten_bitwise_not(self):
  return lax.bitwise_not(self)


@op(aten.bitwise_left_shift, aten.__lshift__)
def _aten_bitwise_left_shift(self, other):
  """Shift left; a count below 0, or at least the width, gives 0."""
  return lax.shift_left(*_broadcast(self, other))


@op(aten.bitwise_right_shift, aten.__rshift__)
def _aten_bitwise_right_shift(self, other):
  """Shift right and keep the sign; a count out of range leaves only the sign."""
  left, right = _broadcast(self, other)
  if jnp.issubdtype(left.dtype, jnp.unsignedinteger):
    return lax.shift_right_logical(left, right)
  return lax.shift_right_arithmetic(left, right)


def _bits(array):
  """Return the bits of the elements as int64 or float64, in uint64."""
  wide = jnp.float64 if jnp.issubdtype(array.dtype, jnp.inexact) else jnp.int64
  return lax.bitcast_convert_type(array.astype(wide), jnp.uint64)


@op("aten::hash_tensor")  # by name: newer than torch 2.11
def _aten_hash_tensor(self, dim=(), *, keepdim=False, mode=0):
  """Compute the exclusive or of the bits of the elements.

  Raises:
    RuntimeError: an unknown mode.
    IndexError: a dimension of size 0 is reduced.
  """
  if mode != 0:
    raise RuntimeError(f"hash_tensor: expected mode=0, exclusive or, but got {mode}.")
  if jnp.iscomplexobj(self):
    raise NotImplementedError(f"hash_tensor is not implemented for {self.dtype}.")
  rank = max(self.ndim, 1)
  dims = dim or tuple(range(self.ndim))
  if any(not -rank <= d < rank for d in dims):
    raise IndexError(
      f"Dimension out of range: expected {dims} in [{-rank}, {rank - 1}]."
    )
  axes = tuple(sorted({d % rank for d in dims})) if self.ndim else ()
  if self.size == 0 and not dim:
    raise RuntimeError("hash_tensor: expected dim for a tensor without elements.")
  if any(self.shape[axis] == 0 for axis in axes):
    raise IndexError(
      f"hash_tensor: expected dims {axes} to have elements, but the shape is "
      f"{self.shape}."
    )
  with jax_compat.explicit_x64_dtypes("allow"):
    bits = _bits(self)
    zero = jnp.zeros((), bits.dtype)
    hashed = lax.reduce(bits, zero, lax.bitwise_xor, axes)
  return jnp.expand_dims(hashed, axes) if keepdim else hashed
