"""`torch.jax`: the device module that torch asks about devices and random states.

`jax:i` is the i-th of `jax.local_devices()`; the random state is one for the process.
`torch.manual_seed` calls `manual_seed_all`; `torch.random.fork_rng` and
`torch.utils.checkpoint` read and restore the state of the current stream.
"""

import dataclasses

import torch

from torchax import amp, rng
from torchax.compat import torch_compat
from torchax.core import mappings
from torchax.devices import forks, placement
from torchax.devices.generator import Generator
from torchax.devices.memory import (
  accelerator_stats,
  empty_cache,
  ipc_collect,
  max_memory_allocated,
  max_memory_reserved,
  mem_get_info,
  memory_allocated,
  memory_reserved,
  memory_stats,
  memory_summary,
  reset_accumulated_memory_stats,
  reset_peak_memory_stats,
)
from torchax.devices.streams import (
  Event,
  Stream,
  current_stream,
  default_stream,
  set_stream,
  stream,
  synchronize,
)

# torch.utils.checkpoint saves the random state of initialised devices only.
_initialized = True


def is_available() -> bool:
  """True: JAX has a device everywhere, if only the CPU. It is not started for this."""
  return True


def is_initialized() -> bool:
  """True; JAX sets up its devices when the first array is made."""
  return True


def init() -> None:
  """Does nothing; JAX sets up its devices when the first array is made."""


def device_count() -> int:
  """How many devices this process has: `len(jax.local_devices())`. Starts JAX."""
  return placement.count()


def current_device() -> int:
  """The index of the device on which this thread makes tensors."""
  return placement.current_index()


def set_device(device) -> None:
  """Makes tensors on another device from now on, on this thread.

  Args:
    device: an index, "jax:1" or a `torch.device`; None and -1 change nothing.

  Raises:
    NoSuchDeviceError: there is no such device. The old one stays.
  """
  placement.set_current(device)


def _set_index(index: int) -> None:
  # torch takes any negative index for "leave it".
  placement.set_current(index if index >= 0 else None)


def _exchange_index(index: int) -> int:
  before = current_device()
  _set_index(index)
  return before


class device:
  """A context that makes tensors on another device, on this thread.

  Args:
    device: as for `set_device`.
  """

  def __init__(self, device):
    self.idx = placement.index_in(device)
    self.prev_idx = -1

  def __enter__(self) -> None:
    self._context = placement.using(self.idx)
    self.prev_idx = placement.current_index()
    self._context.__enter__()

  def __exit__(self, *exc) -> None:
    self._context.__exit__(*exc)


class device_of(device):
  """A context that makes tensors on the device of another one.

  Args:
    tensor: of any device; one that is not on jax changes nothing.
  """

  def __init__(self, tensor: torch.Tensor):
    super().__init__(tensor.device if tensor.device.type == "jax" else None)


@dataclasses.dataclass(frozen=True)
class DeviceProperties:
  """What JAX knows of a device.

  Attributes:
    name: such as "NVIDIA H200", "TPU v5 lite" or "cpu".
    platform: JAX's name of the kind of device.
    total_memory: bytes that JAX may take of it.
    major, minor: the compute capability of an NVIDIA GPU; 0 elsewhere.
    multi_processor_count: of a GPU; 1 elsewhere.
  """

  name: str
  platform: str
  total_memory: int
  major: int = 0
  minor: int = 0
  multi_processor_count: int = 1


def _jax_device(device):
  index = placement.checked_index(device)
  return placement.jax_device(current_device() if index is None else index)


def get_device_name(device=None) -> str:
  """The name of a device, as JAX has it."""
  return _jax_device(device).device_kind


def get_device_capability(device=None) -> tuple[int, int]:
  """The compute capability of an NVIDIA GPU; (0, 0) elsewhere."""
  parts = str(getattr(_jax_device(device), "compute_capability", "0.0")).split(".")
  if len(parts) != 2 or not all(part.isdigit() for part in parts):
    return 0, 0
  return int(parts[0]), int(parts[1])


def get_device_properties(device=None) -> DeviceProperties:
  """What JAX knows of a device.

  Raises:
    NoSuchDeviceError: there is no such device.
  """
  found = _jax_device(device)
  return DeviceProperties(
    found.device_kind,
    found.platform,
    mem_get_info(device)[1],
    *get_device_capability(device),
    getattr(found, "core_count", None) or 1,
  )


def is_bf16_supported(including_emulation: bool = True) -> bool:
  """True: XLA computes in bfloat16 on every device."""
  return True


def _supported_dtypes() -> set[torch.dtype]:
  return {dtype for dtype in mappings.TORCH_DTYPE_TO_JAX if dtype is not None}


def _capability(index: int) -> dict[str, set[torch.dtype]]:
  placement.checked_index(index)
  return {"supported_dtypes": _supported_dtypes()}


def _lazy_init() -> None:
  """torch calls it once, before its C++ makes or moves a tensor to the device."""
  torch_compat.register_guard()


def _is_in_bad_fork() -> bool:
  """True where JAX would hang; torch then seeds the CPU alone, as workers need."""
  return forks.is_bad()


def get_amp_supported_dtype() -> list[torch.dtype]:
  """The dtypes that automatic mixed precision may use; `torch.autocast` asks.

  Raises:
    PrivateApiError: this version of torch would cast nothing.
  """
  torch_compat.require_autocast()
  return list(amp.LOWER_PRECISION)


def manual_seed(seed: int) -> None:
  """Seeds the random streams of all threads; see `torchax.rng.manual_seed`."""
  rng.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
  """Seeds the random streams of all threads; `torch.manual_seed` calls it."""
  rng.manual_seed(seed)


def initial_seed() -> int:
  """The seed that the random streams were started with."""
  return rng.initial_seed()


def seed() -> int:
  """Seeds the random streams with a number from the operating system; returns it."""
  number = torch.Generator().seed()
  rng.manual_seed(number)
  return number


def seed_all() -> int:
  """The same as `seed`."""
  return seed()


def get_rng_state(device: int | str | torch.device = "jax") -> torch.Tensor:
  """Snapshot of the current stream of this thread or task, for `set_rng_state`.

  Returns:
    A CPU uint8 tensor of shape (n,): impl name, key data and number of draws; or the
    seed, as long as nothing was drawn. Where there are several environments, all of
    their states, that of the one which is on first.

  Inside a compiled function, where the state has no value yet, the tensor is a mark
  that `set_rng_state` knows in that function alone.
  """
  placement.checked_index(device)
  return rng.snapshot()


def get_rng_state_all() -> list[torch.Tensor]:
  """`get_rng_state` of every device, which is the same: they share one stream."""
  return [get_rng_state()] * device_count()


def set_rng_state(
  new_state: torch.Tensor, device: int | str | torch.device = "jax"
) -> None:
  """Makes the current stream go on where `get_rng_state` was called.

  Raises:
    SeedError: not a uint8 tensor.
    ValueError: not a state, or a damaged one. The stream stays as it was.
  """
  placement.checked_index(device)
  rng.restore(new_state)


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
  """`set_rng_state` of every device: what `get_rng_state_all` gave.

  Raises:
    ValueError: another number of states, or states that differ: devices share one.
  """
  if len(new_states) != device_count():
    raise ValueError(
      f"set_rng_state_all expects a state for each of {device_count()} devices, but "
      f"got {len(new_states)}. With `set_rng_state` one is enough."
    )
  first = new_states[0]
  if any(state is not first and not torch.equal(state, first) for state in new_states):
    raise ValueError(
      "set_rng_state_all expects the same state for each device, since they share one "
      "random stream, but got different ones. Choose one, and call `set_rng_state`."
    )
  set_rng_state(first)


# What `torch.accelerator` asks, by torch's names of the questions.
ANSWERS = {
  "getDeviceIndex": current_device,
  "setDeviceIndex": _set_index,
  "exchangeDevice": _exchange_index,
  "maybeExchangeDevice": _exchange_index,
  "getStream": current_stream,
  "setStream": set_stream,
  "synchronizeDevice": synchronize,
  "getDeviceCapability": _capability,
  "isAllocatorInitialized": lambda: True,
  "emptyCache": empty_cache,
  "emptyHostCache": empty_cache,
  "getDeviceStats": accelerator_stats,
  "resetAccumulatedStats": reset_accumulated_memory_stats,
  "resetPeakStats": reset_peak_memory_stats,
  "getMemoryInfo": mem_get_info,
}

__all__ = [
  "DeviceProperties",
  "Event",
  "Generator",
  "Stream",
  "current_device",
  "current_stream",
  "default_stream",
  "device",
  "device_count",
  "device_of",
  "empty_cache",
  "get_amp_supported_dtype",
  "get_device_capability",
  "get_device_name",
  "get_device_properties",
  "get_rng_state",
  "get_rng_state_all",
  "init",
  "initial_seed",
  "ipc_collect",
  "is_available",
  "is_bf16_supported",
  "is_initialized",
  "manual_seed",
  "manual_seed_all",
  "max_memory_allocated",
  "max_memory_reserved",
  "mem_get_info",
  "memory_allocated",
  "memory_reserved",
  "memory_stats",
  "memory_summary",
  "reset_accumulated_memory_stats",
  "reset_peak_memory_stats",
  "seed",
  "seed_all",
  "set_device",
  "set_rng_state",
  "set_rng_state_all",
  "set_stream",
  "stream",
  "synchronize",
]
