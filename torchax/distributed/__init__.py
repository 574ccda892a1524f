"""torch.distributed on jax: process groups, meshes, `DTensor`, FSDP and DDP.

Programs call torch's own functions. For meshes and tensors on jax, those functions
dispatch to the modules here. The functional collectives are in `ops/jc10d.py`. Start at
`meshes.py`; `processes/` connects the processes of a run.
"""

import torch

from torchax.compat import torch_compat
from torchax.tensor import Tensor

__all__: list[str] = []

if torch.distributed.is_available():
  from torch.distributed.device_mesh import DeviceMesh

  from torchax.distributed import (
    context_parallel,
    data_parallel,
    dtensor,
    fsdp,
    meshes,
    module_placement,
    process_group,
  )
  from torchax.distributed.meshes import jax_mesh
  from torchax.distributed.placements import placements_of, sharding_of

  __all__ += ["jax_mesh", "placements_of", "sharding_of"]


def register() -> None:
  """Register jax with torch.distributed; do nothing if torch was built without it."""
  if not torch.distributed.is_available():
    return
  torch_compat.replace_function(
    "torch.distributed.init_process_group", process_group.initialize
  )
  torch_compat.leave_default_backend_alone()
  torch_compat.reroute_method(DeviceMesh, "__init__", _make_mesh)
  if hasattr(DeviceMesh, "_unflatten"):
    torch_compat.reroute_method(DeviceMesh, "_unflatten", meshes.refuse_unflattened)
  data_parallel.register()
  dtensor.register_collectives()
  for name, member in dtensor.METHODS.items():
    setattr(Tensor, name, member)


def _make_mesh(original, self, device_type, mesh=None, **kwargs) -> None:
  """Make a mesh; the first one on jax registers the functions that take a mesh."""
  if device_type == meshes.DEVICE:
    dtensor.register()
    context_parallel.register()
    fsdp.register()
    module_placement.register_states()
  meshes.make(original, self, device_type, mesh, **kwargs)
