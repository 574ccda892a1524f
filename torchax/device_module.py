"""`torch.jax`: device module that torch calls for devices and random states.

`jax:i` is `jax.local_devices()[i]`; all devices of a process share one random state.
`torch.manual_seed` calls `manual_seed_all`; `torch.random.fork_rng` and
`torch.utils.checkpoint` read and restore the state of the current stream. Memory,
streams and generators are in the folder `devices/`.
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
from torchax.types import Device

# torch.utils.checkpoint saves the random state of initialized devices only.
_initialized = True


def is_available() -> bool:
  """Return True: JAX always has a device, at least the CPU. Does not initialize JAX.

  >>> import torch, torchax
  >>> torch.jax.is_available()
  True
  """
  return True


def is_initialized() -> bool:
  """Return True; JAX initializes its devices when the first array is created.

  >>> is_initialized()
  True
  """
  return True


def init() -> None:
  """Do nothing; JAX initializes its devices when the first array is created.

  >>> torch.jax.init()
  """


def device_count() -> int:
  """Return `len(jax.local_devices())`. Initializes JAX.

  >>> device_count() > 0
  True
  """
  return placement.count()


def current_device() -> int:
  """Return the index of the device on which this thread creates tensors.

  >>> current_device()
  0
  """
  return placement.current_index()


def set_device(device: Device) -> None:
  """Set the device on which this thread creates tensors.

  Args:
    device: an index, "jax:1" or a `torch.device`; None and -1 change nothing.

  Raises:
    NoSuchDeviceError: there is no such device. The current device stays.

  >>> set_device("jax:0")
  >>> current_device()
  0
  """
  placement.set_current(device)


def _set_index(index: int) -> None:
  # For torch, any negative index means "keep the current device".
  placement.set_current(index if index >= 0 else None)


def _exchange_index(index: int) -> int:
  before = current_device()
  _set_index(index)
  return before


class device:
  """Context in which this thread creates tensors on another device.

  Args:
    device: an index, "jax:1" or a `torch.device`; None and -1 change nothing.

  Raises:
    NoSuchDeviceError: there is no such device.

  >>> import torch, torchax
  >>> with torch.jax.device(0):
  ...   torch.ones(1, device="jax").device
  device(type='jax', index=0)
  """

  def __init__(self, device: Device):
    self.idx = placement.index_in(device)
    self.prev_idx = -1

  def __enter__(self) -> None:
    self._context = placement.using(self.idx)
    self.prev_idx = placement.current_index()
    self._context.__enter__()

  def __exit__(self, *exc) -> None:
    self._context.__exit__(*exc)


class device_of(device):
  """Context in which this thread creates tensors on the device of another tensor.

  Args:
    tensor: tensor on any device; if it is not on jax, nothing changes.

  >>> import torch, torchax
  >>> with torch.jax.device_of(torch.ones(1, device="jax:0")):
  ...   torch.jax.current_device()
  0
  """

  def __init__(self, tensor: torch.Tensor):
    super().__init__(tensor.device if tensor.device.type == "jax" else None)


@dataclasses.dataclass(frozen=True)
class DeviceProperties:
  """Properties of a device, as reported by JAX.

  Attributes:
    name: for example "NVIDIA H200", "TPU v5 lite" or "cpu".
    platform: JAX's platform name, such as "gpu".
    total_memory: bytes that JAX may allocate.
    major, minor: compute capability of an NVIDIA GPU; 0 on other devices.
    multi_processor_count: multiprocessors of a GPU; 1 on other devices.

  >>> get_device_properties().platform == jax.default_backend()
  True
  """

  name: str
  platform: str
  total_memory: int
  major: int = 0
  minor: int = 0
  multi_processor_count: int = 1


def _jax_device(device):
  return placement.jax_device(placement.index_of(device))


def get_device_name(device: Device = None) -> str:
  """Return JAX's name of a device.

  Args:
    device: an index, "jax:1" or a `torch.device`; by default the current device.

  Raises:
    NoSuchDeviceError: there is no such device.

  >>> get_device_name() == jax.local_devices()[0].device_kind
  True
  """
  return _jax_device(device).device_kind


def get_device_capability(device: Device = None) -> tuple[int, int]:
  """Return the compute capability of an NVIDIA GPU; (0, 0) on other devices.

  Args:
    device: an index, "jax:1" or a `torch.device`; by default the current device.

  Returns:
    (major, minor).

  Raises:
    NoSuchDeviceError: there is no such device.

  >>> major, minor = get_device_capability()
  >>> major >= 0
  True
  """
  numbers = str(getattr(_jax_device(device), "compute_capability", "0.0")).split(".")
  if len(numbers) != 2 or not all(part.isdigit() for part in numbers):
    return 0, 0
  return int(numbers[0]), int(numbers[1])


def get_device_properties(device: Device = None) -> DeviceProperties:
  """Return the properties of a device.

  Args:
    device: an index, "jax:1" or a `torch.device`; by default the current device.

  Raises:
    NoSuchDeviceError: there is no such device.

  >>> get_device_properties().total_memory > 0
  True
  """
  jax_device = _jax_device(device)
  return DeviceProperties(
    jax_device.device_kind,
    jax_device.platform,
    mem_get_info(device)[1],
    *get_device_capability(device),
    getattr(jax_device, "core_count", None) or 1,
  )


def is_bf16_supported(including_emulation: bool = True) -> bool:
  """Return True: XLA supports bfloat16 on every device.

  Args:
    including_emulation: ignored, for compatibility with `torch.cuda`.

  >>> is_bf16_supported()
  True
  """
  return True


def _capability(index: int) -> dict[str, set[torch.dtype]]:
  placement.checked_index(index)
  dtypes = {dtype for dtype in mappings.TORCH_DTYPE_TO_JAX if dtype is not None}
  return {"supported_dtypes": dtypes}


def _is_in_bad_fork() -> bool:
  """Return True in a fork in which JAX would hang; torch then seeds the CPU alone."""
  return forks.is_bad()


def get_amp_supported_dtype() -> list[torch.dtype]:
  """Return the dtypes of automatic mixed precision, for `torch.autocast`.

  Raises:
    PrivateApiError: this version of torch would cast nothing.

  >>> get_amp_supported_dtype()
  [torch.bfloat16, torch.float16]
  """
  torch_compat.require_autocast()
  return list(amp.LOWER_PRECISION)


def manual_seed(seed: int) -> None:
  """Seed the random streams of all threads; see `torchax.rng.manual_seed`.

  Args:
    seed: an integer in [-2**63, 2**64).

  Raises:
    SeedError, ValueError: `seed` is not an integer, or out of range.

  >>> import torch, torchax
  >>> torch.jax.manual_seed(3)
  >>> torch.jax.initial_seed()
  3
  """
  rng.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
  """Seed the random streams of all threads; `torch.manual_seed` calls this.

  Args:
    seed: an integer in [-2**63, 2**64).

  Raises:
    SeedError, ValueError: `seed` is not an integer, or out of range.

  >>> with torchax.rng_scope(0):
  ...   manual_seed_all(3)
  ...   torchax.rng.current().state
  RngState(threefry2x32, key=0:3, count=0)
  """
  rng.manual_seed(seed)


def initial_seed() -> int:
  """Return the seed of the random streams.

  >>> import torch, torchax
  >>> _ = torch.manual_seed(7)
  >>> torch.jax.initial_seed()
  7
  """
  return rng.initial_seed()


def seed() -> int:
  """Seed the random streams from the operating system; return the seed.

  >>> seed() == initial_seed()
  True
  """
  number = torch.Generator().seed()
  rng.manual_seed(number)
  return number


def seed_all() -> int:
  """Alias of `seed`: all devices share one random state.

  >>> with torchax.rng_scope(0):
  ...   isinstance(seed_all(), int)
  True
  """
  return seed()


def get_rng_state(device: int | str | torch.device = "jax") -> torch.Tensor:
  """Return a snapshot of this thread's or task's stream, for `set_rng_state`.

  Inside a compiled function the state has no value yet. The tensor is then a token
  that `set_rng_state` accepts in that function only.

  Args:
    device: any jax device; all share one random state.

  Returns:
    A CPU uint8 tensor of shape (n,): impl name, key data and draw count, or the seed
    before the first draw. With several environments it holds the states of all,
    starting with the environment that is on.

  Raises:
    NoSuchDeviceError: there is no such device.

  >>> import torch, torchax
  >>> state = torch.jax.get_rng_state()
  >>> first = torch.rand(2, device="jax")
  >>> torch.jax.set_rng_state(state)
  >>> torch.equal(torch.rand(2, device="jax"), first)
  True
  """
  placement.checked_index(device)
  return rng.snapshot()


def get_rng_state_all() -> list[torch.Tensor]:
  """Return one `get_rng_state` per device; all are equal, since devices share it.

  >>> len(get_rng_state_all()) == device_count()
  True
  """
  return [get_rng_state()] * device_count()


def set_rng_state(
  new_state: torch.Tensor, device: int | str | torch.device = "jax"
) -> None:
  """Restore the current stream to a state from `get_rng_state`.

  Args:
    new_state: uint8 tensor of shape (n,) from `get_rng_state`.
    device: any jax device; all share one random state.

  Raises:
    NoSuchDeviceError: there is no such device.
    SeedError: `new_state` is not a uint8 tensor.
    ValueError: `new_state` is not a state, or is damaged. The stream is unchanged.

  >>> set_rng_state(get_rng_state())
  """
  placement.checked_index(device)
  rng.restore(new_state)


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
  """Restore the state that `get_rng_state_all` returned.

  Args:
    new_states: uint8 tensors, one per device, all equal.

  Raises:
    ValueError: the number of states is not the number of devices, or states differ.

  >>> set_rng_state_all(get_rng_state_all())
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


# Functions behind `torch.accelerator`, by torch's names.
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
