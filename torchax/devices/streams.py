"""Streams and events of `torch.jax` (`device_module.py`).

Each device has one stream, which runs work in the order in which it was started. So no
stream waits for another; only the host waits, by `synchronize`.

torch's C++ knows one device of this backend and maps every index to it:
`torch.Stream("jax")` is torch's stream of that device. `torch.jax.Stream(1)` is the
stream of another device.
"""

import contextlib
import time
from typing import Any

import jax
import torch

from torchax.compat import jax_compat
from torchax.core import deferred
from torchax.devices import placement
from torchax.types import Device


def live_arrays() -> list[jax.Array]:
  """Return all arrays of the process, including those still being computed."""
  deferred.end()
  return jax.live_arrays()


def synchronize(device: Device = None) -> None:
  """Wait until all started JAX computations have finished.

  Args:
    device: the device to wait for; all devices if None.

  Raises:
    NoSuchDeviceError: there is no such device.

  >>> x = torch.ones(2, device="jax") + 1
  >>> synchronize()
  >>> torch.jax.current_stream().query()
  True
  """
  index = placement.checked_index(device)
  if not jax_compat.has_started():
    return
  target = None if index is None else placement.jax_device(index)
  for array in live_arrays():
    if target is None or target in array.sharding.device_set:
      array.block_until_ready()


class Stream(torch.Stream):
  """Stream of a device; all streams of a device are the same one.

  Args:
    device: an index, "jax:1" or a `torch.device`; the current device if None.
    priority: ignored; JAX has no priorities.

  Raises:
    NoSuchDeviceError: there is no such device.

  >>> with Stream(0) as stream:
  ...   x = torch.ones(2, device="jax")
  >>> stream
  torch.jax.Stream(device='jax:0')
  """

  def __new__(cls, device: Device = None, priority: int = 0, **_ignored: Any):
    """Raise NoSuchDeviceError for a device that does not exist."""
    index = placement.index_of(device)
    stream = super().__new__(cls, device="jax")
    stream._index = index
    return stream

  def __init__(self, device: Device = None, priority: int = 0, **_ignored: Any):
    pass

  @property
  def device(self) -> torch.device:
    """Device of the stream.

    >>> torch.jax.Stream(0).device
    device(type='jax', index=0)
    """
    return placement.torch_device(self._index)

  @property
  def device_index(self) -> int:
    """Index of the stream's device.

    >>> torch.jax.Stream(0).device_index
    0
    """
    return self._index

  def synchronize(self) -> None:
    """Wait until the computations of the device have finished."""
    synchronize(self._index)

  def query(self) -> bool:
    """Return True if nothing is being computed on the device.

    >>> stream = torch.jax.current_stream()
    >>> stream.synchronize()
    >>> stream.query()
    True
    """
    if not jax_compat.has_started():
      return True
    device = placement.jax_device(self._index)
    arrays = [a for a in live_arrays() if device in a.sharding.device_set]
    return all(array.is_ready() for array in arrays)

  def wait_event(self, event: torch.Event) -> None:
    """Do nothing: the work before the event was started earlier, so it runs first."""

  def wait_stream(self, stream: torch.Stream) -> None:
    """Do nothing, as in `wait_event`."""

  def record_event(self, event: "Event | None" = None) -> "Event":
    """Record an event now and return it.

    Args:
      event: the event; a new one if None.

    Returns:
      The event.

    >>> torch.jax.current_stream().record_event()
    torch.jax.Event(device='jax:0', recorded=True)
    """
    event = Event() if event is None else event
    event.record(self)
    return event

  def is_capturing(self) -> bool:
    """Return False: a stream of JAX is not recorded into a graph."""
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
  """Event in the stream of a device.

  Args:
    device: ignored except for the check that it exists.
    enable_timing: True to make `record` wait for all started work and take the time.

  Raises:
    NoSuchDeviceError: there is no such device.

  >>> x = torch.ones(100, device="jax")
  >>> start, end = (Event(enable_timing=True) for _ in range(2))
  >>> start.record()
  >>> y = x.cumsum(0)
  >>> end.record()
  >>> start.elapsed_time(end) > 0
  True
  """

  def __new__(cls, device: Device = None, enable_timing: bool = False, **_ignored: Any):
    """Raise NoSuchDeviceError for a device that does not exist."""
    if isinstance(device, bool):  # torch.cuda.Event has `enable_timing` first
      device, enable_timing = None, device
    index = placement.checked_index(device)
    event = super().__new__(cls, device="jax", enable_timing=enable_timing)
    event._index, event._takes_time, event._time = index, enable_timing, None
    event._is_recorded = False
    return event

  def __init__(
    self, device: Device = None, enable_timing: bool = False, **_ignored: Any
  ):
    pass

  @property
  def device(self) -> torch.device:
    """Device of the event; the current device unless one was given.

    >>> torch.jax.Event().device
    device(type='jax', index=0)
    """
    index = placement.current_index() if self._index is None else self._index
    return placement.torch_device(index)

  def record(self, stream: torch.Stream | None = None) -> None:
    """Record the event after all started work.

    Args:
      stream: stream whose device `synchronize` waits for; None keeps the event's.
    """
    if isinstance(stream, Stream):
      self._index = stream.device_index
    self._is_recorded = True
    if self._takes_time:
      synchronize()
      self._time = time.perf_counter()

  def wait(self, stream: torch.Stream | None = None) -> None:
    """Do nothing: a device runs its work in order."""

  def query(self) -> bool:
    """Return True if the work before the event has finished.

    >>> event = torch.jax.current_stream().record_event()
    >>> event.synchronize()
    >>> event.query()
    True
    """
    return (
      self._time is not None or not self._is_recorded or Stream(self._index).query()
    )

  def synchronize(self) -> None:
    """Wait for the work before the event."""
    if self._is_recorded and self._time is None:
      synchronize(self._index)

  def elapsed_time(self, end_event: "Event") -> float:
    """Return the milliseconds from this event to `end_event`, by the host's clock.

    Args:
      end_event: event that was recorded later.

    Raises:
      RuntimeError: an event was created without `enable_timing=True`, or not recorded.
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


def current_stream(device: Device = None) -> Stream:
  """Return the stream of a device.

  Args:
    device: an index, "jax:1" or a `torch.device`; the current device if None.

  Raises:
    NoSuchDeviceError: there is no such device.

  >>> current_stream().device
  device(type='jax', index=0)
  """
  return Stream(device)


default_stream = current_stream


def set_stream(stream: torch.Stream | None) -> None:
  """Make the device of a stream the current device.

  Args:
    stream: stream of a device; None changes nothing.

  Raises:
    TypeError: the argument is no stream.

  >>> with torch.jax.device(0):
  ...   set_stream(torch.jax.Stream(0))
  ...   torch.jax.current_device()
  0
  """
  placement.set_current(_index_of(stream))


def stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[None]:
  """Make a stream's device the current device inside the block.

  Args:
    stream: stream of a device; None changes nothing.

  Raises:
    TypeError: the argument is no stream.

  >>> with stream(torch.jax.Stream(0)):
  ...   torch.ones(1, device="jax").device
  device(type='jax', index=0)
  """
  return placement.using(_index_of(stream))


def _index_of(stream) -> int | None:
  if stream is None:
    return None
  if not isinstance(stream, torch.Stream):
    raise TypeError(
      f"Expected a stream, such as `torch.jax.Stream(0)`, but got {stream!r}. For a "
      "device there is `torch.jax.device`."
    )
  return stream.device_index
