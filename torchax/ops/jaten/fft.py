"""Fourier transforms: the three operations of `torch.fft`, and their frequencies.

torch passes the normalization as a number with the same meaning in both directions.
JAX takes the name of the direction that has the factor.
"""

import jax.numpy as jnp
import torch
from jax import lax

from torchax.core import mappings
from torchax.ops.builtin import op
from torchax.registry.names import aten

# ATen's fft_norm_mode: no factor, 1 / sqrt(n), 1 / n.
_FORWARD_NORM = ("backward", "ortho", "forward")
_INVERSE_NORM = ("forward", "ortho", "backward")


@op(aten._fft_c2c)
def _aten__fft_c2c(self, dim, normalization, forward):
  if not dim:
    return self
  if forward:
    return jnp.fft.fftn(self, axes=dim, norm=_FORWARD_NORM[normalization])
  return jnp.fft.ifftn(self, axes=dim, norm=_INVERSE_NORM[normalization])


@op(aten._fft_r2c)
def _aten__fft_r2c(self, dim, normalization, onesided):
  """Transform real numbers; `onesided` omits the redundant half of the last `dim`."""
  transform = jnp.fft.rfftn if onesided else jnp.fft.fftn
  return transform(self, axes=dim, norm=_FORWARD_NORM[normalization])


@op(aten._fft_c2r)
def _aten__fft_c2r(self, dim, normalization, last_dim_size):
  """Transform to real numbers; the input has half of the last `dim`."""
  sizes = [self.shape[axis] for axis in dim[:-1]] + [last_dim_size]
  return jnp.fft.irfftn(self, sizes, dim, norm=_INVERSE_NORM[normalization])


@op(aten.fft_fftfreq, static=("d",))
def _aten_fft_fftfreq(n, d=1.0, *, dtype=None):
  index = lax.iota(jnp.int32, n)
  return _frequencies(index - n * (index >= (n + 1) // 2), n, d, dtype)


@op(aten.fft_rfftfreq, static=("d",))
def _aten_fft_rfftfreq(n, d=1.0, *, dtype=None):
  return _frequencies(lax.iota(jnp.int32, n // 2 + 1), n, d, dtype)


def _frequencies(index, n, d, dtype):
  target = mappings.t2j_dtype(dtype or torch.get_default_dtype())
  return index.astype(target) * (1 / (n * d))
