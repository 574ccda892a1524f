"""How an array lies on devices, as JSON that another set of devices can follow.

Devices are known by their place in `jax.devices()`: the names of the same devices
differ between one process of eight and two of four.
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
  """The layout of an array, for `restored`; None for one on the first device.

  Layouts other than those of a mesh or of one device are not kept.
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
  """The sharding of `described` on the devices of this run.

  Returns:
    None where the layout says nothing, or names devices that are not here. Of several
    processes all have to have a part: over other devices than all of theirs an array
    is replicated.
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
