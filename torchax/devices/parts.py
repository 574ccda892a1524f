"""What this process has of an array that lies on devices of several processes."""

import math
from typing import Any

import jax
import numpy as np

from torchax.devices import placement
from torchax.errors import NotAddressableError


def is_whole(array: Any) -> bool:
  """True for an array whose numbers this process can read."""
  if not isinstance(array, jax.Array):  # numpy's
    return True
  return array.is_fully_addressable or array.is_fully_replicated


def bounds_here(array: jax.Array) -> list[tuple[int, int]] | None:
  """Start and stop in each dimension of what this process holds.

  None where that is no single block.
  """
  blocks = {
    tuple(part.indices(extent)[:2] for part, extent in zip(shard.index, array.shape))
    for shard in array.addressable_shards
  }
  bounds = [
    (min(start for start, _ in column), max(stop for _, stop in column))
    for column in zip(*blocks)
  ]
  held = sum(math.prod(stop - start for start, stop in block) for block in blocks)
  whole = math.prod(stop - start for start, stop in bounds)
  return bounds if held == whole else None


def values_here(array: jax.Array, bounds: list[tuple[int, int]]) -> np.ndarray:
  """The numbers in the block of `bounds_here`."""
  values = np.empty([stop - start for start, stop in bounds], array.dtype)
  for shard in array.addressable_shards:
    place = tuple(
      slice(part.indices(extent)[0] - start, part.indices(extent)[1] - start)
      for part, extent, (start, _) in zip(shard.index, array.shape, bounds)
    )
    values[place] = np.asarray(shard.data)
  return values


def text_of(bounds: list[tuple[int, int]] | None) -> str:
  """A block as an index: "[0:4, 0:8]"."""
  if bounds is None:
    return "several blocks"
  return f"[{', '.join(f'{start}:{stop}' for start, stop in bounds)}]"


def elsewhere(array: jax.Array, asked: str) -> NotAddressableError:
  """The error for numbers that other processes have.

  Args:
    array: whose numbers were asked for.
    asked: what needs them.
  """
  return NotAddressableError(
    f"{asked} needs all numbers of a tensor of shape {list(array.shape)}, but "
    f"process {jax.process_index()} of {jax.process_count()} holds "
    f"{text_of(bounds_here(array))} of it{placement.described(array)}. Call "
    "`torchax.processes.gather(tensor)` first, in every process, or compute what you "
    "need on jax: a sum or a mean is on all processes. To save it in parts, call "
    "`torchax.save_checkpoint`. `tensor.jax().addressable_shards` is what this process "
    "holds."
  )
