"""Conversion of states to JSON and back, with arrays stored separately by name."""

import collections
import contextlib
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import (
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
  Sharding,
  SingleDeviceSharding,
)

from torchax import rng
from torchax.compat import jax_compat
from torchax.core import mappings
from torchax.devices import placement
from torchax.environment import default_env
from torchax.errors import TracedStateError
from torchax.tensor import Tensor, new_tensor

_PLAIN = (type(None), bool, int, float, str)
ON_HOST = ("CPU tensor", "numpy array", "numpy scalar")
_ON_JAX = ("jax tensor", "jax array", "keys")


# Trees of tensors and trees of arrays ------------------------------------------------


def to_jax(pytree) -> Any:
  """Convert a tree's jax tensors to JAX arrays and its CPU tensors to numpy arrays.

  CPU tensors keep 64-bit dtypes, even if JAX's x64 mode is off.
  """
  is_leaf = lambda value: isinstance(value, torch.Tensor)  # noqa: E731
  return jax.tree.map(_array_of, pytree, is_leaf=is_leaf)


def to_torch(pytree) -> Any:
  """Convert a tree's JAX arrays to jax tensors and its numpy arrays to CPU tensors."""
  return jax.tree.map(_tensor_of, pytree)


def _array_of(value):
  if isinstance(value, Tensor):
    return value.jax()
  if isinstance(value, torch.Tensor):
    mappings.check_torch_tensor(value)
    return mappings.host_array(value.detach().cpu().resolve_conj().resolve_neg())
  return value


def _tensor_of(value):
  if rng.is_typed_key(value):
    return value
  if isinstance(value, jax.Array):
    return new_tensor(value, default_env())
  return mappings.j2t(value, False) if isinstance(value, np.ndarray) else value


# Structure ---------------------------------------------------------------------------


def _array_kind(value) -> str | None:
  """Return the node type of an array-like value; None for other values."""
  if isinstance(value, Tensor):
    return "jax tensor"
  if isinstance(value, torch.Tensor):
    return "CPU tensor"
  if isinstance(value, jax.Array):
    return "keys" if rng.is_typed_key(value) else "jax array"
  if isinstance(value, np.ndarray):
    return "numpy array"
  return "numpy scalar" if isinstance(value, np.generic) else None


def _is_named_tuple(value) -> bool:
  return isinstance(value, tuple) and hasattr(value, "_fields")


class Writer:
  """Converter of a state to JSON; collects its arrays by name.

  Args:
    copies: copy the arrays, because they are written in the background.
  """

  def __init__(self, copies: bool):
    self.arrays: dict[str, Any] = {}
    # Checksums of arrays that every process has for itself, compared before saving.
    self.local: dict[str, int] = {}
    self._copies = copies
    # Names by id of the array: tied weights are saved once.
    self._names: dict[int, str] = {}
    self._kept: list[Any] = []  # keeps the ids above from being reused
    # Path of each enclosing container, by its id.
    self._enclosing: dict[int, str] = {}

  @contextlib.contextmanager
  def _inside(self, container, where: str) -> Iterator[None]:
    """Raise ValueError if a container contains itself."""
    if id(container) in self._enclosing:
      raise ValueError(
        f"{where} is {self._enclosing[id(container)]} itself, and a checkpoint holds "
        "no state that contains itself. Leave the reference out."
      )
    self._enclosing[id(container)] = where
    yield
    del self._enclosing[id(container)]

  def node(self, value, where: str, path: tuple[str, ...]):
    """Return the JSON of a value; `where` names it in errors, `path` its arrays."""
    kind = type(value)
    if kind in _PLAIN:
      return value
    if kind in (dict, collections.OrderedDict):
      with self._inside(value, where):
        return self._dict(value, where, path)
    if kind in (list, tuple, torch.Size) or _is_named_tuple(value):
      with self._inside(value, where):
        return self._sequence(value, where, path)
    if isinstance(value, rng.RngState):
      state = self.node(value.state_dict(), where, path)
      return {"type": "rng state", "state": state}
    as_array = _array_kind(value)
    if as_array is not None:
      return self._array(value, as_array, where, path)
    if kind is torch.dtype:
      return {"type": "dtype", "name": str(value).removeprefix("torch.")}
    if kind is complex:
      return {"type": "complex", "parts": [value.real, value.imag]}
    if kind is bytes:
      return {"type": "bytes", "hex": value.hex()}
    raise TypeError(
      f"{where} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint "
      "does not hold. Save a module or an optimizer as its `.state_dict()`, a "
      "torch.Generator as its `.get_state()`, a stream as its `.state`, and another "
      "object as a dict of its fields."
    )

  def _dict(self, value, where, path):
    items = [
      [
        self.node(key, f"the key {key!r} of {where}", path),
        self.node(entry, f"{where}[{key!r}]", (*path, str(key))),
      ]
      for key, entry in value.items()
    ]
    if type(value) is dict:
      return {"type": "dict", "items": items}
    # A module's state_dict keeps the versions of its layers in this attribute.
    metadata = self.node(getattr(value, "_metadata", None), where, path)
    return {"type": "ordered dict", "items": items, "metadata": metadata}

  def _sequence(self, value, where, path):
    items = [
      self.node(entry, f"{where}[{index}]", (*path, str(index)))
      for index, entry in enumerate(value)
    ]
    if _is_named_tuple(value):
      cls = type(value)
      name = f"{cls.__module__}:{cls.__qualname__}"
      fields = list(cls._fields)
      return {"type": "named tuple", "name": name, "fields": fields, "items": items}
    return {"type": type(value).__name__, "items": items}

  def _array(self, value, kind, where, path):
    node = {"type": kind}
    array = to_jax(value)
    if isinstance(array, jax.core.Tracer):
      raise TracedStateError(
        f"{where} is being traced and has no value yet. Save outside of the compiled "
        "function."
      )
    if kind == "keys":
      node["impl"] = str(jax.random.key_impl(array))
      array = jax.random.key_data(array)
    if array.dtype.kind in "OSUMm" or array.dtype.names:
      raise TypeError(
        f"{where} is a numpy array of dtype {array.dtype}; a checkpoint holds arrays "
        "of numbers. Save strings as a list."
      )
    node |= {"shape": list(array.shape), "dtype": str(array.dtype)}
    if isinstance(array, jax.Array) and (layout := describe_sharding(array)):
      node["layout"] = layout
    if array.size:  # Orbax saves no empty arrays
      if jax.process_count() > 1:
        array = self._global_or_host(array, where)
      node["name"] = self._put(array, "/".join(path))
    return node

  def _global_or_host(self, array, where: str):
    """Return a global array as it is, and any other as numpy with its checksum kept."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
      return array
    values = np.asarray(array)
    self.local[where] = zlib.crc32(np.ascontiguousarray(values).view(np.uint8).data)
    self._kept.append(array)
    return values

  def _put(self, array, name: str) -> str:
    saved_name = self._names.get(id(array))
    if saved_name is not None:
      return saved_name
    unused, number = name, 1
    while unused in self.arrays:  # the keys 1 and "1" have one name
      unused, number = f"{name}~{number}", number + 1
    # Orbax does not accept numpy scalars.
    saved = np.asarray(array) if isinstance(array, np.generic) else array
    if self._copies:  # the memory may be reused before it is written
      saved = jnp.copy(saved) if isinstance(saved, jax.Array) else np.array(saved)
    self.arrays[unused] = saved
    self._names[id(array)] = unused
    self._kept.append(array)
    return unused


class Reader:
  """Converter of JSON and arrays to a state."""

  def __init__(self, arrays: dict[str, Any]):
    self.arrays = arrays

  def value(self, node):
    """Return the value of a node of `Writer.node`."""
    if not isinstance(node, dict):
      return node
    kind = node["type"]
    if kind in _CONTAINERS:
      return _CONTAINERS[kind](self, node)
    return self._array(node)

  def _dict(self, node):
    return {self.value(key): self.value(entry) for key, entry in node["items"]}

  def _ordered_dict(self, node):
    ordered = collections.OrderedDict(self._dict(node))
    metadata = self.value(node["metadata"])
    if metadata is not None:
      ordered._metadata = metadata
    return ordered

  def _items(self, node):
    return [self.value(entry) for entry in node["items"]]

  def _named_tuple(self, node):
    cls = _named_tuple_class(node["name"], tuple(node["fields"]))
    return cls._make(self._items(node))

  def _rng_state(self, node):
    return rng.RngState.from_state_dict(self.value(node["state"]))

  def _array(self, node):
    kind = node["type"]
    if kind not in ON_HOST and kind not in _ON_JAX:
      raise ValueError(f"A state has no values of type {kind!r}.")
    if "name" in node:
      array = self.arrays[node["name"]]
    else:
      array = np.empty(node["shape"], jnp.dtype(node["dtype"]))
    if kind in _ON_JAX:
      array = jnp.asarray(array)
      if "layout" not in node and not placement.is_on_several_devices(array):
        array = jax_compat.uncommit(array)
    if kind == "keys":
      return _keys(array, node["impl"])
    if kind.endswith("tensor"):
      return to_torch(array)
    return array[()] if kind == "numpy scalar" else array


_CONTAINERS = {
  "dict": Reader._dict,
  "ordered dict": Reader._ordered_dict,
  "list": Reader._items,
  "tuple": lambda reader, node: tuple(reader._items(node)),
  "Size": lambda reader, node: torch.Size(reader._items(node)),
  "named tuple": Reader._named_tuple,
  "rng state": Reader._rng_state,
  "dtype": lambda reader, node: getattr(torch, node["name"]),
  "complex": lambda reader, node: complex(*node["parts"]),
  "bytes": lambda reader, node: bytes.fromhex(node["hex"]),
}


def _named_tuple_class(name: str, fields: tuple[str, ...]) -> type:
  """Return the named tuple class if its module is imported, else a new class."""
  module, _, qualified = name.partition(":")
  member: Any = sys.modules.get(module)
  for part in qualified.split("."):
    member = getattr(member, part, None)
  is_tuple = isinstance(member, type) and issubclass(member, tuple)
  if is_tuple and getattr(member, "_fields", None) == fields:
    return member
  return collections.namedtuple(qualified.rpartition(".")[2], fields)


def _keys(key_data: jax.Array, impl: str) -> jax.Array:
  """Return typed keys of any shape from their key data."""
  shape = key_data.shape[:-1]
  rows = key_data.reshape(-1, key_data.shape[-1])
  return jax.vmap(lambda row: rng.as_key(row, impl))(rows).reshape(shape)


# Layouts: shardings as JSON, restored on another set of devices. Devices are stored as
# indices in `jax.devices()`: their names differ between one process with eight devices
# and two processes with four.


def describe_sharding(array: jax.Array) -> dict[str, Any] | None:
  """Return the layout of an array, for `restore_sharding`; None if on the first device.

  Only shardings over a mesh or on a single device have a layout.
  """
  sharding = array.sharding
  indices = {device: index for index, device in enumerate(jax.devices())}
  if isinstance(sharding, NamedSharding):
    mesh = sharding.mesh
    return {
      "axes": [list(item) for item in mesh.shape.items()],
      "types": [kind.name for kind in mesh.axis_types],
      "devices": [indices[device] for device in mesh.devices.flat],
      "spec": [
        list(part) if isinstance(part, tuple) else part for part in sharding.spec
      ],
    }
  if isinstance(sharding, SingleDeviceSharding):
    (device,) = sharding.device_set
    index = indices.get(device, 0)
    return {"device": index} if index and jax.process_count() == 1 else None
  return None


def restore_sharding(layout: dict[str, Any] | None) -> Sharding | None:
  """Return the sharding of a layout on the devices of this run.

  Returns:
    None without a layout, or if a device does not exist. With several processes, each
    needs a part of the array: a layout that does not use all devices is replaced by
    replication over all devices.
  """
  devices = jax.devices()
  if layout is None:
    return None
  if "device" in layout:
    exists = layout["device"] < len(devices)
    return SingleDeviceSharding(devices[layout["device"]]) if exists else None
  indices = layout["devices"]
  is_multi_process = jax.process_count() > 1
  leaves_some_out = is_multi_process and len(indices) < len(devices)
  if max(indices) < len(devices) and not leaves_some_out:
    shape = [size for _, size in layout["axes"]]
    mesh = Mesh(
      np.array([devices[index] for index in indices]).reshape(shape),
      [name for name, _ in layout["axes"]],
      axis_types=tuple(AxisType[name] for name in layout["types"]),
    )
    spec = [tuple(part) if isinstance(part, list) else part for part in layout["spec"]]
    return NamedSharding(mesh, PartitionSpec(*spec))
  if is_multi_process:
    return NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec())
  return None
