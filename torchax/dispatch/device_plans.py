"""Devices of operations: factories with `device=`, and checks that devices agree.

While all tensors are on JAX's default device, operations do not check devices. Once
another device is in use, `Dispatcher` runs each plan by `run`: all tensors of an
operation must be on one device, as in torch, and the result is put there.
"""

import threading
from collections.abc import Callable

import jax
import torch
from jax.sharding import Sharding

from torchax.compat import jax_compat, torch_compat
from torchax.compat.patches import setting
from torchax.core.chains import WHOLE
from torchax.core.recorder import ARRAYS
from torchax.core.storage import Storage, WithoutDevice
from torchax.devices import placement
from torchax.dispatch.operands import tensors_in
from torchax.dispatch.plans import Plan
from torchax.errors import MixedDeviceError
from torchax.registry.names import aten
from torchax.rng import scope
from torchax.tensor import Tensor

_ArrayImpl = jax_compat.ArrayImpl
_META = torch.device("meta")

# Factories that take dtype and device of a tensor, but not its size.
_SIZED = frozenset(
  {
    aten.new_empty,
    aten.new_empty_strided,
    aten.new_full,
    aten.new_ones,
    aten.new_zeros,
  }
)

# Factories that read the numbers of tensors, and not their device.
_OF_VALUES = frozenset({aten.linspace, aten.logspace})


class PlacedPlan:
  """Plan of a factory: runs on the device of `device=`, or of its tensor argument."""

  def __init__(self, op, default: Callable, env):
    self.plan = default()
    self.op = op
    self._takes_size = op.overloadpacket in _SIZED
    self._reads_values = op.overloadpacket in _OF_VALUES

  def __call__(self, args, kwargs):
    device = (kwargs or {}).get("device")
    target = self._target(args, device)
    if target is None and device is not None and device.index is not None:
      return self._on_default_device(args, kwargs)
    if target is None:
      return self.plan(args, kwargs)
    if isinstance(target, torch.device):  # torch makes it
      with torch_compat.without_dispatch():
        return self.op(*args, **kwargs)
    if isinstance(target, Sharding):
      return self.plan.run_sharded(target, args, kwargs)
    if getattr(self.plan, "is_sampler", False):
      # Derive the key now, so that it stays on JAX's default device.
      scope.current(self.plan.env.streams).peek(self.plan.name)
    return run_on(lambda: self.plan(args, kwargs), target)

  def _on_default_device(self, args, kwargs):
    """Run the plan; move a result committed by its argument to the default device."""
    made = self.plan(args, kwargs)
    array = made._storage.operand
    if type(array) is _ArrayImpl and jax_compat.is_committed(array):
      target = placement.jax_device(placement.default_index())
      made._storage.array = jax.device_put(array, target)
    return made

  def _target(self, args, device):
    source = args[0] if args and isinstance(args[0], Tensor) else None
    if device is not None and device.type == "jax" and device.index is not None:
      return placement.target_of(device)
    if device is not None and device.type == "cpu":
      computes = self._reads_values or getattr(self.plan, "is_sampler", False)
      return None if source is None or computes else device
    if device == _META:
      return device
    if source is None:
      return self._default_target(args)
    index = _device_index(source)
    if index is None:
      return self._sharding_like(source, args)
    return placement.target_of(index)

  def _default_target(self, args):
    """Return the sharding of the current layout, if any, or the default device."""
    layout, size = placement.layout(), args[0] if args else None
    if type(size) is int:
      size = (size,)
    is_sized = isinstance(size, list | tuple) and isinstance(self.plan, Plan)
    if layout is None or not is_sized:
      return placement.target_of(None)
    return layout(tuple(size))

  def _sharding_like(self, source: Tensor, args):
    """Return the sharding for a result made like a tensor on several devices."""
    array = source._storage.operand
    if not placement.is_on_several_devices(array) or not isinstance(self.plan, Plan):
      return None
    if self._takes_size and tuple(args[1]) != tuple(source.shape):
      return placement.replicated_like(array)
    return (array if source._chain is WHOLE else source.jax()).sharding


def unwrap(plan: Callable) -> Callable:
  """Return the plan that computes, without one around it such as `PlacedPlan`."""
  return getattr(plan, "plan", plan)


def run_on(function: Callable, target):
  """Run `function()` and put the tensors it makes on `target`; see `target_of`."""
  made = []

  def arrays():
    made.append(function())
    return [tensor._storage.array for tensor in _jax_tensors(made)]

  moved = placement.make(arrays, target)
  for tensor, array in zip(_jax_tensors(made), moved, strict=True):
    tensor._storage.array = array
  return made[0]


def _jax_tensors(values) -> list[Tensor]:
  return [tensor for tensor in tensors_in(values) if isinstance(tensor, Tensor)]


def takes_device(op, schema) -> bool:
  """Return True for operations that make a tensor on the device of `device=`."""
  return "device" in schema.names and not schema.written


def mark_without_device(tensor: Tensor) -> Tensor:
  """Mark a tensor without an explicit device, to be mixed with those of any device."""
  if type(tensor._storage) is Storage:
    tensor._storage.__class__ = WithoutDevice
  return tensor


def run_internal_factory(env, op, types, args, kwargs) -> Tensor:
  """Run a factory that torch's C++ calls internally, without a check of devices."""
  with placement.using_default():
    return mark_without_device(
      env.dispatch(op, types, args, {**kwargs, "device": None})
    )


class _Thread(threading.local):
  """Flag of this thread: inside an operation, whose parts are not checked."""

  in_operation = False


_thread = _Thread()
_CROSSING = frozenset(
  {aten.copy_.default, aten._to_copy.default, aten.set_.source_Tensor}
)


def run(found: Callable, op, args, kwargs):
  """Run a plan while several devices are in use.

  Raises:
    MixedDeviceError: the tensors are on more than one device.
  """
  if _thread.in_operation or op in _CROSSING:
    return found(args, kwargs)
  index, is_free = _common_index(op, args, kwargs)
  with setting(_thread, "in_operation", True):
    result = found(args, kwargs)
  device = kwargs.get("device") if kwargs else None
  if device is not None and device.index is not None:
    return result  # a factory with an explicit device
  for tensor in _jax_tensors(result):
    _move_result(tensor, index, is_free)
  return result


def _device_index(tensor: Tensor) -> int | None:
  """Return the index of a tensor's device; None for traced and sharded tensors."""
  array = tensor._storage.operand
  if type(array) not in ARRAYS or placement.is_on_several_devices(array):
    return None
  return placement.device_of(array).index


def _common_index(op, args, kwargs) -> tuple[int | None, bool]:
  """Return the device index of an operation's tensors, and True if all are unplaced."""
  first, is_free, is_placed = None, False, False
  for tensor in _jax_tensors((args, kwargs)):
    if type(tensor._storage) is WithoutDevice:
      is_free = True
      continue
    is_placed = True
    index = _device_index(tensor)
    if index is None or index == first:
      continue
    if first is not None:
      raise MixedDeviceError(
        "Expected all tensors to be on the same device, but found at least two devices,"
        f" jax:{first} and jax:{index}! (in {op}) Move one of them with "
        "`.to(other.device)`."
      )
    first = index
  return first, is_free and not is_placed


def _move_result(tensor: Tensor, index: int | None, is_free: bool) -> None:
  """Put an uncommitted result, such as one of the host, on the arguments' device."""
  storage = tensor._storage
  if is_free:
    mark_without_device(tensor)
  array = storage.array
  if index is None or type(array) is not _ArrayImpl or jax_compat.is_committed(array):
    return
  storage.array = placement.put(array, index)
