"""torch's own checks of an operation's arguments, for each program that is new.

torch has a kernel without numbers for nearly every operation, which computes shapes and
dtypes on the meta device, and refuses what does not fit in torch's words. It runs when
a program is made, with the arguments of the call, and whenever JAX traces the program
for other shapes, so that a call of a compiled program costs nothing. There the shapes
are those of the traced arrays. Numbers that are operands are those of the program's
first call, so what is refused is checked once more with the arguments of the call.
"""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import torch
from torch.utils import _pytree as torch_pytree

from torchax.compat import torch_compat
from torchax.core import mappings

# What a meta kernel raises that says nothing of the arguments.
_OF_META = ("meta", "Could not run", "PrivateUse1")
# What it raises for an operation that has no kernel for a device.
_NO_KERNEL = "Could not run"
# Of in-place forms, with defaults that functional ones lack; torch has parsed them.
_OF_SCHEMAS = "Declaration: "
# What torch raises for arguments.
_OF_ARGUMENTS = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)
# What a meta kernel in Python raises where it is not written for what it is given.
_BY_MISTAKE = (ArithmeticError, AttributeError, KeyError, MemoryError)
# So many are made to ask the CPU what it says.
_MOST_NUMBERS = 2**20
# What torch calls int64 is held in 32 bits, without JAX's x64 mode.
_WIDE = {torch.int32: torch.int64}
_WIDTHS = ("Long", "long", "int64")
# JAX's annotations lack its flags.
_config: Any = jax.config
_TENSOR = object()
"""In place of a tensor in the arguments of a program's first call."""


class Refused(Exception):
  """Shapes of a program that is being traced, which torch seems to refuse."""


class _Unchecked(threading.local):
  owner: object = None


_unchecked = _Unchecked()


@contextlib.contextmanager
def without(owner) -> Iterator[None]:
  """On this thread programs of `owner` are traced unchecked inside the block."""
  before, _unchecked.owner = _unchecked.owner, owner
  try:
    yield
  finally:
    _unchecked.owner = before


def is_off(owner) -> bool:
  """True inside `without(owner)`."""
  return _unchecked.owner is owner


class Example:
  """The arguments of a program's first call, which torch has checked, without tensors.

  Args:
    owner: see `without`.
    op: an overload, or a function of torch that consists of operations.
    args, kwargs: of the call.
    takes_device: it makes tensors where it is told to.
  """

  __slots__ = ("owner", "op", "given", "takes_device", "_checked")

  def __init__(self, owner, op, args, kwargs, takes_device: bool = False):
    self.owner, self.op, self.takes_device = owner, op, takes_device
    given = tuple(args), kwargs or {}
    self._checked = _tensor_types(given)
    self.given = _emptied(given)

  def require(self, args, kwargs) -> None:
    """Checks arrays of other shapes that are being traced, with the example's numbers.

    Raises:
      Refused: the caller is to check the arguments that it has by `refusal`.
    """
    if is_off(self.owner) or _tensor_types((args, kwargs)) == self._checked:
      return
    args, kwargs = _filled(self.given, (args, kwargs))
    if refusal(self.op, args, kwargs, self.takes_device) is not None:
      raise Refused


def _tensor_types(tree) -> list[tuple]:
  """Shape and dtype of each tensor or array of a tree."""
  return [
    (tuple(leaf.shape), leaf.dtype)
    if isinstance(leaf, torch.Tensor)
    else (leaf.shape, mappings.j2t_dtype(leaf.dtype))
    for leaf in torch_pytree.tree_leaves(tree)
    if isinstance(leaf, torch.Tensor | jax.Array)
  ]


def _emptied(value):
  if isinstance(value, torch.Tensor | jax.Array):
    return _TENSOR
  if isinstance(value, tuple | list):
    return [_emptied(part) for part in value]
  if isinstance(value, dict):
    return {name: _emptied(part) for name, part in value.items()}
  return None if isinstance(value, torch.Generator) else value


def _filled(example, given):
  """The example with the arrays of `given`, which has the same form where they are."""
  if example is _TENSOR:
    return given
  if isinstance(example, dict):
    return {name: _filled(part, given.get(name)) for name, part in example.items()}
  if isinstance(example, list) and isinstance(given, tuple | list):
    return [_filled(*parts) for parts in zip(example, given)]
  return example


def refusal(op, args, kwargs, takes_device: bool = False) -> Exception | None:
  """The error of torch's meta kernel; None without one, or without such a kernel.

  Args:
    op, takes_device: see `Example`.
    args, kwargs: of it; tensors or arrays.
  """
  if takes_device:
    kwargs = {**(kwargs or {}), "device": torch.device("meta")}
  error = _raised(op, args, kwargs, _on_meta, {})
  if error is None or _config.jax_enable_x64:
    return error
  return _of_both(error, _raised(op, args, kwargs, _on_meta, _WIDE))


def raise_as_torch(op, args, kwargs, takes_device: bool = False) -> None:
  """Raises what torch raises for tensors of the same shapes and dtypes.

  For arguments that something has refused: torch's words for the CPU are better than
  those of its meta kernels or of JAX. It is asked with zeros and with ones, unless they
  are many: what it says of numbers, as of probabilities that are all zero, does not
  count.
  """
  if _count((args, kwargs)) > _MOST_NUMBERS:
    error = refusal(op, args, kwargs, takes_device)
  else:
    if takes_device:
      kwargs = {**(kwargs or {}), "device": torch.device("cpu")}
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
      warnings.simplefilter("ignore")
      error = _raised(op, args, kwargs, _of_zeros, {})
      if error is not None and not _config.jax_enable_x64:
        error = _of_both(error, _raised(op, args, kwargs, _of_zeros, _WIDE))
      if error is not None and _raised(op, args, kwargs, _of_ones, {}) is None:
        error = None
    if isinstance(error, torch.linalg.LinAlgError):
      error = None
  if error is not None:
    raise error.with_traceback(None) from None


def _of_both(narrow: Exception, wide: Exception | None) -> Exception | None:
  """The error that is no matter of 32 or 64 bits; None where 64 raise none."""
  is_of_width = any(word in str(narrow) for word in _WIDTHS)
  return wide if wide is None or is_of_width else narrow


def _count(given) -> int:
  """How many numbers the tensors and arrays of a tree have."""
  leaves = torch_pytree.tree_leaves(given)
  tensors = sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
  return tensors + sum(leaf.size for leaf in leaves if isinstance(leaf, jax.Array))


def _raised(op, args, kwargs, convert, dtypes: dict) -> Exception | None:
  """What torch raises for tensors that `convert(shape, dtype)` makes."""
  with (
    torch_compat.unnoticed(),
    torch_compat.unwatched(),
    torch_compat.without_dispatch(),
    torch.no_grad(),
  ):
    args, kwargs = torch_pytree.tree_map(
      lambda leaf: _converted(leaf, convert, dtypes), (tuple(args), kwargs or {})
    )
    try:
      op(*args, **kwargs)
    except _OF_ARGUMENTS as error:
      if _OF_SCHEMAS in str(error):
        return None
      is_of_meta = convert is _on_meta and any(word in str(error) for word in _OF_META)
      is_missing = isinstance(error, NotImplementedError)
      is_missing = is_missing and (convert is _on_meta or _NO_KERNEL in str(error))
      return None if is_of_meta or is_missing else error
    except _BY_MISTAKE:
      return None
  return None


def _converted(leaf, convert, dtypes: dict):
  """A tensor in place of a tensor or an array; anything else as it is."""
  if isinstance(leaf, torch.Tensor):
    return convert(leaf.shape, dtypes.get(leaf.dtype, leaf.dtype))
  if isinstance(leaf, jax.Array):
    dtype = mappings.j2t_dtype(leaf.dtype)
    return convert(leaf.shape, dtypes.get(dtype, dtype))
  return None if isinstance(leaf, torch.Generator) else leaf


def _on_meta(shape, dtype):
  return torch.empty(shape, dtype=dtype, device="meta")


def _of_zeros(shape, dtype):
  return torch.zeros(shape, dtype=dtype, device="cpu")


def _of_ones(shape, dtype):
  return torch.ones(shape, dtype=torch.uint8, device="cpu").to(dtype)
