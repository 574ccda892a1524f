"""Streams and events of `torch.jax`: JAX orders its computations itself.

There is one stream a device, and work is on it in the order in which it was started. So
nothing has to wait for anything, except the host: for that there is `synchronize`.

C++ knows one device of this backend, and takes each index for it: `torch.Stream("jax")`
is torch's own stream of that device, `torch.jax.Stream(1)` one of another.
"""

import contextlib
import time
from collections.abc import Iterator

import jax
import torch

from torchax.compat import jax_compat, torch_compat
from torchax.devices import placement


def live_arrays() -> list[jax.Array]:
  """All arrays of the process, the ones that are being computed among them."""
  return jax.live_arrays()


def synchronize(device=None) -> None:
  """Waits until all JAX computations that were started have finished.

  Args:
    device: on which; on all devices if None.

  Raises:
    NoSuchDeviceError: there is no such device.
  """
  index = placement.checked_index(device)
  if not jax_compat.has_started():
    return
  target = None if index is None else placement.jax_device(index)
  for array in live_arrays():
    if target is None or target in array.sharding.device_set:
      array.block_until_ready()


class Stream(torch.Stream):
  """The stream of a device. All of them are the one that JAX works on.

  Args:
    device: an index, "jax:1" or a `torch.device`; the current one if None.
    priority: accepted; JAX has one.
  """

  def __new__(cls, device=None, priority: int = 0, **_ignored):
    """Raises NoSuchDeviceError for a device that does not exist."""
    index = placement.checked_index(device)
    torch_compat.register_guard()
    stream = super().__new__(cls, device="jax")
    stream._index = placement.current_index() if index is None else index
    return stream

  def __init__(self, device=None, priority: int = 0, **_ignored):
    pass

  @property
  def device(self) -> torch.device:
    return placement.torch_device(self._index)

  @property
  def device_index(self) -> int:
    return self._index

  def synchronize(self) -> None:
    """Waits until the computations of the device have finished."""
    synchronize(self._index)

  def query(self) -> bool:
    """True if nothing is being computed on the device."""
    if not jax_compat.has_started():
      return True
    device = placement.jax_device(self._index)
    arrays = [a for a in live_arrays() if device in a.sharding.device_set]
    return all(array.is_ready() for array in arrays)

  def wait_event(self, event) -> None:
    """Nothing to do: what an event stands for was started before."""

  def wait_stream(self, stream) -> None:
    """Nothing to do, as in `wait_event`."""

  def record_event(self, event=None) -> "Event":
    """An event, recorded now."""
    event = Event() if event is None else event
    event.record(self)
    return event

  def is_capturing(self) -> bool:
    """False: a stream of JAX is not recorded into a graph."""
    return False

  def __enter__(self):
    self._before = placement.current_index()
    placement.set_current(self._index)
    return self

  def __exit__(self, *exc):
    placement.set_current(self._before)

  def __eq__(self, other):
    return isinstance(other, torch.Stream) and self.device == other.device

  def __hash__(self):
    return hash(self.device)

  def __repr__(self):
    return f"torch.jax.Stream(device={str(self.device)!r})"


class Event(torch.Event):
  """A moment in the work of a device.

  Args:
    device: accepted, for torch's signature.
    enable_timing: `record` waits for the work that was started, and takes the time.
  """

  def __new__(cls, device=None, enable_timing: bool = False, **_ignored):
    """Raises NoSuchDeviceError for a device that does not exist."""
    if isinstance(device, bool):  # torch.cuda.Event has `enable_timing` first
      device, enable_timing = None, device
    index = placement.checked_index(device)
    event = super().__new__(cls, device="jax", enable_timing=enable_timing)
    event._index, event._takes_time, event._time = index, enable_timing, None
    event._is_recorded = False
    return event

  def __init__(self, device=None, enable_timing: bool = False, **_ignored):
    pass

  @property
  def device(self) -> torch.device:
    index = placement.current_index() if self._index is None else self._index
    return placement.torch_device(index)

  def record(self, stream=None) -> None:
    """Marks this moment, after all work that was started."""
    if isinstance(stream, Stream):
      self._index = stream.device_index
    self._is_recorded = True
    if self._takes_time:
      synchronize()
      self._time = time.perf_counter()

  def wait(self, stream=None) -> None:
    """Nothing to do: JAX keeps the order of its work."""

  def query(self) -> bool:
    """True if the work before the event is done."""
    return (
      self._time is not None or not self._is_recorded or Stream(self._index).query()
    )

  def synchronize(self) -> None:
    """Waits for the work before the event."""
    if self._is_recorded and self._time is None:
      synchronize(self._index)

  def elapsed_time(self, end_event: "Event") -> float:
    """Milliseconds of the host's clock from this event to another one.

    Raises:
      RuntimeError: one of them was not made with `enable_timing=True`, or not recorded.
    """
    for event in (self, end_event):
      if not event._takes_time:
        raise RuntimeError(
          "elapsed_time expects events that take the time: make both with "
          "`torch.jax.Event(enable_timing=True)`."
        )
      if event._time is None:
        raise RuntimeError(
          "elapsed_time expects events that were recorded: call `.record()` on both."
        )
    return (end_event._time - self._time) * 1000.0

  def __repr__(self):
    return f"torch.jax.Event(device={str(self.device)!r}, recorded={self._is_recorded})"


def current_stream(device=None) -> Stream:
  """The stream of a device; of the current one if None."""
  return Stream(device)


default_stream = current_stream


def set_stream(stream: torch.Stream | None) -> None:
  """Makes the device of a stream the current one."""
  placement.set_current(_index_of(stream))


@contextlib.contextmanager
def _working_on(index: int | None) -> Iterator[None]:
  with placement.using(index):
    yield


def stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[None]:
  """Works on a stream's device inside the block.

  Raises:
    TypeError: not a stream.
  """
  return _working_on(_index_of(stream))


def _index_of(stream) -> int | None:
  if stream is None:
    return None
  if not isinstance(stream, torch.Stream):
    raise TypeError(
      f"Expected a stream, such as `torch.jax.Stream(0)`, but got {stream!r}. For a "
      "device there is `torch.jax.device`."
    )
  return stream.device_index
