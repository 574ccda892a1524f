"""torch's checks of an operation's arguments, for each new program.

torch has a meta kernel for nearly every operation: it computes shapes and dtypes
without data and raises torch's errors. It runs when a program is built, with the
arguments of the call, and when JAX retraces the program for other shapes. A call of a
compiled program is not checked. A retrace knows the new shapes but not the numbers that
are operands: it uses the numbers of the program's first call. If torch refuses those,
`Refused` makes `Plan` check the call again with its own numbers.
"""

import contextlib
import functools
import threading
import warnings
from typing import Any

import jax
import torch
from torch.utils import _pytree as torch_pytree

from torchax.compat import torch_compat
from torchax.compat.patches import setting
from torchax.core import mappings
from torchax.registry.schema import schema_of

# Parts of errors of meta kernels that say nothing about the arguments.
_META_MESSAGES = ("meta", "Could not run", "PrivateUse1")
# Start of the error for an operation without a kernel for a device.
_NO_KERNEL = "Could not run"
# Part of torch's parser errors. In-place variants have defaults that functional ones
# lack, and torch has already parsed the call.
_PARSER_MESSAGE = "Declaration: "
# Classes of torch's errors about arguments.
_ARGUMENT_ERRORS = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)
# Classes of errors of Python meta kernels for arguments they were not written for.
_KERNEL_ERRORS = (ArithmeticError, AttributeError, KeyError, MemoryError)
# Most elements that are created to run the operation on the CPU for its error.
_MAX_ELEMENTS = 2**20
# Without JAX's x64 mode, torch's int64 is stored in 32 bits.
_WIDE = {torch.int32: torch.int64}
_WIDTH_NAMES = ("Long", "long", "int64")
# JAX's annotations lack its flags.
_config: Any = jax.config
_TENSOR = object()
"""Placeholder for a tensor in the arguments of a program's first call."""


class Refused(Exception):
  """torch seems to refuse the shapes of a program that is being traced."""


class _Unchecked(threading.local):
  owner: object = None


_unchecked = _Unchecked()


def unchecked(owner) -> contextlib.AbstractContextManager[None]:
  """Trace the programs of `owner` without checks inside the block, on this thread."""
  return setting(_unchecked, "owner", owner)


def is_unchecked(owner) -> bool:
  """Return True inside `unchecked(owner)`."""
  return _unchecked.owner is owner


class Example:
  """Arguments of a program's first call, checked by torch and stored without tensors.

  Args:
    owner: see `unchecked`.
    op: an overload.
    args, kwargs: arguments of the call.
  """

  __slots__ = ("owner", "op", "given", "_checked")

  def __init__(self, owner, op, args, kwargs):
    self.owner, self.op = owner, op
    given = tuple(args), kwargs or {}
    self._checked = tensor_types(given)
    self.given = _without_tensors(given)

  def require(self, args, kwargs) -> None:
    """Check traced arrays of other shapes, with the numbers of the example.

    Raises:
      Refused: torch refuses them; the caller checks its own arguments by `refusal`.
    """
    if is_unchecked(self.owner) or tensor_types((args, kwargs)) == self._checked:
      return
    args, kwargs = _with_tensors(self.given, (args, kwargs))
    if refusal(self.op, args, kwargs) is not None:
      raise Refused


def tensor_types(tree) -> tuple[tuple, ...]:
  """Return shape and dtype of the tensors and arrays among arguments."""
  return tuple(
    [
      (tuple(leaf.shape), leaf.dtype)
      if isinstance(leaf, torch.Tensor)
      else (leaf.shape, mappings.j2t_dtype(leaf.dtype))
      for leaf in jax.tree.leaves(tree)
      if isinstance(leaf, torch.Tensor | jax.Array)
    ]
  )


def _without_tensors(value):
  if isinstance(value, torch.Tensor | jax.Array):
    return _TENSOR
  if isinstance(value, tuple | list):
    return [_without_tensors(part) for part in value]
  if isinstance(value, dict):
    return {name: _without_tensors(part) for name, part in value.items()}
  return None if isinstance(value, torch.Generator) else value


def _with_tensors(example, given):
  """Return the example with the arrays of `given` in place of its tensors."""
  if example is _TENSOR:
    return given
  if isinstance(example, dict):
    return {key: _with_tensors(part, given.get(key)) for key, part in example.items()}
  if isinstance(example, list) and isinstance(given, tuple | list):
    return [_with_tensors(*parts) for parts in zip(example, given)]
  return example


def refusal(op, args, kwargs) -> Exception | None:
  """Return the error of torch's meta kernel; None without an error or a kernel.

  Args:
    op: an overload, or a composite function of torch.
    args, kwargs: arguments of `op`, with tensors or arrays.
  """
  kwargs = _on_device("meta", op, kwargs)
  if str(op).startswith("aten._foreach_") and not kwargs:
    args = _distinct_rows(args)
  error = _error_of(op, args, kwargs, _meta, {})
  if error is None or _config.jax_enable_x64:
    return error
  return _common_error(error, _error_of(op, args, kwargs, _meta, _WIDE))


def _distinct_rows(args) -> list:
  """Return arguments of a `_foreach` operation without rows of equal types."""
  are_lists = [isinstance(arg, list | tuple) for arg in args]
  lists = [arg for arg, is_list in zip(args, are_lists) if is_list]
  others = [arg for arg, is_list in zip(args, are_lists) if not is_list]
  # Errors about lengths need all rows, and so does a tensor with a scalar for each.
  if len(set(map(len, lists))) != 1 or tensor_types(others):
    return args
  first: dict[tuple, int] = {}
  for row, parts in enumerate(zip(*lists)):
    # The value of a symbolic number would become a guard.
    numbers = [None if isinstance(part, torch.SymFloat) else part for part in parts]
    types = [
      tensor_types(part) or (type(part), number) for part, number in zip(parts, numbers)
    ]
    first.setdefault(tuple(types), row)
  return [
    [arg[row] for row in first.values()] if is_list else arg
    for arg, is_list in zip(args, are_lists)
  ]


def _on_device(name: str, op, kwargs) -> dict | None:
  """Return the keyword arguments, with another device for an `op` that takes one."""
  if isinstance(op, torch_compat.OpOverload) and "device" in schema_of(op).names:
    return {**(kwargs or {}), "device": torch.device(name)}
  return kwargs


def raise_as_torch(op, args, kwargs) -> None:
  """Raise torch's error for tensors of these shapes and dtypes; return if it has none.

  Called for arguments that JAX or a meta kernel has refused: the errors of torch's CPU
  kernels are clearer. The operation runs with zeros and with ones, so that errors about
  values, as of probabilities that are all zero, are ignored. Large tensors get the
  error of the meta kernel.
  """
  if _count((args, kwargs)) > _MAX_ELEMENTS:
    error = refusal(op, args, kwargs)
  else:
    kwargs = _on_device("cpu", op, kwargs)
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
      warnings.simplefilter("ignore")
      error = _error_of(op, args, kwargs, _zeros, {})
      if error is not None and not _config.jax_enable_x64:
        error = _common_error(error, _error_of(op, args, kwargs, _zeros, _WIDE))
      if error is not None and _error_of(op, args, kwargs, _ones, {}) is None:
        error = None
    if isinstance(error, torch.linalg.LinAlgError):
      error = None
  if error is not None:
    raise error.with_traceback(None) from None


def _common_error(narrow: Exception, wide: Exception | None) -> Exception | None:
  """Return the error that holds for 32 and 64 bits; None if 64 bits raise none."""
  is_of_width = any(word in str(narrow) for word in _WIDTH_NAMES)
  return wide if wide is None or is_of_width else narrow


def _count(given) -> int:
  leaves = torch_pytree.tree_leaves(given)
  tensors = sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
  return tensors + sum(leaf.size for leaf in leaves if isinstance(leaf, jax.Array))


def _error_of(op, args, kwargs, convert, dtypes: dict) -> Exception | None:
  """Return torch's error for tensors created by `convert(shape, dtype=)`, or None."""
  with (
    torch_compat.without_function_modes_for_reads(),
    torch_compat.without_modes_for_reads(),
    torch_compat.without_dispatch(),
    torch.no_grad(),
  ):
    args, kwargs = torch_pytree.tree_map(
      lambda leaf: _convert_leaf(leaf, convert, dtypes), (tuple(args), kwargs or {})
    )
    try:
      op(*args, **kwargs)
    except _ARGUMENT_ERRORS as error:
      if _PARSER_MESSAGE in str(error):
        return None
      is_about_kernel = isinstance(error, NotImplementedError) and (
        convert is _meta or _NO_KERNEL in str(error)
      )
      if convert is _meta and any(part in str(error) for part in _META_MESSAGES):
        return None
      return None if is_about_kernel else error
    except _KERNEL_ERRORS:
      return None
  return None


def _convert_leaf(leaf, convert, dtypes: dict):
  if isinstance(leaf, torch.Tensor):
    return convert(leaf.shape, dtype=dtypes.get(leaf.dtype, leaf.dtype))
  if isinstance(leaf, jax.Array):
    dtype = mappings.j2t_dtype(leaf.dtype)
    return convert(leaf.shape, dtype=dtypes.get(dtype, dtype))
  return None if isinstance(leaf, torch.Generator) else leaf


_meta = functools.partial(torch.empty, device="meta")
_zeros = functools.partial(torch.zeros, device="cpu")


def _ones(shape, *, dtype):
  return torch.ones(shape, dtype=torch.uint8, device="cpu").to(dtype)
