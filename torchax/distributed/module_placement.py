"""Placement of a module's tensors on a mesh, and their state dicts.

CPU tensors are sent to the devices part by part: no device holds more than its own
part. Meta tensors become sharded zeros, to be initialized or loaded afterwards.
Parameters stay the same objects.
"""

import pickle
from collections.abc import Callable, Iterator

import torch
from jax.sharding import NamedSharding
from torch.distributed.device_mesh import DeviceMesh

from torchax.compat import torch_compat
from torchax.dispatch.transfer import shard_gradient_like
from torchax.distributed import placements
from torchax.environment import env_on
from torchax.tensor import Tensor, new_tensor


def own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
  """Yield the parameters and buffers of a module, without those of its children."""
  yield from module.parameters(recurse=False)
  yield from module.buffers(recurse=False)


def is_on_jax(module: torch.nn.Module) -> bool:
  """Return True if the module has a parameter on jax."""
  return any(isinstance(parameter, Tensor) for parameter in module.parameters())


def move(
  module: torch.nn.Module,
  sharding_of: Callable[[torch.Tensor], NamedSharding | None],
) -> None:
  """Move a module's own tensors to jax, except those that are on jax already.

  Args:
    module: the module; changed in place.
    sharding_of: returns the sharding of a tensor; None for the current device.
  """

  def move_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, Tensor):
      return tensor
    sharding = sharding_of(tensor)
    if sharding is not None:
      return new_tensor(placements.with_placements(tensor, sharding), env_on())
    if tensor.is_meta:
      return torch.zeros(tensor.shape, dtype=tensor.dtype, device="jax")
    return tensor.to("jax")

  if not all(isinstance(tensor, Tensor) for tensor in own_tensors(module)):
    module._apply(move_tensor, recurse=False)


def replicate(module: torch.nn.Module, mesh: DeviceMesh) -> None:
  """Replicate a module's own tensors over a mesh, except those already on the mesh.

  Gradients get the sharding of their tensor.
  """
  move(module, lambda tensor: placements.sharding_of(mesh, None, tensor.shape))
  for tensor in own_tensors(module):
    array = tensor.jax()  # type: ignore[attr-defined]
    if not placements.placements_of(array, mesh):
      sharding = placements.sharding_of(mesh, None, tensor.shape, array)
      placed = placements.put(array, sharding, from_first=True)
      tensor.replace_jax(placed)  # type: ignore[attr-defined]
    shard_gradient_like(tensor)


def not_pickled(name: str, function: str) -> pickle.PicklingError:
  """Return the error for pickling a module on a mesh.

  Args:
    name: class name of the module.
    function: name of the function that put the module on the mesh.
  """
  return pickle.PicklingError(
    f"{name} is on a mesh, by `{function}`, and is not pickled, as in torch. Save its "
    "state dict:\n"
    "  torch.save(model.state_dict(), path)\n"
    f"and, for a new model after `{function}`,\n"
    "  model.load_state_dict(torch.load(path))\n"
    "`copy.deepcopy(model)` gives a copy in this process."
  )


# State dicts of `torch.distributed.checkpoint` ----------------------------------------
# torch slices the part of its one device out of a full tensor, and copies storages one
# by one before saving in the background. Here a process has the whole tensor.


def distribute_full(original: Callable, state: dict, keys, *rest) -> None:
  """Copy full tensors, which each process has, into the tensors of a model.

  Args:
    original: torch's function, for entries that are not on jax.
    state: maps a key to (tensor of the model, full tensor); each pair is replaced by
      the tensor of the model.
    keys: keys of `state` to process.
    *rest: further arguments of `original`.
  """
  others = []
  for key in keys:
    pair = state.get(key)
    if not isinstance(pair, tuple) or not isinstance(pair[0], Tensor):
      others.append(key)
      continue
    own, full = pair
    sharding = own.jax().sharding
    array = placements.with_placements(full, sharding, from_first=False)
    state[key] = own.copy_(new_tensor(array, own._env))
  original(state, others, *rest)


def stage(original: Callable, self, tensor, memo: dict, *args, **kwargs):
  """Copy a tensor to the CPU for `async_save`, which writes it in the background."""
  if not isinstance(tensor, Tensor):
    return original(self, tensor, memo, *args, **kwargs)
  copied = memo[id(tensor)] = (
    tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
  )
  return copied


def register_states() -> None:
  """Replace torch's functions."""
  torch_compat.enter_full_states(distribute_full)
  torch_compat.enter_staging(stage)
