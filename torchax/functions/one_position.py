"""Padding of keys for attention of one position, as in token-by-token generation.

The number of keys grows by one per call, and each number would need its own program. On
the CPU compiling takes a thousand times as long as running. So from the second number
on, keys and values are padded to one of a few lengths and the padding is masked. numpy
pads while a length is rare. If the number never changes, nothing is padded.
"""

import numpy as np
import torch

from torchax.compat import jax_compat
from torchax.core import numpy_fallback
from torchax.core.bounded_cache import BoundedCache
from torchax.core.program_limit import Effort
from torchax.core.storage import active
from torchax.devices import placement
from torchax.ops.jaten import attention
from torchax.tensor import Tensor, new_tensor

# For keys up to this many elements, an optimized program is no faster than an
# unoptimized one, which XLA compiles in a third of the time.
_MAX_BRIEF = 2**17
# Up to this many elements padding takes less time than compiling.
_MAX_PADDED = 2**22
_MIN_LENGTH = 32
# Number of calls on the host before a program pads; the host takes 30 us more per call.
OFTEN = 256
# First number of keys, for each form of a call.
_first: BoundedCache[tuple, int] = BoundedCache(1024)
# Number of calls, for each shapes of keys, values and masks.
_calls: BoundedCache[tuple, int] = BoundedCache(4096)


def effort(query, key) -> Effort | None:
  """Return the effort for one query position over few keys; None for other calls."""
  is_brief = _has_one_position(query) and key.numel() <= _MAX_BRIEF
  return Effort.NONE if is_brief else None


def _has_one_position(query) -> bool:
  return query.dim() > 1 and query.shape[-2] == 1


def padded_length(length: int) -> int:
  """Return the padded length for `length` keys; above 32 at most a quarter more.

  There are four lengths per power of two; up to 32 keys, 32 is the only one.
  """
  step = max(_MIN_LENGTH, 1 << max(0, (length - 1).bit_length() - 3))
  return -(-length // step) * step


def pad_keys(query, key, value, attn_mask, enable_gqa: bool) -> tuple:
  """Pad key, value and mask, so that the call shares its program with others.

  Args:
    query, key, value: shapes (…, 1, e), (…, s, e) and (…, s, v).
    attn_mask: broadcastable to (…, 1, s), or None.
    enable_gqa: key and value have fewer heads.

  Returns:
    Key (…, n, e), value (…, n, v) and mask (…, n) with n = `padded_length(s)`; the
    arguments unchanged if the call cannot be padded.
  """
  if not _may_be_padded(query, key, value, attn_mask, enable_gqa):
    return key, value, attn_mask
  unpadded = key, value, attn_mask
  length = key.shape[-2]
  form = (key.shape[:-2], key.shape[-1], value.shape[-1], attn_mask is None)
  first = _first.get(form)
  if first is None:
    _first[form] = first = length
  if length == first:
    return unpadded
  most = padded_length(length)
  shapes = tuple([tensor if tensor is None else tensor.shape for tensor in unpadded])
  times = _calls.get(shapes) or 0
  env = query._env
  if times >= OFTEN:
    return env.functions.call(attention.padded_keys, *unpadded, most)
  tensors = [tensor for tensor in unpadded if tensor is not None]
  operands = numpy_fallback.as_numpy_operands(
    [tensor._storage.array for tensor in tensors]
  )
  if operands is None:
    return unpadded
  _calls[shapes] = times + 1
  values, sharding = operands
  views = [tensor._chain.view_numpy(array) for tensor, array in zip(tensors, values)]
  views += [None] * (len(unpadded) - len(views))
  arrays = attention.padded_keys(*views, most, np)
  return tuple(
    [new_tensor(placement.from_host(array, sharding), env) for array in arrays]
  )


def _may_be_padded(query, key, value, attn_mask, enable_gqa) -> bool:
  """Return True if arrays are on the CPU, untraced, without gradient, and match."""
  if not (jax_compat.is_top_level() and active.boundary is None):
    return False
  if not _has_one_position(query) or key.numel() > _MAX_PADDED:
    return False
  tensors = [t for t in (query, key, value, attn_mask) if t is not None]
  if not all(map(_is_on_host, tensors)):
    return False
  if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
    return False
  # Attention itself raises for arguments that do not match.
  if not query.dtype == key.dtype == value.dtype:
    return False
  leading, length = tuple(query.shape[:-2]), key.shape[-2]
  of_keys = (*leading, length, query.shape[-1])
  if enable_gqa and len(leading) and key.dim() == query.dim() and key.shape[-3]:
    is_grouped = leading[-1] % key.shape[-3] == 0
    of_keys = (*leading[:-1], key.shape[-3], *of_keys[-2:]) if is_grouped else of_keys
  if not length or key.shape != of_keys or value.shape[:-1] != of_keys[:-1]:
    return False
  return attn_mask is None or _is_mask_of(attn_mask, (*leading, 1, length))


def _is_mask_of(mask, scores: tuple) -> bool:
  """Return True for a mask of all keys that broadcasts to scores of this shape."""
  if not (mask.dtype == torch.bool or mask.is_floating_point()):
    return False
  if not 0 < mask.dim() <= len(scores) or mask.shape[-1] != scores[-1]:
    return False
  sizes = zip(reversed(mask.shape), reversed(scores))
  return all(size in (1, whole) for size, whole in sizes)


def _is_on_host(tensor) -> bool:
  if not isinstance(tensor, Tensor) or tensor._chain.moving is not None:
    return False
  array = tensor._storage.array
  return type(array) is jax_compat.ArrayImpl and jax_compat.is_in_host_memory(array)
