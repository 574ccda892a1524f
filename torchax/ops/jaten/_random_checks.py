"""Checks of the dtypes, ranges and parameters of random operations, as in torch.

A parameter outside the domain of its distribution raises if the host knows its value.
Reading a tensor on the device would make every draw wait, so such a parameter draws
NaN. It is read only if the result's dtype has no NaN, outside a trace. Inside a trace
that result is `samplers.no_integer`.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax.core import mappings


def require_float(
  name: str, dtype, complex_ok: bool = False, error: type = NotImplementedError
):
  """Return `dtype` if torch draws floating-point numbers of it; raise otherwise.

  Args:
    name: the operation, for the message.
    dtype: JAX dtype.
    complex_ok: accept complex dtypes.
    error: exception of torch for other dtypes.
  """
  if jnp.issubdtype(dtype, jnp.floating):
    if not _is_float8(dtype):
      return dtype
    error = NotImplementedError
  elif jnp.issubdtype(dtype, jnp.complexfloating) and complex_ok:
    return dtype
  raise error(f"{name} draws floating-point numbers, but the dtype is {dtype}.")


def _is_float8(dtype) -> bool:
  return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16


def require_real(name: str, dtype, bool_ok: bool = True):
  """Return a JAX dtype if torch fills it with whole numbers; raise otherwise."""
  is_wide_unsigned = dtype in (jnp.uint16, jnp.uint32, jnp.uint64)
  is_bool = dtype == jnp.bool_
  is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
  if is_complex or _is_float8(dtype) or is_wide_unsigned or (is_bool and not bool_ok):
    raise NotImplementedError(f"{name} is not implemented for {dtype}.")
  return dtype


def known_values(value, looks: bool = False) -> np.ndarray | None:
  """Return the numbers of a tensor if the host knows them, else None.

  Args:
    value: a tensor on the CPU or on jax; None is returned for anything else.
    looks: wait for the device if outside a trace.
  """
  if not isinstance(value, torch.Tensor):
    return None
  if value.device.type == "cpu":
    return np.asarray(value.tolist())
  array = value.jax() if looks else None
  if array is None or isinstance(array, jax.core.Tracer):
    return None
  return np.asarray(array)


def require_values(value, is_allowed, message: str, looks: bool = False) -> None:
  """Raise RuntimeError unless all known numbers of a tensor are allowed.

  Args:
    value: a tensor; anything else passes.
    is_allowed: array -> array of bools; False for NaN.
    message: message of the error.
    looks: wait for the device if outside a trace.
  """
  numbers = known_values(value, looks)
  if numbers is not None and not is_allowed(numbers).all():
    raise RuntimeError(message)


def require_std(std) -> None:
  """Raise RuntimeError for a negative or complex standard deviation."""
  if isinstance(std, torch.Tensor):
    if std.is_complex():
      raise RuntimeError("normal expects standard deviation to be non-complex")
    message = "normal expects all elements of std >= 0.0"
    require_values(std, lambda numbers: numbers >= 0, message)
  elif not std >= 0:
    raise RuntimeError(f"normal expects std >= 0.0, but found std {std}.")


def require_probabilities(p, looks: bool) -> None:
  """Raise RuntimeError for a probability of `bernoulli_` outside [0, 1].

  Args:
    p: a number or a tensor.
    looks: wait for the device if outside a trace.
  """
  message = "bernoulli_ expects p to be in [0, 1]"
  if isinstance(p, torch.Tensor):
    require_values(p, lambda numbers: (numbers >= 0) & (numbers <= 1), message, looks)
  elif not 0 <= p <= 1:
    raise RuntimeError(f"{message}, but got p={p}.")


def _limits(dtype) -> tuple[float, float]:
  if dtype == jnp.bool_:
    return 0, 1
  if jnp.issubdtype(dtype, jnp.integer):
    return jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
  return float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max)


def require_range(name: str, low: int, high: int, dtype: torch.dtype) -> None:
  """Raise RuntimeError unless [low, high) is not empty and fits in the dtype.

  Warn if a floating-point dtype does not have all integers of the range.
  """
  if not low < high:
    raise RuntimeError(
      f"{name} expects 'from' to be less than 'to', but got from={low} >= to={high}."
    )
  jax_dtype = mappings.t2j_dtype(dtype)
  if jnp.issubdtype(jax_dtype, jnp.complexfloating):
    raise RuntimeError(f"{name} draws real numbers, but the dtype is {jax_dtype}.")
  if _is_float8(jax_dtype):
    raise NotImplementedError(f"{name} is not implemented for {jax_dtype}.")
  least, most = _limits(jax_dtype)
  if not jnp.issubdtype(jax_dtype, jnp.integer):  # drawn as int64, then converted
    widest = _limits(mappings.t2j_dtype(torch.int64))
    least, most = max(least, widest[0]), min(most, widest[1])
  if low < least or high - 1 > most:
    raise RuntimeError(
      f"{name}: [{low}, {high}) does not fit in {jax_dtype}. For 64-bit integers "
      'call `jax.config.update("jax_enable_x64", True)` first.'
    )
  if dtype.is_floating_point:
    exact = 2 ** (jnp.finfo(jax_dtype).nmant + 1)
    for bound, value in (("from", low), ("to - 1", high - 1)):
      if not -exact <= value <= exact:
        warnings.warn(
          f"{name}: {bound} is out of bounds [-{exact}, {exact}], outside of which "
          f"{dtype} does not have all integers.",
          stacklevel=2,
        )


def require_interval(low: float, high: float, dtype: torch.dtype) -> None:
  """Raise RuntimeError unless low <= high are finite numbers of the dtype."""
  if dtype.is_floating_point:
    limits = torch.finfo(dtype)
    for name, bound in (("from", low), ("to", high)):
      if not limits.min <= bound <= limits.max:
        raise RuntimeError(f"uniform_: {name}={bound} is out of bounds for {dtype}.")
    if high - low > limits.max:
      raise RuntimeError(
        f"uniform_ expects to-from <= {limits.max}, but got from={low} and to={high}."
      )
  if not low <= high:
    raise RuntimeError(
      "uniform_ expects to return a [from, to) range, but found "
      f"from={low} > to={high}."
    )
