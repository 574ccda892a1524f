"""Public name of `core/mappings.py`: dtypes and data between torch and JAX."""

from torchax.core.mappings import (
  JAX_DTYPE_TO_TORCH,
  NUMPY_UNSUPPORTED_DTYPES,
  TORCH_DTYPE_TO_JAX,
  j2t,
  j2t_dtype,
  t2j,
  t2j_dtype,
)

__all__ = [
  "JAX_DTYPE_TO_TORCH",
  "NUMPY_UNSUPPORTED_DTYPES",
  "TORCH_DTYPE_TO_JAX",
  "j2t",
  "j2t_dtype",
  "t2j",
  "t2j_dtype",
]
