"""Translation of JAX's errors about wrong arguments into torch's or clearer ones.

Plans and function handlers call `raise_as_torch` when a call has failed.
"""

import jax
import torch

from torchax.compat import jax_compat
from torchax.core import mappings, narrowing
from torchax.core.error_messages import donated_error, leaked_tracer_error
from torchax.devices import placement
from torchax.dispatch import compiling, torch_checks
from torchax.errors import MixedDeviceError, WrongDtypeError
from torchax.registry.operators import Operator

EXPLAINED = (
  TypeError,
  ValueError,
  RuntimeError,
  IndexError,
  AssertionError,
  KeyError,
  OverflowError,
)
"""Classes of errors that `raise_as_torch` may replace."""


# Parts of messages of JAX and Python that say little about the operation.
_BROADCAST = "ncompatible shapes for broadcasting"
_DTYPE = "does not accept dtype"
_RANK = "tuple index out of range"
_PLAIN = (
  TypeError,
  ValueError,
  AssertionError,
  KeyError,
  OverflowError,
  jax.errors.JaxRuntimeError,
)


def raise_as_torch(error: Exception, op, args, kwargs, operator: Operator) -> None:
  """Raise torch's error for wrong arguments, or a clearer one; else return.

  torch's error replaces only plain errors such as TypeError and ValueError: subclasses
  say more. Leaked tracers, donated arrays, mixed devices, and users' lowerings that
  need the values of a traced array get errors that explain them.
  """
  compiling.raise_if_needs_values(error, operator)
  if isinstance(error, jax.errors.UnexpectedTracerError):
    raise leaked_tracer_error(str(op)) from error
  if jax_compat.is_about_deletion(error):
    raise donated_error(str(op)) from error
  if jax_compat.is_about_devices(error):
    raise MixedDeviceError(placement.MIXED.format(what=op, found=error)) from error
  if type(error) not in _PLAIN and str(error) != _RANK:
    return
  if narrowing.REMEDY in str(error):
    return  # our own message
  require_label_dtypes(op, args, kwargs, operator)
  if operator.is_builtin and op is not operator.func:
    # If torch refuses the arguments too, raise its error.
    torch_checks.raise_as_torch(op, args, kwargs)
  if _BROADCAST in str(error):
    raise RuntimeError(
      f"{op}: the sizes of the tensors do not match and do not broadcast. {error}"
    ) from error
  if _DTYPE in str(error):
    raise WrongDtypeError(f"{op} is not implemented for this dtype: {error}") from error
  if str(error) == _RANK:
    shapes = [list(t.shape) for t in args if isinstance(t, torch.Tensor)]
    raise RuntimeError(
      f"{op} expects tensors of more dimensions, but got shapes {shapes}."
    ) from error


def require_label_dtypes(op, args, kwargs, operator: Operator) -> None:
  """Raise RuntimeError for indices or labels that are not integers."""
  if operator.checks.rules is None:
    return
  try:
    rules = list(operator.checks.rules(*args, **(kwargs or {})))
  except EXPLAINED:
    return  # the shapes do not match
  for rule in rules:
    dtype = getattr(rule.numbers, "dtype", None)
    if isinstance(dtype, torch.dtype) and not rule.applies_to(
      mappings.t2j_dtype(dtype)
    ):
      raise RuntimeError(
        f"{op} expects integers, torch.int64, for indices and labels, but got {dtype}. "
        "Convert them with `.long()`."
      )
