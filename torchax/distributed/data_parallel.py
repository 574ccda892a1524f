"""`DistributedDataParallel` on jax: gradients are the means of those of all processes.

Each process has a module and a batch of its own. In a world of one process there is
nothing to add: the batch is sharded over its devices, and XLA reduces.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchax.compat import torch_compat
from torchax.devices import placement as devices
from torchax.distributed import process_group
from torchax.errors import CollectiveError
from torchax.tensor import Tensor


class DistributedDataParallelOnJax(DistributedDataParallel):
  """What a `DistributedDataParallel` of a module on jax becomes."""

  def forward(self, *args, **kwargs):
    """The module's forward."""
    return self.module(*args, **kwargs)

  def train(self, mode: bool = True):
    """As of any module."""
    return torch.nn.Module.train(self, mode)

  def __getstate__(self):
    """Without the process group, as torch's: a copy has that of the world."""
    return {name: v for name, v in self.__dict__.items() if name != "process_group"}

  def __setstate__(self, state):
    torch.nn.Module.__setstate__(self, state)
    self.process_group = _world()
    self._watch()

  def _watch(self) -> None:
    """Has gradients averaged when they are complete, where there are others."""
    if self.process_group.size() == 1:
      return
    for parameter in self.module.parameters():
      if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(self._average)

  def _average(self, parameter: torch.nn.Parameter) -> None:
    """Called when the gradient of a parameter is complete."""
    gradient = parameter.grad
    if not self.require_backward_grad_sync or gradient is None:
      return
    if devices.is_traced(gradient.jax()):  # type: ignore[attr-defined]
      raise CollectiveError(
        "The backward pass of a DistributedDataParallel was traced, where processes "
        "cannot wait for one another. Compile a step of global arrays instead:\n"
        '  mesh = init_device_mesh("jax", (jax.device_count(),))\n'
        "  batch = distribute_tensor(batch, mesh, [Shard(0)])"
      )
    dist.all_reduce(gradient, dist.ReduceOp.AVG, group=self.process_group)


def _world() -> dist.ProcessGroup:
  """The process group of all processes.

  Raises:
    RuntimeError: there is none.
  """
  world = dist.group.WORLD if dist.is_initialized() else None
  if world is None:
    raise RuntimeError(
      "DistributedDataParallel needs a process group. Write "
      '`torch.distributed.init_process_group("jax")` first.'
    )
  return world


def wrap(original: Callable, self, module: torch.nn.Module, *args, **kwargs) -> None:
  """`DistributedDataParallel(module)`, of a module on jax too.

  Raises:
    RuntimeError: there is no process group, or no parameter that needs a gradient.
  """
  if not any(isinstance(parameter, Tensor) for parameter in module.parameters()):
    original(self, module, *args, **kwargs)
    return
  world = _world()
  if not any(parameter.requires_grad for parameter in module.parameters()):
    raise RuntimeError(
      "DistributedDataParallel is not needed where no parameter requires a gradient."
    )
  group = kwargs.get("process_group") or world
  if not isinstance(group, process_group.ProcessGroup):
    raise CollectiveError(
      "DistributedDataParallel of a module on jax needs the process group of "
      f'`init_process_group("jax")`, but got the backend {dist.get_backend(group)!r}.'
    )
  torch.nn.Module.__init__(self)
  self.__class__ = DistributedDataParallelOnJax
  self.module, self.process_group = module, group
  self.require_backward_grad_sync = self.require_forward_param_sync = True
  if group.size() > 1:
    for tensor in (*module.parameters(), *module.buffers()):
      dist.broadcast(tensor.detach(), 0, group=group)
  self._watch()


def register() -> None:
  """Puts the function in place of the constructor of torch's."""
  torch_compat.reroute_method(DistributedDataParallel, "__init__", wrap)
