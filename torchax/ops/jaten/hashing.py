"""Hashes of tensors: the exclusive or of the bits of their elements."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torchax.core import mappings
from torchax.ops.builtin import op


def _bits(array):
  """Elements as unsigned integers: those of int64, or of float64."""
  if not jnp.issubdtype(array.dtype, jnp.inexact):
    wide = array.astype(mappings.t2j_dtype(torch.int64))
    return wide.astype(mappings.t2j_dtype(torch.uint64))
  if not jax.config.jax_enable_x64:
    raise RuntimeError(
      "hash_tensor of floating-point numbers needs their bits in float64, but JAX's "
      'x64 mode is off. Call `jax.config.update("jax_enable_x64", True)` first.'
    )
  return lax.bitcast_convert_type(array.astype(jnp.float64), jnp.uint64)


@op("aten::hash_tensor")  # by name: newer than torch 2.11
def _aten_hash_tensor(self, dim=(), *, keepdim=False, mode=0):
  """Without x64 integers have the lower half of torch's hash.

  Raises:
    RuntimeError: an unknown mode; floating-point numbers without x64.
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
  bits = _bits(self)
  zero = np.zeros((), bits.dtype)
  hashed = lax.reduce(bits, zero, lax.bitwise_xor, axes)
  return jnp.expand_dims(hashed, axes) if keepdim else hashed
