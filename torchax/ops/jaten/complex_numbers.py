"""Complex numbers: made of two parts, and their direction."""

import math

import jax.numpy as jnp
from jax import lax

from torchax.ops.builtin import op
from torchax.ops.jaten._arguments import require_one_dtype
from torchax.ops.promotion import to_float
from torchax.registry.names import aten


@op(aten.complex)
def _aten_complex(real, imag):
  require_one_dtype("complex", real, imag)
  if real.dtype not in (jnp.float32, jnp.float64):
    raise NotImplementedError(
      "Expected both inputs to be Float or Double tensors, but got "
      f"{real.dtype}. JAX has no complex numbers of half precision."
    )
  return lax.complex(*jnp.broadcast_arrays(real, imag))


@op(aten.polar)
def _aten_polar(abs, angle):
  require_one_dtype("polar", abs, angle)
  return _aten_complex(abs * jnp.cos(angle), abs * jnp.sin(angle))


@op(aten.angle)
def _aten_angle(self):
  """Of a real number: 0, or pi where it is negative; NaN stays NaN."""
  if jnp.iscomplexobj(self):
    return jnp.angle(self)
  value = to_float(self)
  direction = jnp.where(value < 0, math.pi, 0.0).astype(value.dtype)
  return jnp.where(jnp.isnan(value), value, direction)
