"""Bitwise logic and shifts of integers and bools.

`__and__`, `__or__` and `__xor__` are the bitwise operators, which for bools are the
logical ones; `logical_*` of any dtype is in `pointwise.py`.
"""

import jax.numpy as jnp
from jax import lax

from torchax.ops.builtin import op
from torchax.ops.jaten import _on_host
from torchax.ops.promotion import promote
from torchax.registry.names import aten


def _integers(name, self, other):
  """Both operands in one integer dtype and shape.

  Raises:
    NotImplementedError: a floating-point or complex operand.
  """
  left, right = promote(self, other)
  if jnp.issubdtype(left.dtype, jnp.inexact):
    raise NotImplementedError(
      f"{name} expects integers or bools, but got operands that promote to "
      f"{left.dtype}. Convert them with `.to(torch.int64)` first."
    )
  return jnp.broadcast_arrays(left, right)


@op(aten.bitwise_and, aten.__and__, on_host=_on_host.POINTWISE["bitwise_and"])
def _aten_bitwise_and(self, other):
  return lax.bitwise_and(*_integers("bitwise_and", self, other))


@op(aten.bitwise_or, aten.__or__, on_host=_on_host.POINTWISE["bitwise_or"])
def _aten_bitwise_or(self, other):
  return lax.bitwise_or(*_integers("bitwise_or", self, other))


@op(aten.bitwise_xor, aten.__xor__)
def _aten_bitwise_xor(self, other):
  return lax.bitwise_xor(*_integers("bitwise_xor", self, other))


@op(aten.bitwise_not, on_host=_on_host.POINTWISE["bitwise_not"])
def _aten_bitwise_not(self):
  if jnp.issubdtype(self.dtype, jnp.inexact):
    raise NotImplementedError(
      f"bitwise_not expects integers or bools, but got {self.dtype}. Convert the "
      "tensor with `.to(torch.int64)` first."
    )
  return lax.bitwise_not(self)


@op(aten.bitwise_left_shift, aten.__lshift__)
def _aten_bitwise_left_shift(self, other):
  """A count below 0, or not below the width, shifts every bit out."""
  return lax.shift_left(*_integers("bitwise_left_shift", self, other))


@op(aten.bitwise_right_shift, aten.__rshift__)
def _aten_bitwise_right_shift(self, other):
  """Keeps the sign; a count out of range leaves only the sign."""
  left, right = _integers("bitwise_right_shift", self, other)
  if jnp.issubdtype(left.dtype, jnp.unsignedinteger):
    return lax.shift_right_logical(left, right)
  return lax.shift_right_arithmetic(left, right)
