"""Dtypes and data between torch and JAX.

64-bit types follow JAX's x64 switch: with it off, int64, float64 and complex128
become their 32-bit forms, with one warning a process; they are never reinterpreted.
"""

import logging
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
import torch.utils.dlpack as torch_dlpack

from torchax.errors import MixedDeviceError, UnsupportedDtypeError

TORCH_DTYPE_TO_JAX = {
  None: None,
  torch.bool: jnp.dtype(jnp.bool_),
  torch.uint8: jnp.dtype(jnp.uint8),
  torch.uint16: jnp.dtype(jnp.uint16),
  torch.uint32: jnp.dtype(jnp.uint32),
  torch.uint64: jnp.dtype(jnp.uint64),
  torch.int8: jnp.dtype(jnp.int8),
  torch.int16: jnp.dtype(jnp.int16),
  torch.int32: jnp.dtype(jnp.int32),
  torch.int64: jnp.dtype(jnp.int64),
  torch.float16: jnp.dtype(jnp.float16),
  torch.bfloat16: jnp.dtype(jnp.bfloat16),
  torch.float32: jnp.dtype(jnp.float32),
  torch.float64: jnp.dtype(jnp.float64),
  torch.complex64: jnp.dtype(jnp.complex64),
  torch.complex128: jnp.dtype(jnp.complex128),
  torch.float8_e4m3fn: jnp.dtype(jnp.float8_e4m3fn),
  torch.float8_e5m2: jnp.dtype(jnp.float8_e5m2),
  torch.float8_e4m3fnuz: jnp.dtype(jnp.float8_e4m3fnuz),
  torch.float8_e5m2fnuz: jnp.dtype(jnp.float8_e5m2fnuz),
}

JAX_DTYPE_TO_TORCH = {jax_: torch_ for torch_, jax_ in TORCH_DTYPE_TO_JAX.items()}
# jnp.int4 and uint4 have no torch dtype that holds values: torch's are shells.
JAX_DTYPE_TO_TORCH[jnp.dtype(jnp.int4)] = torch.int8
JAX_DTYPE_TO_TORCH[jnp.dtype(jnp.uint4)] = torch.uint8

# Torch dtypes that `Tensor.numpy()` refuses: the bits travel as an integer of the
# same width and get their meaning back on the other side.
NUMPY_UNSUPPORTED_DTYPES = {
  torch.bfloat16: ml_dtypes.bfloat16,
  torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
  torch.float8_e5m2: ml_dtypes.float8_e5m2,
  torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
  torch.float8_e5m2fnuz: ml_dtypes.float8_e5m2fnuz,
}

_CARRIERS = {1: torch.uint8, 2: torch.int16}
_WIDE = frozenset({torch.int64, torch.uint64, torch.float64, torch.complex128})
_NARROWED = {
  jnp.dtype(jnp.int64): jnp.dtype(jnp.int32),
  jnp.dtype(jnp.uint64): jnp.dtype(jnp.uint32),
  jnp.dtype(jnp.float64): jnp.dtype(jnp.float32),
  jnp.dtype(jnp.complex128): jnp.dtype(jnp.complex64),
}
_warned_about_x64 = False


def t2j_dtype(dtype: torch.dtype | None) -> jnp.dtype | None:
  """The JAX dtype for a torch dtype, as wide as JAX's x64 switch allows.

  Raises:
    UnsupportedDtypeError: JAX has no such dtype (quantised types, for example).

  >>> t2j_dtype(torch.bfloat16)
  dtype(bfloat16)
  """
  try:
    jax_dtype = TORCH_DTYPE_TO_JAX[dtype]
  except (KeyError, TypeError):
    raise UnsupportedDtypeError(
      f"torchax has no JAX dtype for {dtype}. Convert the tensor to one of "
      f"{', '.join(str(known) for known in TORCH_DTYPE_TO_JAX if known)} first."
    ) from None
  if dtype in _WIDE and not jax.config.jax_enable_x64:
    return _NARROWED[jax_dtype]
  return jax_dtype


def j2t_dtype(dtype) -> torch.dtype:
  """The torch dtype for a JAX (numpy) dtype.

  Raises:
    UnsupportedDtypeError: torch has no such dtype; a typed PRNG key, for example.
  """
  try:
    return JAX_DTYPE_TO_TORCH[dtype]
  except (KeyError, TypeError):
    pass
  try:
    return JAX_DTYPE_TO_TORCH[jnp.dtype(dtype)]
  except (KeyError, TypeError):
    raise UnsupportedDtypeError(
      f"torch has no dtype for the JAX dtype {dtype}. A typed PRNG key is no tensor: "
      "pass it as `rng=` or to `env.rng_scope`."
    ) from None


def check_torch_tensor(tensor: torch.Tensor) -> None:
  """Raises UnsupportedDtypeError unless the tensor is strided and of a known dtype."""
  if tensor.layout is not torch.strided:
    raise UnsupportedDtypeError(
      f"torchax holds dense tensors, but got layout {tensor.layout}. "
      "Call `.to_dense()` first."
    )
  if tensor.is_quantized:
    raise UnsupportedDtypeError(
      f"torchax holds plain tensors, but got the quantised dtype {tensor.dtype}. "
      "Call `.dequantize()` first."
    )
  t2j_dtype(tensor.dtype)


def _warn_once_about_x64(dtype: torch.dtype) -> None:
  global _warned_about_x64
  if not _warned_about_x64:
    _warned_about_x64 = True
    warnings.warn(
      f"A {dtype} tensor becomes 32 bits wide: JAX's x64 mode is off. "
      'Call `jax.config.update("jax_enable_x64", True)` at the start, or '
      "`torchax.enable_accuracy_mode()`, to keep 64 bits. Said once a process.",
      stacklevel=4,
    )


def t2j(t: torch.Tensor, use_dlpack: bool = True) -> jax.Array:
  """Copies a CPU torch tensor into a JAX array on the default device.

  Args:
    t: a dense tensor of any shape on the CPU.
    use_dlpack: let DLPack carry the data; the result never aliases `t`.

  Returns:
    An array of the same shape; 64-bit integers that do not fit in 32 bits raise.

  Raises:
    UnsupportedDtypeError: sparse, quantised or of a dtype unknown to JAX.
    MixedDeviceError: not on the CPU.
    OverflowError: an int64 value that needs x64 mode.
  """
  check_torch_tensor(t)
  if t.device.type != "cpu":
    raise MixedDeviceError(
      f"Data moves to jax from the CPU, but got a tensor on {t.device}. "
      + ("It has no data." if t.is_meta else "Call `.cpu()` first.")
    )
  t = t.detach().resolve_conj().resolve_neg()
  jax_dtype = t2j_dtype(t.dtype)
  if t.dtype in _WIDE and not jax.config.jax_enable_x64:
    if t.dtype is torch.float64 or t.dtype is torch.complex128:
      _warn_once_about_x64(t.dtype)
    else:
      _check_fits(t, jax_dtype)
  return jnp.array(_to_numpy(t), dtype=jax_dtype)


def _check_fits(tensor: torch.Tensor, jax_dtype: jnp.dtype) -> None:
  values = tensor.numpy()
  limits = np.iinfo(jax_dtype)
  if values.size and (values.min() < limits.min or values.max() > limits.max):
    raise OverflowError(
      f"A {tensor.dtype} tensor holds {values.min()} … {values.max()}, which does not "
      f"fit in {jax_dtype}: JAX's x64 mode is off. Call "
      '`jax.config.update("jax_enable_x64", True)` first.'
    )


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
  carried = NUMPY_UNSUPPORTED_DTYPES.get(tensor.dtype)
  if carried is None:
    return tensor.numpy()
  carrier = _CARRIERS[tensor.element_size()]
  return tensor.contiguous().view(carrier).numpy().view(carried)


def j2t(x: jax.Array, use_dlpack: bool = True) -> torch.Tensor:
  """Copies a JAX array to a CPU torch tensor of the same shape and dtype.

  Args:
    x: a concrete array; one that is sharded is gathered.
    use_dlpack: let DLPack carry the data where it can; the result is a copy.
  """
  dtype = j2t_dtype(x.dtype)
  if use_dlpack and x.dtype == jnp.bfloat16:
    try:
      return torch_dlpack.from_dlpack(x).clone()
    except (BufferError, RuntimeError, ValueError) as error:
      logging.debug("DLPack refused %s, copying through numpy: %s", x.dtype, error)
  values = np.array(x)
  if dtype in NUMPY_UNSUPPORTED_DTYPES:
    carrier = {1: np.uint8, 2: np.int16}[values.itemsize]
    return torch.from_numpy(values.view(carrier)).view(dtype)
  if values.dtype != np.dtype(bool) and values.dtype.kind == "V":
    values = values.astype(np.int8)
  return torch.from_numpy(values)
