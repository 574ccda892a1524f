"""Which JAX device a torch index means, and where arrays lie.

`jax:i` is the i-th of `jax.local_devices()`. What is made on JAX's own default device
stays uncommitted, as JAX has it, so that it joins sharded arrays; what is asked for on
another one is committed to it. Nothing here starts JAX before a device is looked at.
"""

import contextlib
import functools
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
from torchax.errors import NoSuchDeviceError, ShardingError

_ArrayImpl = jax_compat.ArrayImpl


class _Current(threading.local):
  """What this thread has chosen by `torch.jax.set_device`; None leaves it to JAX."""

  index: int | None = None
  layout: Callable[[tuple], Sharding | None] | None = None


_current = _Current()


# What torch says, and what JAX has found.
MIXED = (
  "Expected all tensors to be on the same device, but {what} has found at least two "
  "devices. Move one of them with `.to(other.device)`. {found}"
)


class Several:
  """Whether torch has put anything on another device than JAX's default one.

  Attributes:
    in_use: as long as it is False, no operation looks where its tensors lie.
    resolves: whether `Tensor.to` asks what the current device is.
  """

  in_use: ClassVar[bool] = False
  resolves: ClassVar[bool] = False


@functools.cache
def torch_device(index: int | None = None) -> torch.device:
  """`torch.device("jax", index)`, which exists once the backend is registered."""
  return torch.device("jax") if index is None else torch.device("jax", index)


@functools.cache
def _indices(devices: tuple) -> dict:
  return {device: index for index, device in enumerate(devices)}


def count() -> int:
  """How many devices this process has; starts JAX."""
  return len(jax.local_devices())


def jax_device(index: int):
  """The `jax.Device` of an index.

  Raises:
    NoSuchDeviceError: there is none.
  """
  devices = jax.local_devices()
  if not 0 <= index < len(devices):
    last = len(devices) - 1
    known = "jax:0 alone" if last == 0 else f"jax:0 to jax:{last}"
    raise NoSuchDeviceError(
      f"jax:{index} does not exist: this process has {known} "
      f"({devices[0].platform}). Ask for one of them."
    )
  return devices[index]


def index_in(device) -> int | None:
  """The index that torch's ways to name a device stand for; None if they give none.

  Args:
    device: an index, "jax:1", a `torch.device`, or None. torch passes -1 for wrappers,
      which have no index.

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
  """The index that `device` stands for, if it names one.

  Raises:
    NoSuchDeviceError: no such device. `jax:0` always exists, and is not looked up.
    ValueError: a device of another type.
  """
  index = index_in(device)
  if index:
    jax_device(index)
  return index


def default_index() -> int | None:
  """The index of the device that JAX itself uses where none is named.

  None for one that is none of `jax.local_devices()`: the CPU beside a GPU.
  """
  device = jax.config.jax_default_device
  if device is None:
    return 0
  devices = tuple(jax.local_devices())
  if isinstance(device, str):
    return 0 if device == devices[0].platform else None
  return _indices(devices).get(device)


def current_index() -> int:
  """The index of the device on which this thread makes tensors."""
  return (default_index() or 0) if _current.index is None else _current.index


def current_platform() -> str:
  """Of the device on which this thread makes tensors: "cpu", "cuda", "rocm", "tpu"."""
  if jax.default_backend() == "cpu":
    return "cpu"
  device = jax.config.jax_default_device if _current.index is None else None
  return platform_of(jax.local_devices()[current_index()] if device is None else device)


def platform_of(device) -> str:
  """Of a `jax.Device`, or of its platform by name."""
  name = getattr(device, "platform", device)
  if name != "gpu":
    return name
  if device is name:
    device = jax.local_devices(backend="gpu")[0]
  return "rocm" if "rocm" in device.client.platform_version else "cuda"


def set_current(device) -> None:
  """Makes tensors on another device from now on, on this thread.

  Raises:
    NoSuchDeviceError: there is none.
  """
  index = checked_index(device)
  if index is None:
    return
  _current.index = index
  if index and not Several.resolves:
    Several.resolves = True
    torch_compat.resolve_in_to(_resolved)


def _resolved(value):
  """A jax device without an index as the current one; anything else as it is."""
  if value == "jax" if isinstance(value, str) else type(value) is torch.device:
    device = torch.device(value)
    if device.type == "jax" and device.index is None:
      return torch_device(current_index())
  return value


@contextlib.contextmanager
def using(device) -> Iterator[None]:
  """Makes tensors on another device inside the block, on this thread."""
  before = _current.index
  set_current(device)
  try:
    yield
  finally:
    _current.index = before


@contextlib.contextmanager
def laid_out(layout: Callable[[tuple], Sharding | None]) -> Iterator[None]:
  """Makes tensors on several devices inside the block, on this thread.

  Args:
    layout: of a shape, how a tensor of it is laid out; None leaves it to JAX.
  """
  before = _current.layout
  _current.layout = layout
  try:
    yield
  finally:
    _current.layout = before


def layout() -> Callable[[tuple], Sharding | None] | None:
  """What `laid_out` has been given on this thread; None outside of it."""
  return _current.layout


class anywhere:
  """A context in which JAX decides where tensors are made, whatever was chosen."""

  __slots__ = ("before",)

  def __enter__(self):
    self.before = _current.index, _current.layout
    _current.index = _current.layout = None

  def __exit__(self, *exc):
    _current.index, _current.layout = self.before


# Where arrays lie ---------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _index_of_sharding(sharding: Sharding) -> int | None:
  indices = _indices(tuple(jax.local_devices()))
  found = [indices[d] for d in sharding.addressable_devices if d in indices]
  return min(found, default=None)


def device_of(array) -> torch.device:
  """Where an array lies, to torch.

  A sharded array is on the first of its devices that this process has; one that is
  being traced, on the current device. One on a device that is none of
  `jax.local_devices()`, such as the CPU beside a GPU, has no index.
  """
  if type(array) is _ArrayImpl:
    return torch_device(_index_of_sharding(array.sharding))
  return torch_device(current_index())


def is_spread(array: jax.Array) -> bool:
  """True for an array on several devices."""
  return type(array) is _ArrayImpl and len(array.sharding.device_set) > 1


def spread_of(array: jax.Array) -> Sharding | None:
  """How an array lies on several devices; None for any other one."""
  if type(array) is not _ArrayImpl or not jax_compat.is_committed(array):
    return None  # the common case
  return array.sharding if len(array.sharding.device_set) > 1 else None


def whole_beside(array: jax.Array) -> Sharding | None:
  """How what has another shape lies beside an array on a mesh: whole on each device."""
  sharding = spread_of(array)
  if not isinstance(sharding, NamedSharding):
    return None
  return NamedSharding(sharding.mesh, PartitionSpec())


def described(array: jax.Array) -> str:
  """Text for `repr` about an array on several devices; empty for any other one."""
  if not is_spread(array):
    return ""
  sharding = array.sharding
  if not isinstance(sharding, NamedSharding):
    return f", sharding={sharding}"
  spec = ", ".join(map(repr, sharding.spec))
  spec = f"PartitionSpec({spec}{',' * (len(sharding.spec) == 1)})"
  axes = ", ".join(f"{name!r}: {size}" for name, size in sharding.mesh.shape.items())
  return f", sharding={spec} over Mesh({axes})"


def is_traced(array) -> bool:
  """True for an array without numbers, which is nowhere yet."""
  return type(array) is not _ArrayImpl


# Putting them there -------------------------------------------------------------------


def target_of(device) -> Any:
  """The `jax.Device` that a factory with this device has to use; None leaves it to JAX.

  Raises:
    NoSuchDeviceError: there is none.
  """
  index = None
  if device is not None and device != "jax":
    index = index_in(device)
  if index is None:
    index = _current.index
  if index is None or index == default_index():
    return None
  target = jax_device(index)
  Several.in_use = True
  return target


def make(function: Callable, target) -> Any:
  """Runs `function()`, which makes arrays, on a device; the results are committed.

  Args:
    function: without arguments; returns a tree of arrays.
    target: see `target_of`; None lets it run as it is.
  """
  if target is None or jax_compat.is_staging():
    return function()
  with jax.default_device(target):
    made = function()
  return jax.tree.map(lambda array: jax.device_put(array, target), made)


def put(array: jax.Array, device) -> jax.Array:
  """An array on the device that `device` names; itself if it is there, or names none.

  Inside a compiled function all is where the function runs, and nothing is moved.
  """
  index = index_in(device)
  if index is None or isinstance(array, jax.core.Tracer):
    return array
  target = jax_device(index)
  if device_of(array).index == index:
    return array
  moved = jax.device_put(array, target)
  if index == default_index():
    return jax_compat.uncommitted(moved)
  Several.in_use = True
  return moved


def require_fitting(spec: PartitionSpec, shape, mesh, name: str) -> None:
  """Raises what is wrong with a spec, where JAX would speak of arrays.

  Args:
    spec: how a tensor is to lie on the mesh.
    shape: of the tensor; None checks the names of the axes alone.
    mesh: a `jax.sharding.Mesh`.
    name: of the tensor, for errors.

  Raises:
    ShardingError: the spec names an axis that the mesh lacks, or one twice, has more
      parts than the shape has dimensions, or divides one that is no multiple.
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
    count = 1
    for axis in names:
      count *= axes[axis]
    if shape is not None and shape[dim] % count:
      raise ShardingError(
        f"{name} of shape {list(shape)} is to be divided by {spec} over a mesh of the "
        f"axes {axes}, but its dimension {dim} of {shape[dim]} is no multiple of "
        f"{count}. Choose another dimension or axis, None in its place, or pad it."
      )


def lay_out(array: jax.Array, sharding: Sharding) -> jax.Array:
  """An array as a sharding says; `require_fitting` has said what does not fit."""
  if isinstance(sharding, NamedSharding):
    name = f"A tensor of shape {list(array.shape)}"
    require_fitting(sharding.spec, array.shape, sharding.mesh, name)
  return jax.device_put(array, sharding)


def put_as(array: jax.Array, other: jax.Array) -> jax.Array:
  """An array laid out as another one of its shape, where that is on several devices."""
  place = spread_of(other) if array.shape == other.shape else None
  return array if place is None else put_back(array, place)


def from_parts(shape: tuple, sharding: Sharding, read: Callable) -> jax.Array:
  """An array on several devices, made part by part; one part at a time is on the host.

  Args:
    shape: of the array.
    sharding: how it lies on the devices; those of other processes are theirs to fill.
    read: of a tuple of slices, that part as a numpy array that nobody else changes.
  """
  devices: dict[tuple, list] = {}
  indices = sharding.addressable_devices_indices_map(shape)
  for device, index in indices.items():
    bounds = tuple(part.indices(size) for part, size in zip(index or (), shape))
    devices.setdefault(bounds, []).append((device, index))
  made = []
  for group in devices.values():
    part = read(group[0][1] or ())
    made += [jax.device_put(part, device) for device, _ in group]
    jax.block_until_ready(made[-len(group) :])
  dtype = made[0].dtype if made else None  # a process may have none of the devices
  return jax.make_array_from_single_device_arrays(shape, sharding, made, dtype=dtype)


def from_host(values: np.ndarray, place: Sharding | None = None) -> jax.Array:
  """A numpy array that nobody else has, on the default device or another one.

  Not by `jnp.array`, which compiles a program for each new shape.

  Args:
    values: of any shape.
    place: the device to which the array is committed.
  """
  if jax_compat.is_top_level() and jax.sharding.get_abstract_mesh().empty:
    return jax_compat.from_host(values, place)
  return jnp.array(values)


def constrained(array: jax.Array, place: Sharding | None) -> jax.Array:
  """An array laid out as `place` says; a traced one in the compiled function."""
  if place is None or not isinstance(array, jax.core.Tracer):
    return put_back(array, place)
  if isinstance(place, NamedSharding) and AxisType.Explicit in place.mesh.axis_types:
    return jax.sharding.reshard(array, place)
  return jax.lax.with_sharding_constraint(array, place)


def place_of(array: jax.Array) -> Sharding | None:
  """What an array is committed to; None for one that JAX may move."""
  if type(array) is _ArrayImpl and jax_compat.is_committed(array):
    return array.sharding
  return None


def put_back(array: jax.Array, place: Sharding | None) -> jax.Array:
  """An array where another one was; see `place_of`."""
  if type(array) is not _ArrayImpl:
    return array
  if place is not None:
    return array if array.sharding == place else jax.device_put(array, place)
  if jax_compat.is_committed(array) and not is_spread(array):
    return jax_compat.uncommitted(
      jax.device_put(array, jax_device(default_index() or 0))
    )
  return array


def put_beside(array: jax.Array, place: Sharding | None) -> jax.Array:
  """An array of any shape on the devices where another one is; see `place_of`."""
  if isinstance(place, NamedSharding):
    place = NamedSharding(place.mesh, PartitionSpec())
  return put_back(array, place)
