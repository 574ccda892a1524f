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


def described(array: jax.Array) -> dict[str, Any] | None:
  """Return the layout of an array, for `restored`; None if on the first device.

  Only shardings over a mesh or on a single device have a layout.
  """
  sharding = array.sharding
  numbers = {device: number for number, device in enumerate(jax.devices())}
  if isinstance(sharding, NamedSharding):
    mesh = sharding.mesh
    return {
      "axes": [list(item) for item in mesh.shape.items()],
      "types": [kind.name for kind in mesh.axis_types],
      "devices": [numbers[device] for device in mesh.devices.flat],
      "spec": [
        list(part) if isinstance(part, tuple) else part for part in sharding.spec
      ],
    }
  if isinstance(sharding, SingleDeviceSharding):
    (device,) = sharding.device_set
    number = numbers.get(device, 0)
    return {"device": number} if number and jax.process_count() == 1 else None
  return None


def restored(layout: dict[str, Any] | None) -> Sharding | None:
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
    found = layout["device"] < len(devices)
    return SingleDeviceSharding(devices[layout["device"]]) if found else None
  numbers = layout["devices"]
  of_several = jax.process_count() > 1
  if max(numbers) < len(devices) and not (of_several and len(numbers) < len(devices)):
    shape = [size for _, size in layout["axes"]]
    mesh = Mesh(
      np.array([devices[number] for number in numbers]).reshape(shape),
      [name for name, _ in layout["axes"]],
      axis_types=tuple(AxisType[name] for name in layout["types"]),
    )
    parts = [tuple(part) if isinstance(part, list) else part for part in layout["spec"]]
    return NamedSharding(mesh, PartitionSpec(*parts))
  if of_several:
    return NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec())
  return None
