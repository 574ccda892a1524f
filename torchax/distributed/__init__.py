"""torch.distributed on jax: process groups, meshes, `DTensor`, FSDP and DDP.

torch's own functions are what programs call; for meshes and tensors on jax they do what
the modules here say. The functional collectives are in `ops/jc10d.py`. Start at
`meshes.py`; `processes/` connects the processes of a run.
"""

from torchax.compat import torch_compat
from torchax.tensor import Tensor

__all__: list[str] = []

if torch_compat.is_available():
  from torch.distributed.device_mesh import DeviceMesh

  from torchax.distributed import (
    data_parallel,
    dtensor,
    fsdp,
    meshes,
    modules,
    process_group,
  )
  from torchax.distributed.meshes import jax_mesh
  from torchax.distributed.placements import placements_of, sharding_of

  __all__ += ["jax_mesh", "placements_of", "sharding_of"]


def register() -> None:
  """Has torch.distributed know jax. Of a torch that was built without it: nothing."""
  if not torch_compat.is_available():
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
  """A mesh; with the first one on jax come the functions that take one."""
  if device_type == meshes.DEVICE:
    dtensor.register()
    fsdp.register()
    modules.register_states()
  meshes.make(original, self, device_type, mesh, **kwargs)
