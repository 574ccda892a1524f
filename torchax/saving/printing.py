"""`repr` of jax tensors: the values, or the reason why there are none."""

import textwrap

import jax
import torch

from torchax.compat import torch_compat
from torchax.core import mappings
from torchax.core.storage import Escaped
from torchax.devices import placement, shards


def has_numbers(tensor) -> bool:
  """Return False for a tensor in a trace or from a trace that has ended."""
  storage = tensor._storage
  return not (
    isinstance(storage, Escaped) or isinstance(storage.read(tensor), jax.core.Tracer)
  )


def text_of(tensor) -> str:
  """Return the text of a tensor for `print`, in torch's form."""
  if not has_numbers(tensor):
    return _without_numbers(tensor)
  array = tensor.jax()
  with torch_compat.outside_transforms():
    text = repr(mappings.j2t(array)) if shards.is_readable(array) else _part_of(array)
  suffix = (
    f", device='{tensor.device}'{placement.describe_sharding(tensor._storage.array)}"
  )
  if tensor.grad_fn is not None:
    suffix += f", grad_fn=<{tensor.grad_fn.name()}>"
  elif tensor.requires_grad:
    suffix += ", requires_grad=True"
  tangent = torch.autograd.forward_ad.unpack_dual(tensor).tangent
  if tangent is not None:
    suffix += f", tangent={tangent}"
  text = f"{text[:-1]}{suffix})"
  user_class = getattr(tensor, "user_class", None)
  is_parameter = torch_compat.is_parameter(tensor)
  if user_class is None:
    return f"Parameter containing:\n{text}" if is_parameter else text
  name = f"{user_class.__name__}("
  rows = text.removeprefix("tensor(").replace("\n       ", "\n" + " " * len(name))
  return f"Parameter({name}{rows})" if is_parameter else name + rows


def _part_of(array: jax.Array) -> str:
  """Return the text of this process's part, without communication: one may print."""
  bounds = shards.local_bounds(array)
  where = f"process {jax.process_index()} of {jax.process_count()} holds"
  text = f"tensor(size={tuple(array.shape)}, {where} {shards.text_of(bounds)}"
  if bounds is None:
    return f"{text})"
  values = mappings.torch_of(shards.local_values(array, bounds))
  return f"{text}:\n{textwrap.indent(repr(values), '  ')})"


def _without_numbers(tensor) -> str:
  shape = f"size={tuple(tensor.shape)}, dtype={tensor.dtype}"
  if isinstance(tensor._storage, Escaped):
    name = tensor._storage.birth.name
    return f"tensor(no value: made while `{name}` was being traced, {shape})"
  return f"tensor(traced, {shape}, device='{tensor.device}')"
