"""Devices and shardings of arrays, in terms of torch's device indices.

`jax:i` is the i-th of `jax.local_devices()`. Arrays created on JAX's default device are
uncommitted, so that JAX can combine them with sharded arrays. Arrays created on another
device are committed to it. JAX is initialized only when a device is looked up.
"""

import contextlib
import functools
import math
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from torchax.compat import jax_compat, torch_compat
from torchax.compat.patches import setting
from torchax.core import deferred
from torchax.core.recorder import Pending
from torchax.errors import NoSuchDeviceError, ShardingError

_ArrayImpl = jax_compat.ArrayImpl


class _Current(threading.local):
  """Device index and layout for new tensors on this thread; None: JAX decides."""

  index: int | None = None
  layout: Callable[[tuple], Sharding | None] | None = None


_current = _Current()


# torch's message, with the devices that JAX found.
MIXED = (
  "Expected all tensors to be on the same device, but {what} has found at least two "
  "devices. Move one of them with `.to(other.device)`. {found}"
)


class DeviceUse:
  """Flags that are set once the process uses more than JAX's default device.

  Attributes:
    multiple_devices: True once a tensor was put on another device. Until then
      operations skip the check that their tensors share a device.
    to_is_patched: True once `Tensor.to` has to look up the current device.
  """

  multiple_devices: ClassVar[bool] = False
  to_is_patched: ClassVar[bool] = False


@functools.cache
def torch_device(index: int | None = None) -> torch.device:
  """Return `torch.device("jax", index)`; the backend must be registered."""
  return torch.device("jax") if index is None else torch.device("jax", index)


@functools.cache
def _indices(devices: tuple) -> dict:
  return {device: index for index, device in enumerate(devices)}


def count() -> int:
  """Return the number of devices of this process; initializes JAX."""
  return len(jax.local_devices())


def jax_device(index: int):
  """Return the `jax.Device` of an index.

  Raises:
    NoSuchDeviceError: there is no such device.
  """
  devices = jax.local_devices()
  if not 0 <= index < len(devices):
    last = len(devices) - 1
    existing = "only jax:0" if last == 0 else f"jax:0 to jax:{last}"
    raise NoSuchDeviceError(
      f"jax:{index} does not exist: this process has {existing} "
      f"({devices[0].platform})."
    )
  return devices[index]


def index_in(device) -> int | None:
  """Return the index that `device` names, or None.

  Args:
    device: an index, "jax:1", a `torch.device`, or None. torch passes -1 for wrapper
      subclasses, which have no index.

  Raises:
    ValueError: a device of another type.
  """
  if isinstance(device, str):
    device = torch.device(device)
  if isinstance(device, torch.device):
    if device.type != "jax":
      raise ValueError(f'Expected a device of type "jax", but got "{device}".')
    device = device.index
  return None if device is None or device == -1 else operator.index(device)


def checked_index(device) -> int | None:
  """Return the index that `device` names, or None; check that the device exists.

  Raises:
    NoSuchDeviceError: no such device. `jax:0` always exists and is not looked up.
    ValueError: a device of another type.
  """
  index = index_in(device)
  if index:
    jax_device(index)
  return index


def default_index() -> int | None:
  """Return the index of JAX's default device.

  None if it is not in `jax.local_devices()`, such as the CPU of a GPU host.
  """
  device = jax.config.jax_default_device
  if device is None:
    return 0
  devices = tuple(jax.local_devices())
  if isinstance(device, str):
    return 0 if device == devices[0].platform else None
  return _indices(devices).get(device)


def current_index() -> int:
  """Return the index of the current device, where this thread creates tensors."""
  return (default_index() or 0) if _current.index is None else _current.index


def index_of(device) -> int:
  """Return the index of a device, or of the current one if it is None.

  Raises:
    NoSuchDeviceError: there is no such device.
  """
  index = checked_index(device)
  return current_index() if index is None else index


def current_platform() -> str:
  """Return the platform of the current device: "cpu", "cuda", "rocm" or "tpu"."""
  if jax.default_backend() == "cpu":
    return "cpu"
  device = jax.config.jax_default_device if _current.index is None else None
  return platform_of(jax.local_devices()[current_index()] if device is None else device)


def platform_of(device) -> str:
  """Return the platform of a `jax.Device`, or of a platform name such as "gpu"."""
  name = getattr(device, "platform", device)
  if name != "gpu":
    return name
  if device is name:
    device = jax.local_devices(backend="gpu")[0]
  return "rocm" if "rocm" in device.client.platform_version else "cuda"


def set_current(device) -> None:
  """Set the current device of this thread.

  Raises:
    NoSuchDeviceError: there is no such device.
  """
  index = checked_index(device)
  if index is None:
    return
  _current.index = index
  if index and not DeviceUse.to_is_patched:
    DeviceUse.to_is_patched = True
    torch_compat.resolve_in_to(_resolve)


def _resolve(value):
  """Replace a jax device without an index by the current device."""
  if value == "jax" if isinstance(value, str) else type(value) is torch.device:
    device = torch.device(value)
    if device.type == "jax" and device.index is None:
      return torch_device(current_index())
  return value


@contextlib.contextmanager
def using(device) -> Iterator[None]:
  """Set the current device of this thread inside the block."""
  before = _current.index
  set_current(device)
  try:
    yield
  finally:
    _current.index = before


def using_layout(
  layout: Callable[[tuple], Sharding | None],
) -> contextlib.AbstractContextManager[None]:
  """Shard tensors that this thread creates inside the block.

  Args:
    layout: function of a shape that returns its sharding; None leaves it to JAX.
  """
  return setting(_current, "layout", layout)


def layout() -> Callable[[tuple], Sharding | None] | None:
  """Return the layout of the innermost `using_layout` on this thread, if any."""
  return _current.layout


class using_default:
  """Context in which JAX chooses the device of new tensors."""

  __slots__ = ("before",)

  def __enter__(self):
    self.before = _current.index, _current.layout
    _current.index = _current.layout = None

  def __exit__(self, *exc):
    _current.index, _current.layout = self.before


# Devices of arrays --------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _index_of_sharding(sharding: Sharding) -> int | None:
  indices = _indices(tuple(jax.local_devices()))
  local = [indices[d] for d in sharding.addressable_devices if d in indices]
  return min(local, default=None)


def device_of(array) -> torch.device:
  """Return the `torch.device` of an array.

  A sharded array is on the first of its local devices, a tracer on the current device.
  An array on a device that is not in `jax.local_devices()`, such as the CPU of a GPU
  host, has no index.
  """
  if type(array) is _ArrayImpl:
    return torch_device(_index_of_sharding(array.sharding))
  if type(array) is Pending:
    return torch_device(default_index())
  return torch_device(current_index())


def is_on_several_devices(array: jax.Array) -> bool:
  """Return True for an array on several devices."""
  return type(array) is _ArrayImpl and len(array.sharding.device_set) > 1


def several_device_sharding(array: jax.Array) -> Sharding | None:
  """Return the sharding of an array on several devices; None for other arrays."""
  if type(array) is not _ArrayImpl or not jax_compat.is_committed(array):
    return None  # the common case
  return array.sharding if len(array.sharding.device_set) > 1 else None


def replicated_like(array: jax.Array) -> Sharding | None:
  """Return the replicated sharding on the mesh of an array; None without a mesh."""
  sharding = several_device_sharding(array)
  if not isinstance(sharding, NamedSharding):
    return None
  return NamedSharding(sharding.mesh, PartitionSpec())


def describe_sharding(array: jax.Array) -> str:
  """Return the sharding as text for `repr`; empty for an array on one device."""
  if not is_on_several_devices(array):
    return ""
  sharding = array.sharding
  if not isinstance(sharding, NamedSharding):
    return f", sharding={sharding}"
  spec = ", ".join(map(repr, sharding.spec))
  spec = f"PartitionSpec({spec}{',' * (len(sharding.spec) == 1)})"
  axes = ", ".join(f"{name!r}: {size}" for name, size in sharding.mesh.shape.items())
  return f", sharding={spec} over Mesh({axes})"


def is_traced(array) -> bool:
  """Return True for a tracer, which has no values and no device."""
  return type(array) is not _ArrayImpl


# Moving arrays ------------------------------------------------------------------------


def target_of(device) -> Any:
  """Return the `jax.Device` for a factory with argument `device`; None: JAX's default.

  Raises:
    NoSuchDeviceError: there is no such device.
  """
  index = None
  if device is not None and device != "jax":
    index = index_in(device)
  if index is None:
    index = _current.index
  if index is None or index == default_index():
    return None
  target = jax_device(index)
  DeviceUse.multiple_devices = True
  return target


def make(function: Callable, target) -> Any:
  """Create arrays on a device by `function()` and commit them to it.

  Args:
    function: takes no arguments; returns a tree of arrays.
    target: device, see `target_of`. None: only call `function`.
  """
  if target is None or jax_compat.is_staging():
    return function()
  with jax.default_device(target):
    arrays = function()
  return jax.tree.map(lambda array: jax.device_put(array, target), arrays)


def put(array: jax.Array, device) -> jax.Array:
  """Move an array to the device that `device` names, if it names one.

  Tracers are returned as they are: a compiled function runs on one set of devices.
  """
  index = index_in(device)
  if index is None or isinstance(array, jax.core.Tracer):
    return array
  target = jax_device(index)
  if device_of(array).index == index:
    return array
  result = jax.device_put(deferred.values(array), target)
  if index == default_index():
    return jax_compat.uncommit(result)
  DeviceUse.multiple_devices = True
  return result


def require_valid_spec(spec: PartitionSpec, shape, mesh, name: str) -> None:
  """Check a spec against a mesh and a shape, with errors in torch's terms.

  Args:
    spec: partition spec of a tensor on the mesh.
    shape: shape of the tensor; None to check only the axis names.
    mesh: a `jax.sharding.Mesh`.
    name: name of the tensor, for errors.

  Raises:
    ShardingError: the spec names an unknown axis, names an axis twice, has more parts
      than the shape has dimensions, or divides a dimension that is no multiple.
  """
  axes = dict(mesh.shape)
  if shape is not None and len(spec) > len(shape):
    raise ShardingError(
      f"{name} has {len(shape)} dimensions, of shape {list(shape)}, but {spec} has "
      f"{len(spec)} parts. Write a part for each dimension, or fewer."
    )
  seen: list[str] = []
  for dim, part in enumerate(spec):
    if part is PartitionSpec.UNCONSTRAINED:
      raise ShardingError(
        f"{name} expects a part of {spec} for dimension {dim}: an axis or None."
      )
    names = part if isinstance(part, tuple) else () if part is None else (part,)
    for axis in names:
      if axis not in axes:
        raise ShardingError(
          f"{name} is to be divided by {spec}, but the mesh has no axis {axis!r}: its "
          f"axes are {axes}."
        )
      if axis in seen:
        raise ShardingError(f"{name} is to be divided by {spec}, with {axis!r} twice.")
      seen.append(axis)
    count = math.prod(axes[axis] for axis in names)
    if shape is not None and shape[dim] % count:
      raise ShardingError(
        f"{name} of shape {list(shape)} is to be divided by {spec} over a mesh of the "
        f"axes {axes}, but its dimension {dim} of {shape[dim]} is no multiple of "
        f"{count}. Choose another dimension or axis, None in its place, or pad it."
      )


def shard(array: jax.Array, sharding: Sharding) -> jax.Array:
  """Put an array on devices by a sharding; raise ShardingError if it does not fit."""
  if isinstance(sharding, NamedSharding):
    name = f"A tensor of shape {list(array.shape)}"
    require_valid_spec(sharding.spec, array.shape, sharding.mesh, name)
  return jax.device_put(array, sharding)


def shard_like(array: jax.Array, other: jax.Array) -> jax.Array:
  """Shard an array like another one of the same shape on several devices."""
  sharding = several_device_sharding(other) if array.shape == other.shape else None
  return array if sharding is None else restore_sharding(array, sharding)


def from_shards(shape: tuple, sharding: Sharding, read: Callable) -> jax.Array:
  """Create a sharded array shard by shard, with one shard on the host at a time.

  Args:
    shape: shape of the array.
    sharding: sharding of the array; this process fills its own devices only.
    read: function of a tuple of slices. It returns that part as a numpy array that no
      other code changes.
  """
  devices: dict[tuple, list] = {}
  indices = sharding.addressable_devices_indices_map(shape)
  for device, index in indices.items():
    bounds = tuple(part.indices(size) for part, size in zip(index or (), shape))
    devices.setdefault(bounds, []).append((device, index))
  arrays = []
  for group in devices.values():
    part = read(group[0][1] or ())
    arrays += [jax.device_put(part, device) for device, _ in group]
    jax.block_until_ready(arrays[-len(group) :])
  dtype = arrays[0].dtype if arrays else None  # a process may have none of the devices
  return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)


def from_host(values: np.ndarray, sharding: Sharding | None = None) -> jax.Array:
  """Put a numpy array on the default device, or commit it to another device.

  `jnp.array` would compile a program for each new shape. In a trace, the result is a
  constant, whose numbers are known.

  Args:
    values: array of any shape that no other code uses.
    sharding: sharding of a committed array; None for an uncommitted one.
  """
  if jax.sharding.get_abstract_mesh().empty:
    if jax_compat.is_top_level():
      return jax_compat.from_host(values, sharding)
    with jax.ensure_compile_time_eval():
      return jax_compat.from_host(values)
  return jnp.array(jax_compat.with_64_bits(values))


def constrain(array: jax.Array, sharding: Sharding | None) -> jax.Array:
  """Put an array on a sharding; constrain a tracer inside its compiled function."""
  if sharding is None or not isinstance(array, jax.core.Tracer):
    return restore_sharding(array, sharding)
  axis_types = sharding.mesh.axis_types if isinstance(sharding, NamedSharding) else ()
  if AxisType.Explicit in axis_types:
    return jax.sharding.reshard(array, sharding)
  return jax.lax.with_sharding_constraint(array, sharding)


def committed_sharding(array: jax.Array) -> Sharding | None:
  """Return the sharding that an array is committed to; None if it is uncommitted."""
  if type(array) is _ArrayImpl and jax_compat.is_committed(array):
    return array.sharding
  return None


def restore_sharding(array: jax.Array, sharding: Sharding | None) -> jax.Array:
  """Put an array back on a sharding of `committed_sharding`; for None, uncommit it."""
  if type(array) is not _ArrayImpl:
    return array
  if sharding is not None:
    return array if array.sharding == sharding else jax.device_put(array, sharding)
  if jax_compat.is_committed(array) and not is_on_several_devices(array):
    return jax_compat.uncommit(jax.device_put(array, jax_device(default_index() or 0)))
  return array


def replicate_on(array: jax.Array, sharding: Sharding | None) -> jax.Array:
  """Put an array of any shape on the devices of a sharding, replicated over a mesh."""
  if isinstance(sharding, NamedSharding):
    sharding = NamedSharding(sharding.mesh, PartitionSpec())
  return restore_sharding(array, sharding)
