"""Local part of an array that is sharded over several processes.

Used by printing, saving and transfers to describe or read the local shards.
"""

import math
from typing import Any

import jax
import numpy as np

from torchax.devices import placement
from torchax.errors import NotAddressableError


def is_readable(array: Any) -> bool:
  """Return True if this process can read all values of an array."""
  if not isinstance(array, jax.Array):  # numpy's
    return True
  return array.is_fully_addressable or array.is_fully_replicated


def local_bounds(array: jax.Array) -> list[tuple[int, int]] | None:
  """Return (start, stop) in each dimension of the block on this process.

  None if the local shards are no single block.
  """
  blocks = {
    tuple(part.indices(extent)[:2] for part, extent in zip(shard.index, array.shape))
    for shard in array.addressable_shards
  }
  bounds = [
    (min(start for start, _ in column), max(stop for _, stop in column))
    for column in zip(*blocks)
  ]
  local = sum(math.prod(stop - start for start, stop in block) for block in blocks)
  enclosing = math.prod(stop - start for start, stop in bounds)
  return bounds if local == enclosing else None


def local_values(array: jax.Array, bounds: list[tuple[int, int]]) -> np.ndarray:
  """Return the values of the block with these bounds (from `local_bounds`)."""
  values = np.empty([stop - start for start, stop in bounds], array.dtype)
  for shard in array.addressable_shards:
    block = tuple(
      slice(part.indices(extent)[0] - start, part.indices(extent)[1] - start)
      for part, extent, (start, _) in zip(shard.index, array.shape, bounds)
    )
    values[block] = np.asarray(shard.data)
  return values


def text_of(bounds: list[tuple[int, int]] | None) -> str:
  """Return a block as text: "[0:4, 0:8]"."""
  if bounds is None:
    return "several blocks"
  return f"[{', '.join(f'{start}:{stop}' for start, stop in bounds)}]"


def not_addressable_error(array: jax.Array, asked: str) -> NotAddressableError:
  """Return the error for reading values that are on other processes.

  Args:
    array: the array that was read.
    asked: name of the operation that needs the values.
  """
  return NotAddressableError(
    f"{asked} needs all numbers of a tensor of shape {list(array.shape)}, but "
    f"process {jax.process_index()} of {jax.process_count()} holds "
    f"{text_of(local_bounds(array))} of it{placement.describe_sharding(array)}. Call "
    "`torchax.processes.gather(tensor)` first, in every process, or compute what you "
    "need on jax: a sum or a mean is on all processes. To save it in parts, call "
    "`torchax.save_checkpoint`. `tensor.jax().addressable_shards` is what this process "
    "holds."
  )
