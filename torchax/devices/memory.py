"""Memory statistics of the devices, for `torch.jax` (`device_module.py`).

JAX keeps statistics of GPUs and TPUs. It keeps none of its CPU device: there they are
0, and free and total memory are the host's.
"""

import os
from collections import OrderedDict
from typing import Any

from torchax.compat import jax_compat
from torchax.devices import placement
from torchax.types import Device

_IN_USE, _PEAK, _LIMIT = "bytes_in_use", "peak_bytes_in_use", "bytes_limit"
# Device index -> [JAX's peak at the last reset, largest value seen since].
_peaks: dict[int, list[int]] = {}


def memory_stats(device: Device = None) -> OrderedDict[str, Any]:
  """Return `jax.Device.memory_stats()`; empty if JAX keeps none.

  Args:
    device: an index, "jax:1" or a `torch.device`; the current device if None.

  Raises:
    NoSuchDeviceError: there is no such device.

  >>> isinstance(memory_stats(), dict)
  True
  """
  index = placement.index_of(device)
  if not jax_compat.has_started():
    return OrderedDict()
  return OrderedDict(placement.jax_device(index).memory_stats() or {})


def memory_allocated(device: Device = None) -> int:
  """Return the bytes of the arrays on a device.

  Args:
    device: an index, "jax:1" or a `torch.device`; the current device if None.

  Raises:
    NoSuchDeviceError: there is no such device.

  >>> x = torch.ones(1000, device="jax")
  >>> memory_allocated() in (0, *range(4000, max_memory_allocated() + 1))
  True
  """
  return memory_stats(device).get(_IN_USE, 0)


def max_memory_allocated(device: Device = None) -> int:
  """Return the peak of `memory_allocated` on a device.

  JAX keeps one peak for the process and cannot reset it. After
  `reset_peak_memory_stats` the result is the largest value at calls of this function.
  Once JAX's peak exceeds its value at the reset, it is JAX's peak.

  Args:
    device: an index, "jax:1" or a `torch.device`; the current device if None.

  Raises:
    NoSuchDeviceError: there is no such device.

  >>> max_memory_allocated() >= memory_allocated()
  True
  """
  figures, index = memory_stats(device), placement.index_of(device)
  peak, in_use = figures.get(_PEAK, 0), figures.get(_IN_USE, 0)
  if index not in _peaks:
    return peak
  before, seen = _peaks[index]
  _peaks[index][1] = max(seen, in_use)
  return peak if peak > before else _peaks[index][1]


def reset_peak_memory_stats(device: Device = None) -> None:
  """Reset the peak of `max_memory_allocated`, within the limits described there.

  Args:
    device: an index, "jax:1" or a `torch.device`; the current device if None.

  Raises:
    NoSuchDeviceError: there is no such device.

  >>> reset_peak_memory_stats()
  >>> max_memory_allocated() == memory_allocated()
  True
  """
  figures = memory_stats(device)
  _peaks[placement.index_of(device)] = [figures.get(_PEAK, 0), figures.get(_IN_USE, 0)]


def reset_accumulated_memory_stats(device: Device = None) -> None:
  """Do nothing: JAX keeps no accumulated statistics.

  Args:
    device: an index, "jax:1" or a `torch.device`; the current device if None.

  Raises:
    NoSuchDeviceError: there is no such device.

  >>> reset_accumulated_memory_stats()
  """
  placement.index_of(device)


def memory_reserved(device: Device = None) -> int:
  """Return the bytes that JAX has reserved on a device, in use or not.

  Args:
    device: an index, "jax:1" or a `torch.device`; the current device if None.

  Raises:
    NoSuchDeviceError: there is no such device.

  >>> memory_reserved() >= memory_allocated()
  True
  """
  figures = memory_stats(device)
  return figures.get("pool_bytes", figures.get("bytes_reserved", 0)) or figures.get(
    _IN_USE, 0
  )


def max_memory_reserved(device: Device = None) -> int:
  """Return the peak of `memory_reserved` on a device.

  Args:
    device: an index, "jax:1" or a `torch.device`; the current device if None.

  Raises:
    NoSuchDeviceError: there is no such device.

  >>> max_memory_reserved() >= memory_reserved()
  True
  """
  figures = memory_stats(device)
  reserved = figures.get("peak_pool_bytes", figures.get("peak_bytes_reserved", 0))
  return reserved or max_memory_allocated(device)


def mem_get_info(device: Device = None) -> tuple[int, int]:
  """Return the free bytes on a device, and the bytes that JAX may use in total.

  Args:
    device: an index, "jax:1" or a `torch.device`; the current device if None.

  Returns:
    (free, total), in bytes.

  Raises:
    NoSuchDeviceError: there is no such device.

  >>> free, total = mem_get_info()
  >>> 0 < free <= total
  True
  """
  index = placement.index_of(device)
  placement.jax_device(index)  # starts JAX, which then knows the limit
  figures = memory_stats(index)
  if _LIMIT in figures:
    return figures[_LIMIT] - figures.get(_IN_USE, 0), figures[_LIMIT]
  return _host_bytes("SC_AVPHYS_PAGES"), _host_bytes("SC_PHYS_PAGES")


def _host_bytes(pages: str) -> int:
  # Some systems do not report free pages.
  name = pages if pages in os.sysconf_names else "SC_PHYS_PAGES"
  return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


def accelerator_stats(device: Device = None) -> dict[str, Any]:
  """Return the statistics under the names of `torch.accelerator` and of JAX."""

  def both(current: int, peak: int) -> dict:
    return {"all": {"current": current, "peak": peak}}

  return {
    **memory_stats(device),
    "allocated_bytes": both(memory_allocated(device), max_memory_allocated(device)),
    "reserved_bytes": both(memory_reserved(device), max_memory_reserved(device)),
  }


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
  """Return the statistics of a device as text.

  Args:
    device: an index, "jax:1" or a `torch.device`; the current device if None.
    abbreviated: ignored, for compatibility with `torch.cuda`.

  Returns:
    One line per statistic of `memory_stats`, after a title.

  Raises:
    NoSuchDeviceError: there is no such device.

  >>> print(memory_summary().splitlines()[0])
  Memory of jax:0
  """
  lines = [f"{name}: {value}" for name, value in memory_stats(device).items()]
  return "\n".join([f"Memory of jax:{placement.index_of(device)}", *lines])


def empty_cache() -> None:
  """Do nothing: JAX frees memory as soon as its last tensor is deleted.

  >>> torch.jax.empty_cache()
  """


def ipc_collect() -> None:
  """Do nothing: arrays are not shared between processes.

  >>> torch.jax.ipc_collect()
  """
