"""What JAX raises for wrong arguments, in torch's words or in clearer ones."""

import jax
import torch

from torchax.compat import jax_compat, torch_compat
from torchax.core import narrowing
from torchax.core.explanations import donated, leaked
from torchax.devices import placement
from torchax.dispatch import compiling, index_checks, torch_checks
from torchax.errors import MixedDeviceError, WrongDtypeError
from torchax.registry.operators import Operator
from torchax.registry.schema import schema_of

EXPLAINED = (
  TypeError,
  ValueError,
  RuntimeError,
  IndexError,
  AssertionError,
  KeyError,
  OverflowError,
)
"""What JAX raises that `raise_as_torch` may have better words for."""


# Words of JAX, and of Python, that say little of an operation.
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
  """Raises torch's own error for wrong arguments, where its shape check has one.

  Only in place of JAX's plain TypeError and ValueError: errors of a class of their own
  say more. Tracers and arrays that JAX has no use for any more are explained, and a
  lowering of a program that asks for the values of a traced array.
  """
  compiling.explain(error, operator)
  if isinstance(error, jax.errors.UnexpectedTracerError):
    raise leaked(str(op)) from error
  if jax_compat.is_about_deletion(error):
    raise donated(str(op)) from error
  if jax_compat.is_about_devices(error):
    raise MixedDeviceError(placement.MIXED.format(what=op, found=error)) from error
  is_plain = type(error) in _PLAIN or str(error) == _RANK
  is_plain = is_plain and narrowing.REMEDY not in str(error)  # in words of our own
  if is_plain:
    require_label_dtypes(op, args, kwargs, operator)
  if is_plain and operator.is_builtin:
    # In torch's own words, where torch refuses it too.
    if isinstance(op, torch_compat.OpOverload):
      takes_device = "device" in schema_of(op).names
      torch_checks.raise_as_torch(op, args, kwargs, takes_device)
    elif op is not operator.func:
      torch_checks.raise_as_torch(op, args, kwargs)
  if is_plain and _BROADCAST in str(error):
    raise RuntimeError(
      f"{op}: the sizes of the tensors do not match and do not broadcast. {error}"
    ) from error
  if is_plain and _DTYPE in str(error):
    raise WrongDtypeError(f"{op} is not implemented for this dtype: {error}") from error
  if is_plain and str(error) == _RANK:
    shapes = [list(t.shape) for t in args if isinstance(t, torch.Tensor)]
    raise RuntimeError(
      f"{op} expects tensors of more dimensions, but got shapes {shapes}."
    ) from error


def require_label_dtypes(op, args, kwargs, operator: Operator) -> None:
  """Raises RuntimeError for indices or labels that are no integers."""
  if operator.checks.rules is None:
    return
  try:
    rules = list(operator.checks.rules(*args, **(kwargs or {})))
  except EXPLAINED:
    rules = []  # of shapes that do not fit
  index_checks.require_dtypes(rules, str(op))
