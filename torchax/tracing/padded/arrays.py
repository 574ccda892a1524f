"""Padding of arguments, and cropping of results, of padded programs."""

import jax
import numpy as np
from jax import lax

from torchax.compat import jax_compat


def pad(array, shape: tuple[int, ...]) -> jax.Array:
  """Append zeros to an array. On the CPU numpy does, which compiles nothing."""
  if tuple(array.shape) == tuple(shape):
    return array
  if not _is_on_host(array):
    config = [(0, new - old, 0) for new, old in zip(shape, array.shape)]
    return lax.pad(array, np.zeros((), array.dtype), config)
  whole = np.zeros(shape, array.dtype)
  whole[tuple(map(slice, array.shape))] = np.asarray(array)
  return _like(array, whole)


def crop(array, shape: tuple[int, ...]) -> jax.Array:
  """Return the first elements of an array along each axis."""
  if not _is_on_host(array):
    return lax.slice(array, [0] * len(shape), shape)
  return _like(array, np.asarray(array)[tuple(map(slice, shape))].copy())


def _is_on_host(array) -> bool:
  if isinstance(array, np.ndarray):
    return True
  is_host = jax_compat.is_in_host_memory(array)
  return is_host and len(array.sharding.device_set) == 1


def _like(array, values: np.ndarray) -> jax.Array:
  """Put values on the device of an array."""
  is_array = isinstance(array, jax.Array)
  is_committed = is_array and jax_compat.is_committed(array)
  return jax_compat.from_host(values, array.sharding if is_committed else None)
