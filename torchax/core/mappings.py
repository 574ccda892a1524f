"""Conversion of dtypes and data between torch and JAX.

With JAX's x64 mode off, int64, float64 and complex128 are converted to their 32-bit
forms, never reinterpreted; `narrowing.py` has the rules. uint64 keeps its 64 bits, as
the keys of `torch.func._random` need them. Data is copied through `host_memory.py`.
"""

from typing import Any, overload

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from jax.sharding import Sharding

from torchax.compat import jax_compat, torch_compat
from torchax.core import host_memory, narrowing
from torchax.core.error_messages import donated_error, no_numbers
from torchax.devices import placement, shards
from torchax.errors import MixedDeviceError, UnsupportedDtypeError

# float4_e2m1fn_x2 has two numbers in a byte, JAX's float4_e2m1fn one in an element. Its
# bytes are carried by a dtype that torch lacks. Each of the 256 patterns is another
# number, so XLA keeps the bits even where it moves floats in a wider dtype.
PACKED = jnp.dtype(jnp.float8_e4m3b11fnuz)

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
  torch.float8_e8m0fnu: jnp.dtype(jnp.float8_e8m0fnu),
  torch.float4_e2m1fn_x2: PACKED,
}

JAX_DTYPE_TO_TORCH: dict[Any, Any] = {
  jax_: torch_ for torch_, jax_ in TORCH_DTYPE_TO_JAX.items()
}
# torch's int4 and uint4 are names without operations; int8 holds the values.
JAX_DTYPE_TO_TORCH[jnp.dtype(jnp.int4)] = torch.int8
JAX_DTYPE_TO_TORCH[jnp.dtype(jnp.uint4)] = torch.uint8

# Torch dtypes without a numpy dtype: the bits are copied as an integer of the same
# width, then viewed as the dtype of `ml_dtypes`.
NUMPY_UNSUPPORTED_DTYPES = {
  torch.bfloat16: ml_dtypes.bfloat16,
  torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
  torch.float8_e5m2: ml_dtypes.float8_e5m2,
  torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
  torch.float8_e5m2fnuz: ml_dtypes.float8_e5m2fnuz,
  torch.float8_e8m0fnu: ml_dtypes.float8_e8m0fnu,
  torch.float4_e2m1fn_x2: ml_dtypes.float8_e4m3b11fnuz,
}

_CARRIERS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16)}
_WIDE = frozenset({torch.int64, torch.float64, torch.complex128})
_NARROWED = {
  jnp.dtype(jnp.int64): jnp.dtype(jnp.int32),
  jnp.dtype(jnp.float64): jnp.dtype(jnp.float32),
  jnp.dtype(jnp.complex128): jnp.dtype(jnp.complex64),
}
# Narrowed integers keep their value or raise; floats lose digits.
_LOSSY = frozenset({torch.float64, torch.complex128})


@overload
def t2j_dtype(dtype: torch.dtype) -> jnp.dtype: ...


@overload
def t2j_dtype(dtype: None) -> None: ...


def t2j_dtype(dtype):
  """Return the JAX dtype for a torch dtype, in 32 bits unless x64 mode is on.

  Args:
    dtype: torch dtype; None stays None.

  Raises:
    UnsupportedDtypeError: JAX has no such dtype, for example a quantised one.

  >>> t2j_dtype(torch.bfloat16)
  dtype(bfloat16)
  """
  try:
    jax_dtype = TORCH_DTYPE_TO_JAX[dtype]
  except (KeyError, TypeError):
    raise UnsupportedDtypeError(
      f"torchax has no JAX dtype for {dtype}. Convert the tensor to one of "
      f"{', '.join(str(each) for each in TORCH_DTYPE_TO_JAX if each)} first."
    ) from None
  if dtype in _WIDE and narrowing.is_on():
    if dtype in _LOSSY:
      narrowing.warn_once(dtype)
    return _NARROWED[jax_dtype]
  return jax_dtype


def to_dtype(array, dtype: torch.dtype) -> jax.Array:
  """Convert an array to the JAX dtype of a torch dtype; uint64 keeps its 64 bits."""
  with narrowing.uint64_kept((dtype,)):
    return jnp.asarray(array, t2j_dtype(dtype))


def j2t_dtype(dtype: Any) -> torch.dtype:
  """Return the torch dtype for a JAX (numpy) dtype.

  Args:
    dtype: a numpy dtype, or anything that `jnp.dtype` takes.

  Raises:
    UnsupportedDtypeError: torch has no such dtype, for example a typed PRNG key.

  >>> j2t_dtype(jnp.bfloat16), j2t_dtype("int8")
  (torch.bfloat16, torch.int8)
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


def limits(dtype) -> list[np.ndarray]:
  """Return the least and the largest number of a JAX dtype; infinities for floats."""
  if dtype == jnp.bool_:
    numbers: tuple = False, True
  elif jnp.issubdtype(dtype, jnp.floating):
    numbers = -np.inf, np.inf
  else:
    numbers = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
  return [np.asarray(number, dtype) for number in numbers]


def check_bytes(source: torch.dtype, dtype: torch.dtype) -> None:
  """Raise UnsupportedDtypeError if `view(dtype)` needs bytes that 32 bits lack."""
  if source is not dtype and _WIDE & {source, dtype} and narrowing.is_on():
    raise UnsupportedDtypeError(
      f"A view of {source} as {dtype} needs the bytes of 64-bit numbers, which JAX "
      "stores in 32 bits. Use a 32-bit dtype, or turn on x64 mode."
    )


def check_torch_tensor(tensor: torch.Tensor) -> None:
  """Raise UnsupportedDtypeError unless the tensor is dense and has a JAX dtype."""
  check_layout(tensor)
  t2j_dtype(tensor.dtype)


def check_layout(tensor: torch.Tensor) -> None:
  """Raise UnsupportedDtypeError for a sparse, nested, quantised or mkldnn tensor."""
  if tensor.is_nested:
    raise UnsupportedDtypeError(
      "torchax holds tensors with one shape, but got a nested tensor. Call "
      "`.to_padded_tensor(value)` first, or `.unbind()` for a list of tensors. Pass "
      "the `.values()` and `.offsets()` of a jagged one to a compiled function, or to "
      "`torch.nn.attention.varlen.varlen_attn`."
    )
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


_MOST_DIMS = 64  # numpy's limit; torch has the same one in many operations


def t2j(
  t: torch.Tensor,
  use_dlpack: bool = True,
  dtype: torch.dtype | None = None,
  sharding: Sharding | None = None,
) -> jax.Array:
  """Copy a CPU torch tensor to a JAX array on the default device.

  Args:
    t: a dense tensor of any shape on the CPU.
    use_dlpack: accepted for older programs; the result never aliases `t`.
    dtype: torch dtype of the result; default: the dtype of `t`.
    sharding: sharding of the result, which copies only its shard to each device.

  Returns:
    An array of the same shape.

  Raises:
    UnsupportedDtypeError: the tensor is sparse or quantised, or JAX lacks its dtype.
    RuntimeError: the tensor has more dimensions than numpy supports.
    MixedDeviceError: the tensor is not on the CPU.
    NotImplementedError: the tensor is on meta.
    OverflowError: an int64 value does not fit in 32 bits.

  Warns:
    NarrowingWarning: float64 becomes float32 (once per dtype), or a value becomes
      infinite.

  >>> t2j(torch.ones(2))
  Array([1., 1.], dtype=float32)
  """
  check_layout(t)
  jax_dtype = t2j_dtype(dtype or t.dtype)
  _require_data_on_cpu(t)
  # Dispatch modes and hooks see the caller's conversion, not these reads.
  with torch_compat.without_function_modes_for_reads():
    t = t.detach().resolve_conj().resolve_neg()
    if dtype is not None and dtype is not t.dtype:
      t = t.to(dtype)  # 64-bit values are narrowed below
    is_narrowed = t.dtype in _WIDE and narrowing.is_on()
    values = narrowing.narrow(t, jax_dtype) if is_narrowed else host_array(t)
  if sharding is not None:
    shape = tuple(values.shape)
    return placement.from_shards(
      shape, sharding, lambda index: np.array(values[index], jax_dtype)
    )
  # A copy, because JAX may alias the memory of a numpy array.
  own = values if is_narrowed else np.array(values, dtype=jax_dtype)
  return placement.from_host(own)


def _require_data_on_cpu(t: torch.Tensor) -> None:
  if t.dim() > _MOST_DIMS:
    raise RuntimeError(
      f"only tensors with up to {_MOST_DIMS} dims are supported, but got {t.dim()}."
    )
  if t.is_meta:  # torch's own error: `Module.to` adds the remedy to this message
    raise NotImplementedError("Cannot copy out of meta tensor; no data!")
  if t.device.type != "cpu":
    raise MixedDeviceError(
      f"A copy to jax expects a CPU tensor, but got one on {t.device}. Call `.cpu()` "
      "first."
    )


def values_for_jax(t: torch.Tensor) -> np.ndarray:
  """Return the values of a CPU tensor as a numpy array with the dtype of `t2j`.

  Raises:
    UnsupportedDtypeError, OverflowError: see `t2j`.
  """
  check_layout(t)
  jax_dtype = t2j_dtype(t.dtype)
  with torch_compat.without_function_modes_for_reads():
    t = t.detach().resolve_conj().resolve_neg()
    if t.dtype in _WIDE and narrowing.is_on():
      return np.asarray(narrowing.narrow(t, jax_dtype))
    return host_array(t).astype(jax_dtype, copy=False)


def host_array(tensor: torch.Tensor) -> np.ndarray:
  """Return an array that shares the memory of a detached CPU tensor.

  The tensor stays resizable; see `host_memory.array_of`.

  Raises:
    TypeError: numpy has no such dtype.
  """
  carried = NUMPY_UNSUPPORTED_DTYPES.get(tensor.dtype)
  if carried is None:
    return host_memory.array_of(tensor)
  carrier, _ = _CARRIERS[tensor.element_size()]
  return host_memory.array_of(tensor.view(carrier)).view(carried)


def numpy_copy(x: jax.Array, asked: str, copy: bool = True) -> np.ndarray:
  """Copy a JAX array to a numpy array.

  Args:
    x: a concrete array of any shape.
    asked: the call that needs the values, for messages.
    copy: False for a read-only array that may share the memory of `x`.

  Raises:
    TracedStateError: `x` is a tracer.
    DonationError: its memory was donated.
    NotAddressableError: some of its shards belong to other processes.
  """
  try:
    return np.array(x) if copy else np.asarray(x)
  except jax.errors.TracerArrayConversionError:
    raise no_numbers(asked) from None
  except RuntimeError as error:
    if jax_compat.is_about_deletion(error):
      raise donated_error(asked) from None
    if jax_compat.is_about_other_processes(error):
      raise shards.not_addressable_error(x, asked) from None
    raise


def j2t(x: jax.Array | torch.Tensor, use_dlpack: bool = True) -> torch.Tensor:
  """Copy a JAX array to a CPU torch tensor of the same shape and dtype.

  Args:
    x: a concrete array; a sharded one is gathered. A tensor is detached and copied.
    use_dlpack: accepted for older programs; the result is a copy in torch's memory.

  Raises:
    TracedStateError: `x` is a tracer.
    DonationError: its memory was donated.

  >>> j2t(jnp.ones(2, jnp.bfloat16))
  tensor([1., 1.], dtype=torch.bfloat16)
  """
  if isinstance(x, torch.Tensor):
    return x.detach().to("cpu", copy=True)
  if isinstance(x, jax.core.Tracer):
    raise no_numbers('A copy on the CPU (`.cpu()`, `.to("cpu")`, `torch.tensor`)')
  j2t_dtype(x.dtype)  # raises for dtypes that torch lacks
  return torch_of(numpy_copy(x, "A copy on the CPU", copy=False))


def torch_of(values: np.ndarray) -> torch.Tensor:
  """Copy a numpy array with a JAX dtype to a CPU tensor in torch's memory."""
  dtype = j2t_dtype(values.dtype)
  if dtype in NUMPY_UNSUPPORTED_DTYPES:
    carrier, bits = _CARRIERS[dtype.itemsize]
    return host_memory.tensor_of(values.view(bits), carrier).view(dtype)
  if values.dtype in (jnp.int4, jnp.uint4):
    values = values.astype(np.int8 if dtype is torch.int8 else np.uint8)
  return host_memory.tensor_of(values, dtype)
