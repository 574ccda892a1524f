"""`torchax.memory_by_module`: bytes of parameters, gradients and optimizer state."""

import operator
from collections.abc import Iterator
from typing import NamedTuple

import torch

from torchax.diagnostics.profiles import shorten


class ModuleMemory(NamedTuple):
  """Bytes of the tensors of a module, without those of its submodules.

  Attributes:
    parameters, buffers, gradients, optimizer_state: bytes of each kind.
  """

  parameters: int = 0
  buffers: int = 0
  gradients: int = 0
  optimizer_state: int = 0

  @property
  def total(self) -> int:
    """Bytes of all kinds."""
    return sum(self)


def memory_by_module(
  module: torch.nn.Module,
  optimizer: torch.optim.Optimizer | None = None,
  depth: int | None = None,
) -> dict[str, ModuleMemory]:
  """Return the bytes that each module keeps between training steps.

  A shared tensor counts for the first module that has it, and a sharded one with all
  of its shards. `jax_jit(step).lower(…).compile().memory_analysis()` has the bytes of
  a compiled step, with its activations.

  Args:
    module: the outermost module.
    optimizer: optimizer of its parameters, for the state of each.
    depth: number of parts of a path, such as 2 for "layers.0"; deeper modules are added
      to it. All parts if None.

  Returns:
    Path of each module with tensors -> bytes, the largest first. The path of the
    outermost module is "".

  >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
  >>> memory_by_module(model)["0"]
  ModuleMemory(parameters=36, buffers=0, gradients=0, optimizer_state=0)
  """
  found: dict[str, ModuleMemory] = {}
  seen: set[int] = set()
  for path, submodule in module.named_modules():
    added = ModuleMemory(*map(sum, zip(*_tensors_of(submodule, optimizer, seen))))
    if added.total:
      key = shorten(path, depth)
      before = found.get(key, ModuleMemory())
      found[key] = ModuleMemory(*map(operator.add, before, added))
  return dict(sorted(found.items(), key=lambda item: -item[1].total))


def _tensors_of(module, optimizer, seen: set[int]) -> Iterator[ModuleMemory]:
  """Yield the bytes of each tensor of a module that is not in `seen`; add it there."""
  for parameter in module.parameters(recurse=False):
    if id(parameter) not in seen:
      seen.add(id(parameter))
      state = {} if optimizer is None else optimizer.state.get(parameter, {})
      tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
      gradient = 0 if parameter.grad is None else parameter.grad.nbytes
      state_bytes = sum(tensor.nbytes for tensor in tensors)
      yield ModuleMemory(parameter.nbytes, 0, gradient, state_bytes)
  for buffer in module.buffers(recurse=False):
    if id(buffer) not in seen:
      seen.add(id(buffer))
      yield ModuleMemory(buffers=buffer.nbytes)
