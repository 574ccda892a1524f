"""State dicts of `torch.distributed.checkpoint`, of what lies on a mesh on jax.

torch takes from a full tensor the part of its one device, and copies what it saves in
the background storage by storage. Here a process has a tensor as a whole.
"""

from collections.abc import Callable

import torch

from torchax.compat import torch_compat
from torchax.distributed import placements
from torchax.tensor import Tensor, new_tensor


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


def register() -> None:
  """Puts the functions in place of torch's."""
  torch_compat.enter_full_states(distribute_full)
  torch_compat.enter_staging(staged)
