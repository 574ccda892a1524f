"""Arguments of a draw as plain data, kept in a ledger to replay the draw.

Only shape and dtype of a tensor are kept. All values are hashable, since the draws of a
compiled function are stored with its program.
"""

import math

import jax
import torch

# Arguments that do not change the numbers drawn.
_UNRECORDED = frozenset(
  {"generator", "out", "device", "layout", "pin_memory", "memory_format"}
)
_PLAIN = (type(None), bool, int, str)


def plain(args: tuple, kwargs: dict | None) -> tuple:
  """Return (positional arguments, (name, value) pairs of the others) as plain data."""
  named = [
    (name, _plain(value))
    for name, value in (kwargs or {}).items()
    if name not in _UNRECORDED and value is not None
  ]
  return (tuple(map(_plain, args)), tuple(named))


def _plain(value):
  if isinstance(value, torch.Tensor | jax.Array):
    dtype = str(value.dtype).removeprefix("torch.")
    return ("tensor", tuple(value.shape), dtype)
  if isinstance(value, torch.dtype):
    return ("dtype", str(value).removeprefix("torch."))
  if isinstance(value, list | tuple):
    return ("list", tuple(map(_plain, value)))
  if type(value) is float:
    return value if math.isfinite(value) else ("float", repr(value))
  if type(value) in _PLAIN:
    return value
  return ("other", type(value).__name__)


def restore(value, parameters: list[torch.Tensor]):
  """Convert a recorded argument back to one for torch; the inverse of `plain`.

  Args:
    value: recorded argument.
    parameters: tensors for the recorded tensors, in order; used ones are removed.

  Raises:
    ValueError: the argument is of a class that is not recorded.
  """
  if not isinstance(value, tuple):
    return value
  kind, *content = value
  if kind == "tensor":
    return parameters.pop(0)
  if kind == "dtype":
    return getattr(torch, content[0])
  if kind == "list":
    return [restore(part, parameters) for part in content[0]]
  if kind == "float":
    return float(content[0])
  raise ValueError(f"An argument of the class {content[0]} was not kept in the ledger.")


def tensors_in(value) -> list[tuple[tuple[int, ...], str]]:
  """Return shape and dtype of the tensors among recorded arguments, in order."""
  if not isinstance(value, tuple):
    return []
  if len(value) == 3 and value[0] == "tensor":
    return [(value[1], value[2])]
  return [found for part in value for found in tensors_in(part)]
