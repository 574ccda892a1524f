"""`torch.distributed.init_process_group("jax")`: JAX's processes as torch's world.

A rank is a process of JAX, not a device: one process drives all of its devices.
Collectives of `torch.distributed` go through the hosts and are meant for small tensors,
such as metrics and flags. Large data belongs in global arrays, where XLA communicates.
The collectives take CPU tensors too, and raise in a compiled function.
"""

import inspect
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import torch
import torch.distributed as dist
from jax.experimental import multihost_utils

from torchax.compat import jax_compat, torch_compat
from torchax.core import host_memory
from torchax.devices import placement
from torchax.distributed import processes
from torchax.errors import CollectiveError
from torchax.ops import jc10d
from torchax.tensor import Tensor

NAME = "jax"

_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
  "SUM": lambda members: members.sum(0, dtype=members.dtype),
  "AVG": lambda members: members.mean(0),
  "PRODUCT": lambda members: members.prod(0, dtype=members.dtype),
  "MIN": lambda members: members.amin(0),
  "MAX": lambda members: members.amax(0),
  "BAND": lambda members: _fold(torch.bitwise_and, members),
  "BOR": lambda members: _fold(torch.bitwise_or, members),
  "BXOR": lambda members: _fold(torch.bitwise_xor, members),
}


def _fold(function: Callable, members: torch.Tensor) -> torch.Tensor:
  result = members[0]
  for member in members[1:]:
    result = function(result, member)
  return result


class CompletedWork(dist.Work):
  """Handle of a completed collective."""

  def __init__(self, results: Iterable[torch.Tensor] = ()):
    super().__init__()
    self.results = list(results)

  def wait(self, timeout=None) -> bool:
    """Return True at once."""
    return True

  def is_completed(self) -> bool:
    return True

  def is_success(self) -> bool:
    """Return True: a failure would have raised."""
    return True

  def result(self) -> list[torch.Tensor]:
    """Return the output tensors."""
    return self.results

  def get_future(self):
    """Return a completed future of the output tensors."""
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(self.results)
    return future


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
  """Return a tensor of this process as a contiguous CPU tensor."""
  if isinstance(tensor, Tensor):
    array = tensor.jax()
    if placement.is_traced(array):
      raise CollectiveError(
        "A collective of torch.distributed was called in a compiled function, where "
        "processes cannot wait for one another. Use the functional ones inside of "
        "`jax_shard_map`, or a global array: XLA adds what is needed."
      )
    if not array.is_fully_addressable:
      raise CollectiveError(
        "torch.distributed on jax expects the tensor of one process, but got a "
        f"global array of shape {tuple(array.shape)}, which is one tensor to all "
        "processes already. Use `x.sum()`, `x.mean()` or `x.full_tensor()`."
      )
    tensor = tensor.detach().cpu()
  return tensor.detach().contiguous()


class ProcessGroup(dist.ProcessGroup):
  """Process group of all JAX processes, or of one of them."""

  def __init__(self, rank: int, size: int):
    super().__init__(rank, size)
    if size not in (1, jax.process_count()):
      raise CollectiveError(
        f"A process group on jax expects all {jax.process_count()} processes, or one, "
        f"but got {size}. Make a `DeviceMesh` with an axis for each group: "
        '`init_device_mesh("jax", (2, n // 2), mesh_dim_names=("dp", "tp"))`.'
      )

  @property
  def group_name(self) -> str:
    """Name in torch's registry of groups."""
    return torch_compat.name_of_group(self)

  def getBackendName(self) -> str:
    return NAME

  @property
  def _device_types(self) -> list[torch.device]:
    """Devices whose tensors the group takes; torch asks before it sends a state dict.

    Empty until the group has a name: torch would attach its flight recorder, which
    expects a name in C++.
    """
    is_known = bool(self.group_name)
    return [torch.device(NAME), torch.device("cpu")] if is_known else []

  def _get_backend(self, device: torch.device) -> "ProcessGroup":
    """Return the group itself, which is its own backend."""
    return self

  def _members(self, tensor: torch.Tensor) -> torch.Tensor:
    """Gather the tensors of all members, stacked along a new first dim, on the CPU."""
    mine = _on_host(tensor)
    if self.size() == 1:
      return mine[None].clone()
    # As bytes: JAX would narrow 64-bit values.
    flat = mine.reshape(-1).view(torch.uint8)
    content = host_memory.array_of(flat) if mine.numel() else None
    shape = (self.size(), *mine.shape)
    if content is None:
      return mine.new_empty(shape)
    rows = np.array(multihost_utils.process_allgather(content))
    return torch.from_numpy(rows).view(mine.dtype).reshape(shape)

  def _write(self, pairs) -> CompletedWork:
    pairs = list(pairs)
    with torch.no_grad():
      for target, source in pairs:
        if target is not source:
          target.copy_(source.reshape(target.shape))
    return CompletedWork(target for target, _ in pairs)

  def _reduce(self, tensor: torch.Tensor, reduction) -> torch.Tensor:
    name = str(getattr(reduction, "op", reduction)).rpartition(".")[2]
    function = _REDUCTIONS.get(name)
    if function is None:
      raise CollectiveError(
        f"A process group on jax expects a reduction of {', '.join(_REDUCTIONS)}, but "
        f"got {name}."
      )
    if self.size() == 1:
      _on_host(tensor)  # raises for tensors that no collective takes
      return tensor
    return function(self._members(tensor))

  def allreduce(self, tensors, opts=None):
    reduction = getattr(opts, "reduceOp", opts or dist.ReduceOp.SUM)
    tensors = tensors if isinstance(tensors, list) else [tensors]
    return self._write((t, self._reduce(t, reduction)) for t in tensors)

  def allreduce_coalesced(self, tensors, opts=None):
    return self.allreduce(tensors, opts)

  def reduce(self, tensors, opts):
    reduced = [(t, self._reduce(t, opts.reduceOp)) for t in tensors]
    return self._write(reduced if self.rank() == opts.rootRank else ())

  def broadcast(self, tensors, opts):
    tensors = tensors if isinstance(tensors, list) else [tensors]
    root = getattr(opts, "rootRank", opts)
    return self._write((t, self._members(t)[root]) for t in tensors)

  def allgather(self, outputs, inputs, opts=None):
    pairs = [
      (target, member)
      for targets, tensor in zip(outputs, inputs, strict=True)
      for target, member in zip(targets, self._members(tensor), strict=True)
    ]
    return self._write(pairs)

  def _allgather_base(self, output, tensor, opts=None):
    return self._write([(output, self._members(tensor))])

  def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
    members = [self._members(tensor) for tensor in inputs]
    return self._write(zip(outputs, members, strict=True))

  def gather(self, outputs, inputs, opts):
    members = [self._members(tensor) for tensor in inputs]
    if self.rank() != opts.rootRank:
      return CompletedWork()
    pairs = [pair for targets, m in zip(outputs, members) for pair in zip(targets, m)]
    return self._write(pairs)

  def scatter(self, outputs, inputs, opts):
    pairs = []
    for i, target in enumerate(outputs):
      stacked = torch.stack([_on_host(t) for t in inputs[i]]) if inputs else None
      if stacked is None:
        stacked = torch.zeros(self.size(), *target.shape, dtype=target.dtype)
      pairs.append((target, self._members(stacked)[opts.rootRank][self.rank()]))
    return self._write(pairs)

  def reduce_scatter(self, outputs, inputs, opts):
    pairs = []
    for target, parts in zip(outputs, inputs, strict=True):
      whole = torch.stack([_on_host(part) for part in parts])
      pairs.append((target, self._reduce(whole, opts.reduceOp)[self.rank()]))
    return self._write(pairs)

  def _reduce_scatter_base(self, output, tensor, opts):
    whole = self._reduce(_on_host(tensor), opts.reduceOp)
    return self._write([(output, whole.chunk(self.size())[self.rank()])])

  def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts):
    for output, tensor in zip(outputs, inputs, strict=True):
      self._reduce_scatter_base(output, tensor, opts)
    return CompletedWork(outputs)

  def alltoall(self, outputs, inputs, opts=None):
    members = self._members(torch.stack([_on_host(t) for t in inputs]))
    return self._write(zip(outputs, members[:, self.rank()], strict=True))

  def alltoall_base(self, output, tensor, output_sizes, input_sizes, opts=None):
    if len({*output_sizes, *input_sizes}) > 1:
      raise CollectiveError(
        "all_to_all_single on jax expects parts of one size, but got "
        f"{list(input_sizes)} and {list(output_sizes)}. Pad them to the largest."
      )
    size = self.size()
    members = self._members(tensor)
    parts = members.reshape(size, size, -1, *members.shape[2:])
    return self._write([(output, parts[:, self.rank()])])

  # Names of torch 2.13 for the same methods.
  all_gather_single = _allgather_base
  all_gather_single_coalesced = allgather_into_tensor_coalesced
  reduce_scatter_single = _reduce_scatter_base
  reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
  all_to_all_single = alltoall_base

  def barrier(self, opts=None):
    if self.size() > 1:
      multihost_utils.sync_global_devices("torch.distributed.barrier")
    return CompletedWork()

  def _refuse(self, *args):
    raise CollectiveError(
      "Processes on jax have no send and recv. In a function of one shard, "
      "`torch.distributed._functional_collectives.permute_tensor(tensor, destinations, "
      "group)` sends from each member to another one."
    )

  send = recv = recv_anysource = _refuse


def _world() -> dict:
  """Return the arguments of `init_process_group` that JAX determines.

  Raises:
    CollectiveError: the launcher's number of processes differs from JAX's.
  """
  launched = os.environ.get("WORLD_SIZE")
  is_connected = jax.distributed.is_initialized() or jax_compat.has_started()
  if int(launched or 1) > 1 and not is_connected:
    processes.initialize()
  count, index = jax.process_count(), jax.process_index()
  if launched is not None and int(launched) != count:
    raise CollectiveError(
      f"A launcher has started {launched} processes (WORLD_SIZE), but JAX has {count}. "
      'Call `torchax.processes.initialize()`, or `init_process_group("jax")`, before '
      "the first tensor is made."
    )
  if count > 1 and "MASTER_ADDR" in os.environ:
    return {"rank": index, "world_size": count}
  return {"rank": index, "world_size": count, "store": dist.HashStore()}


def initialize(original: Callable, *args, **kwargs) -> None:
  """Implement `init_process_group`; the backend "jax" uses JAX's processes as world.

  Raises:
    CollectiveError: the rank, the world size or a second backend conflicts with "jax".
    ValueError: there is a process group already (torch's error).
  """
  arguments = inspect.signature(original).bind_partial(*args, **kwargs).arguments
  backend = str(arguments.get("backend")).lower()
  if NAME not in re.split("[:,]", backend) or dist.is_initialized():
    return original(*args, **kwargs)  # raises torch's error for the second one
  if backend != NAME:
    raise CollectiveError(
      f'Expected init_process_group("jax"), which takes CPU tensors too, but got '
      f"{arguments['backend']!r}."
    )
  world = _world()
  for name in ("rank", "world_size"):
    if arguments.get(name, -1) not in (-1, world[name]):
      raise CollectiveError(
        f"init_process_group was given {name}={arguments[name]}, but JAX says "
        f"{world[name]}: a rank on jax is a process, which drives all of its devices. "
        "Leave it out."
      )
  if arguments.get("store") is not None:
    world.pop("store", None)
  if "store" in world:
    arguments.pop("init_method", None)
  torch_compat.register_group_backend(
    NAME, lambda store, rank, size, timeout: ProcessGroup(rank, size)
  )
  original(**{**arguments, **world})
  group: Any = dist.group.WORLD
  jc10d.WORLDS.add(group.group_name)
  return None


def start() -> None:
  """Start the process group "jax" unless there is a process group."""
  if not dist.is_initialized():
    dist.init_process_group(NAME)
