"""Memory of the devices, as JAX counts it.

JAX keeps figures of GPUs and TPUs. On its CPU device it keeps none: there they are 0,
and free and total memory are the host's.
"""

import os
from collections import OrderedDict
from typing import Any

from torchax.compat import jax_compat
from torchax.devices import placement

_IN_USE, _PEAK, _LIMIT = "bytes_in_use", "peak_bytes_in_use", "bytes_limit"
# By index: the peak when it was last reset, and the most that was seen since.
_peaks: dict[int, list[int]] = {}


def _index(device) -> int:
  index = placement.checked_index(device)
  return placement.current_index() if index is None else index


def memory_stats(device=None) -> OrderedDict[str, Any]:
  """The figures of `jax.Device.memory_stats()`; empty where JAX keeps none.

  Raises:
    NoSuchDeviceError: there is no such device.
  """
  index = _index(device)
  if not jax_compat.has_started():
    return OrderedDict()
  return OrderedDict(placement.jax_device(index).memory_stats() or {})


def memory_allocated(device=None) -> int:
  """Bytes that arrays take on a device now."""
  return memory_stats(device).get(_IN_USE, 0)


def max_memory_allocated(device=None) -> int:
  """The most bytes that arrays have taken on a device.

  JAX keeps one peak for the process. After `reset_peak_memory_stats` it is that again
  as soon as it grows; until then, the most that these functions have seen.
  """
  figures, index = memory_stats(device), _index(device)
  peak, in_use = figures.get(_PEAK, 0), figures.get(_IN_USE, 0)
  if index not in _peaks:
    return peak
  before, seen = _peaks[index]
  _peaks[index][1] = max(seen, in_use)
  return peak if peak > before else _peaks[index][1]


def reset_peak_memory_stats(device=None) -> None:
  """Starts `max_memory_allocated` anew; see there for what JAX can tell."""
  figures = memory_stats(device)
  _peaks[_index(device)] = [figures.get(_PEAK, 0), figures.get(_IN_USE, 0)]


def reset_accumulated_memory_stats(device=None) -> None:
  """Does nothing: JAX counts no totals that could be reset."""
  _index(device)


def memory_reserved(device=None) -> int:
  """Bytes that JAX has taken of a device, in use or not."""
  figures = memory_stats(device)
  return figures.get("pool_bytes", figures.get("bytes_reserved", 0)) or figures.get(
    _IN_USE, 0
  )


def max_memory_reserved(device=None) -> int:
  """The most bytes that JAX has taken of a device."""
  figures = memory_stats(device)
  reserved = figures.get("peak_pool_bytes", figures.get("peak_bytes_reserved", 0))
  return reserved or max_memory_allocated(device)


def mem_get_info(device=None) -> tuple[int, int]:
  """Bytes that are free for arrays on a device, and all that JAX may take of it."""
  index = _index(device)
  placement.jax_device(index)  # starts JAX, which then knows the limit
  figures = memory_stats(index)
  if _LIMIT in figures:
    return figures[_LIMIT] - figures.get(_IN_USE, 0), figures[_LIMIT]
  return _of_host("SC_AVPHYS_PAGES"), _of_host("SC_PHYS_PAGES")


def _of_host(pages: str) -> int:
  # Not every system says how much is free.
  known = pages if pages in os.sysconf_names else "SC_PHYS_PAGES"
  return os.sysconf(known) * os.sysconf("SC_PAGE_SIZE")


def accelerator_stats(device=None) -> dict[str, Any]:
  """The figures under the names of `torch.accelerator`, and under JAX's."""

  def all_of(current: int, peak: int) -> dict:
    return {"all": {"current": current, "peak": peak}}

  return {
    **memory_stats(device),
    "allocated_bytes": all_of(memory_allocated(device), max_memory_allocated(device)),
    "reserved_bytes": all_of(memory_reserved(device), max_memory_reserved(device)),
  }


def memory_summary(device=None, abbreviated: bool = False) -> str:
  """The figures of a device as text."""
  lines = [f"{name}: {value}" for name, value in memory_stats(device).items()]
  return "\n".join([f"Memory of jax:{_index(device)}", *lines])


def empty_cache() -> None:
  """Does nothing: memory is free for JAX again as soon as its last tensor is gone."""


def ipc_collect() -> None:
  """Does nothing: arrays are not shared between processes."""
