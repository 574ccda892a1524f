"""Fourier transforms: the three that `torch.fft` reduces to.

torch says the normalisation by number for either direction; JAX by the name of the
direction that carries the factor.
"""

import jax.numpy as jnp

from torchax.ops.builtin import op
from torchax.ops.names import aten

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
  """`onesided` keeps the half of the last of `dim` that determines the other."""
  transform = jnp.fft.rfftn if onesided else jnp.fft.fftn
  return transform(self, axes=dim, norm=_FORWARD_NORM[normalization])


@op(aten._fft_c2r)
def _aten__fft_c2r(self, dim, normalization, last_dim_size):
  """Completes the last of `dim`, of which half is given, to `last_dim_size`."""
  sizes = [self.shape[axis] for axis in dim[:-1]] + [last_dim_size]
  return jnp.fft.irfftn(self, sizes, dim, norm=_INVERSE_NORM[normalization])
