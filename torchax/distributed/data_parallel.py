"""`DistributedDataParallel` on jax: gradients are averaged over all processes.

Each process has its own module and batch. A single process needs no averaging: the
batch is sharded over its devices, and XLA reduces the gradients.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchax.compat import torch_compat
from torchax.devices import placement as devices
from torchax.distributed import module_placement, process_group
from torchax.errors import CollectiveError


class DistributedDataParallelOnJax(DistributedDataParallel):
  """Class that a `DistributedDataParallel` of a module on jax is given."""

  def forward(self, *args, **kwargs):
    return self.module(*args, **kwargs)

  def train(self, mode: bool = True):
    return torch.nn.Module.train(self, mode)

  def __getstate__(self):
    """Drop the process group, as torch does; a copy gets the world's."""
    return {name: v for name, v in self.__dict__.items() if name != "process_group"}

  def __setstate__(self, state):
    torch.nn.Module.__setstate__(self, state)
    self.process_group = _world()
    self._watch()

  def _watch(self) -> None:
    """Register the hooks that average gradients, if there are other processes."""
    if self.process_group.size() == 1:
      return
    for parameter in self.module.parameters():
      if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(self._average)

  def _average(self, parameter: torch.nn.Parameter) -> None:
    """Average the gradient of a parameter; runs once the gradient is complete."""
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
  """Return the process group of all processes.

  Raises:
    RuntimeError: there is no process group.
  """
  world = dist.group.WORLD if dist.is_initialized() else None
  if world is None:
    raise RuntimeError(
      "DistributedDataParallel needs a process group. Write "
      '`torch.distributed.init_process_group("jax")` first.'
    )
  return world


def wrap(original: Callable, self, module: torch.nn.Module, *args, **kwargs) -> None:
  """Construct `DistributedDataParallel(module)`, also for a module on jax.

  Raises:
    RuntimeError: there is no process group, or no parameter requires a gradient.
    CollectiveError: the process group has another backend than "jax".
  """
  if not module_placement.is_on_jax(module):
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
      "DistributedDataParallel of a module on jax expects the process group of "
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
  """Replace torch's constructor."""
  torch_compat.reroute_method(DistributedDataParallel, "__init__", wrap)
