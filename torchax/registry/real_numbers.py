"""Operations that torch defines for real numbers only.

They compare, round, or compute functions of real arguments. JAX accepts complex numbers
in many of them, with its own order or meaning. `dispatch/lowering.py` calls `require`.
"""

import jax
import jax.numpy as jnp
import torch

from torchax.errors import WrongDtypeError

_NAMES = """
_adaptive_avg_pool2d _adaptive_avg_pool3d _cdist_forward _log_softmax _prelu_kernel
_safe_softmax _softmax _upsample_bilinear2d_aa _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d adaptive_max_pool2d
adaptive_max_pool3d amax amin aminmax argmax argmin atan2 avg_pool2d avg_pool3d
binary_cross_entropy binary_cross_entropy_with_logits bucketize ceil celu copysign
cummax cummin deg2rad digamma elu erf erfc erfinv floor floor_divide fmod frac
fractional_max_pool2d fractional_max_pool3d gelu glu grid_sampler_2d grid_sampler_3d
hardshrink hardsigmoid hardswish hardtanh heaviside histc huber_loss hypot i0 igamma
igammac kthvalue leaky_relu lgamma log_sigmoid_forward logaddexp2 logit max
max_pool2d_with_indices max_pool3d_with_indices median min mish mode multi_margin_loss
multilabel_margin_loss_forward mvlgamma nanmedian nansum nextafter nll_loss2d_forward
nll_loss_forward polygamma rad2deg relu remainder round searchsorted sign signbit
smooth_l1_loss softplus softshrink sort special_airy_ai special_bessel_j0
special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
special_chebyshev_polynomial_u special_chebyshev_polynomial_v
special_chebyshev_polynomial_w special_entr special_erfcx special_hermite_polynomial_h
special_hermite_polynomial_he special_i0e special_i1 special_i1e
special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr
special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_xlog1py
special_zeta threshold topk trunc upsample_bicubic2d upsample_bilinear2d
upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
upsample_trilinear3d xlogy
"""
REAL = frozenset(f"aten.{name}" for name in _NAMES.split())
"""Packets whose CPU kernel in torch raises for complex numbers."""

_ROUNDING_DIVISIONS = ("aten.div.Tensor_mode", "aten.div.Scalar_mode")
# Python replaces a TypeError of an operator, such as WrongDtypeError, by its own.
_PYTHON_OPERATORS = ("aten.remainder", "aten.fmod", "aten.div", "aten.floor_divide")


def may_refuse_complex(name: str) -> bool:
  """Return True if the overload of this name may raise for complex numbers."""
  packet = name.rpartition(".")[0].replace("._foreach_", ".")
  return packet in REAL or name in _ROUNDING_DIVISIONS


def require(name: str, args, kwargs) -> None:
  """Raise if an argument of an operation is complex.

  Args:
    name: name of the overload.
    args, kwargs: its arguments, tensors or arrays.

  Raises:
    WrongDtypeError: an argument is complex.
    NotImplementedError: the same, for a Python operator such as `%`.
  """
  if name in _ROUNDING_DIVISIONS and kwargs.get("rounding_mode") is None:
    return
  for value in jax.tree.leaves((list(args), dict(kwargs))):
    dtype = getattr(value, "dtype", type(value))
    if isinstance(dtype, torch.dtype):
      is_complex = dtype.is_complex
    else:
      is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    if is_complex:
      packet = name.rpartition(".")[0]
      error = NotImplementedError if packet in _PYTHON_OPERATORS else WrongDtypeError
      dtype_name = str(dtype) if hasattr(value, "dtype") else "complex"
      raise error(
        f"{packet} is not defined for complex numbers, but got "
        f"{dtype_name.removeprefix('torch.')}. Take `.real`, `.imag` or `.abs()` first."
      )
