"""Layouts: shardings as JSON, restored on another set of devices.

Devices are stored as indices in `jax.devices()`: their names differ between one process
with eight devices and two processes with four.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import (
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
  Sharding,
  SingleDeviceSharding,
)


def describe(array: jax.Array) -> dict[str, Any] | None:
  """Return the layout of an array, for `restore`; None if on the first device.

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


def restore(layout: dict[str, Any] | None) -> Sharding | None:
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
    parts = [tuple(part) if isinstance(part, list) else part for part in layout["spec"]]
    return NamedSharding(mesh, PartitionSpec(*parts))
  if is_multi_process:
    return NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec())
  return None
