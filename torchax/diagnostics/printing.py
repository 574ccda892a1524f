"""What a jax tensor looks like in print: its numbers, or why it has none."""

import jax

from torchax import _torch_compat
from torchax.core.storage import Ended
from torchax.devices import placement
from torchax.ops import mappings


def has_numbers(tensor) -> bool:
  """False for a tensor that is being traced, or was made in a trace that has ended."""
  storage = tensor._storage
  return not (
    isinstance(storage, Ended) or isinstance(storage.read(tensor), jax.core.Tracer)
  )


def text_of(tensor) -> str:
  """A tensor as `print` shows it, in torch's form."""
  if not has_numbers(tensor):
    return _without_numbers(tensor)
  text = repr(mappings.j2t(tensor.jax()))
  suffix = f", device='{tensor.device}'{placement.described(tensor._storage.array)}"
  if tensor.grad_fn is not None:
    suffix += f", grad_fn=<{tensor.grad_fn.name()}>"
  elif tensor.requires_grad:
    suffix += ", requires_grad=True"
  text = f"{text[:-1]}{suffix})"
  is_parameter = _torch_compat.is_parameter(tensor)
  return f"Parameter containing:\n{text}" if is_parameter else text


def _without_numbers(tensor) -> str:
  shape = f"size={tuple(tensor.shape)}, dtype={tensor.dtype}"
  if isinstance(tensor._storage, Ended):
    name = tensor._storage.birth.name
    return f"tensor(no value: made while `{name}` was being traced, {shape})"
  return f"tensor(traced, {shape}, device='{tensor.device}')"
