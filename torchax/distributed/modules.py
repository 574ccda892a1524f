"""The tensors of modules, put on a mesh, and their state dicts.

What a module has on the CPU goes to the devices part by part, so that no device holds
more than its own. What it has on meta becomes zeros in parts, to be initialized or
loaded afterwards. Parameters stay the objects that they are.
"""

import pickle
from collections.abc import Callable, Iterator

import torch
from jax.sharding import NamedSharding
from torch.distributed.device_mesh import DeviceMesh

from torchax.compat import torch_compat
from torchax.dispatch.transfer import keep_gradient_beside
from torchax.distributed import placements
from torchax.environment import env_on
from torchax.tensor import Tensor, new_tensor


def own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
  """The parameters and buffers of a module itself, without those of its children."""
  yield from module.parameters(recurse=False)
  yield from module.buffers(recurse=False)


def move(
  module: torch.nn.Module,
  sharding_of: Callable[[torch.Tensor], NamedSharding | None],
) -> None:
  """Moves those tensors of a module itself to jax that are not on it.

  Args:
    module: is changed.
    sharding_of: where a tensor is to lie; None for the current device.
  """

  def moved(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, Tensor):
      return tensor
    sharding = sharding_of(tensor)
    if sharding is not None:
      return new_tensor(placements.laid_out(tensor, sharding), env_on())
    if tensor.is_meta:
      return torch.zeros(tensor.shape, dtype=tensor.dtype, device="jax")
    return tensor.to("jax")

  if not all(isinstance(tensor, Tensor) for tensor in own_tensors(module)):
    module._apply(moved, recurse=False)


def replicate(module: torch.nn.Module, mesh: DeviceMesh) -> None:
  """Puts those tensors of a module itself on a mesh, whole, that are not on it.

  The gradient of each lies where it does.
  """
  move(module, lambda tensor: placements.sharding_of(mesh, None, tensor.shape))
  for tensor in own_tensors(module):
    array = tensor.jax()  # type: ignore[attr-defined]
    if not placements.placements_of(array, mesh):
      sharding = placements.sharding_of(mesh, None, tensor.shape, array)
      placed = placements.put(array, sharding, from_first=True)
      tensor.replace_jax(placed)  # type: ignore[attr-defined]
    keep_gradient_beside(tensor)


def not_pickled(name: str, function: str) -> pickle.PicklingError:
  """The error where a module is pickled that lies on a mesh.

  Args:
    name: of the class of the module.
    function: what has placed it.
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
# torch takes from a full tensor the part of its one device, and copies what it saves in
# the background storage by storage. Here a process has a tensor as a whole.


def distribute_full(original: Callable, state: dict, keys, *rest) -> None:
  """Puts full tensors, which each process has, into those of a model.

  Args:
    original: torch's, for what is not on jax.
    state: by key a pair: what the model has, and the full tensor. It is changed to hold
      the former.
    keys: of `state`.
    *rest: what else `original` takes.
  """
  others = []
  for key in keys:
    pair = state.get(key)
    if not isinstance(pair, tuple) or not isinstance(pair[0], Tensor):
      others.append(key)
      continue
    own, full = pair
    sharding = own.jax().sharding
    array = placements.laid_out(full, sharding, from_first=False)
    state[key] = own.copy_(new_tensor(array, own._env))
  original(state, others, *rest)


def staged(original: Callable, self, tensor, memo: dict, *args, **kwargs):
  """The copy that `async_save` writes, while the program goes on."""
  if not isinstance(tensor, Tensor):
    return original(self, tensor, memo, *args, **kwargs)
  copied = memo[id(tensor)] = (
    tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
  )
  return copied


def register_states() -> None:
  """Puts the functions in place of torch's."""
  torch_compat.enter_full_states(distribute_full)
  torch_compat.enter_staging(staged)
