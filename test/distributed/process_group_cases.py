"""Laws of process groups; `test_process_group.py` runs them.

usage:
  RANK=0 WORLD_SIZE=2 COORDINATOR=127.0.0.1:1234 python process_group_cases.py out.json

Two processes of two devices each run them. Both processes know all inputs: `MINE[rank]`
is the input of a rank.
"""

import copy
import io
import os
import pickle
from collections.abc import Callable

import jax
import many_devices
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
  StateDictOptions,
  get_state_dict,
  set_model_state_dict,
  set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import torchax
from torchax.errors import CollectiveError, NotAddressableError
from torchax.interop import jax_jit

CASES: dict[str, Callable] = {}
RANK = int(os.environ.get("RANK", 0))
MINE = [torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 2], [-1, 7]])]
BOTH = torch.stack(MINE)


def case(function: Callable) -> Callable:
  """Register a law."""
  CASES[function.__name__] = function
  return function


def each_device(function: Callable) -> None:
  """Run a law on jax and on the CPU, with floats and with 64-bit integers."""
  for device, dtype in (("jax", torch.float32), ("cpu", torch.int64)):
    function(lambda x, d=device, t=dtype: x.to(t, copy=True).to(d))


REDUCTIONS = {
  "SUM": lambda both: both.sum(0),
  "PRODUCT": lambda both: both.prod(0),
  "MIN": lambda both: both.amin(0),
  "MAX": lambda both: both.amax(0),
}


@case
def world_equals_the_processes_of_jax():
  assert dist.get_world_size() == 2 and dist.get_rank() == RANK == jax.process_index()
  assert dist.get_backend() == "jax"
  with pytest.raises(ValueError, match="process group twice"):
    dist.init_process_group("jax")
  sampler = DistributedSampler(range(6), shuffle=False)
  assert list(sampler) == [RANK, RANK + 2, RANK + 4]


@case
def reductions():
  for name, law in REDUCTIONS.items():

    def reduces(on, name=name, law=law):
      x = on(MINE[RANK])
      dist.all_reduce(x, getattr(dist.ReduceOp, name))
      assert torch.equal(x.cpu(), on(law(BOTH)).cpu())

    each_device(reduces)
  mean = MINE[RANK].float().to("jax")
  dist.all_reduce(mean, dist.ReduceOp.AVG)
  assert torch.equal(mean.cpu(), BOTH.float().mean(0))
  wide = torch.tensor([2**40 + RANK])  # 32 bits would change the number
  dist.all_reduce(wide)
  assert wide.item() == 2**41 + 1
  bits = torch.tensor([4 + RANK])
  dist.all_reduce(bits, dist.ReduceOp.BXOR)
  assert bits.item() == 1


@case
def to_and_from_one_process():
  def law(on):
    x = on(MINE[RANK])
    dist.broadcast(x, 1)
    assert torch.equal(x.cpu(), on(MINE[1]).cpu())
    x = on(MINE[RANK])
    dist.reduce(x, 1)
    assert torch.equal(x.cpu(), on(BOTH.sum(0) if RANK else MINE[0]).cpu())
    parts = [on(MINE[0]), on(MINE[1])] if RANK == 0 else None
    x = on(torch.zeros(2, 2))
    dist.scatter(x, parts, 0)
    assert torch.equal(x.cpu(), on(MINE[RANK]).cpu())
    found = [on(torch.zeros(2, 2)) for _ in range(2)] if RANK == 0 else None
    dist.gather(on(MINE[RANK]), found, 0)
    if RANK == 0:
      assert torch.equal(torch.stack(found).cpu(), on(BOTH).cpu())

  each_device(law)


@case
def gathers_and_exchanges():
  def law(on):
    found = [on(torch.zeros(2, 2)) for _ in range(2)]
    dist.all_gather(found, on(MINE[RANK]))
    assert torch.equal(torch.stack(found).cpu(), on(BOTH).cpu())
    whole = on(torch.zeros(4, 2))
    dist.all_gather_into_tensor(whole, on(MINE[RANK]))
    assert torch.equal(whole.cpu(), on(BOTH.reshape(4, 2)).cpu())
    part = on(torch.zeros(1, 2))
    dist.reduce_scatter_tensor(part, on(MINE[RANK]))
    assert torch.equal(part.cpu(), on(BOTH.sum(0)[RANK : RANK + 1]).cpu())
    part = on(torch.zeros(2))
    dist.reduce_scatter(part, list(on(MINE[RANK])))
    assert torch.equal(part.cpu(), on(BOTH.sum(0)[RANK]).cpu())
    swapped = on(torch.zeros(2, 2))
    dist.all_to_all_single(swapped, on(MINE[RANK]))
    assert torch.equal(swapped.cpu(), on(BOTH[:, RANK]).cpu())
    rows = [on(torch.zeros(2)) for _ in range(2)]
    dist.all_to_all(rows, list(on(MINE[RANK])))
    assert torch.equal(torch.stack(rows).cpu(), on(BOTH[:, RANK]).cpu())

  each_device(law)


@case
def objects_of_python():
  found = [None, None]
  dist.all_gather_object(found, {"rank": RANK})
  assert found == [{"rank": 0}, {"rank": 1}]
  told = [f"from {RANK}", RANK]
  dist.broadcast_object_list(told, 1)
  assert told == ["from 1", 1]


@case
def a_barrier_and_a_handle():
  dist.barrier()
  x = MINE[RANK].float().to("jax")
  work = dist.all_reduce(x, async_op=True)
  assert work.wait() and work.is_completed()
  assert torch.equal(x.cpu(), BOTH.sum(0).float())


@case
def data_parallel_gradients_are_means_over_processes():
  torch.manual_seed(RANK)  # unequal seeds: the first process's parameters are used
  module = nn.Linear(3, 2)
  torch.manual_seed(0)
  reference = nn.Linear(3, 2)
  batches = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(5))
  parallel = DistributedDataParallel(module.to("jax"))
  assert torch.equal(module.weight.detach().cpu(), reference.weight.detach())
  alone = copy.deepcopy(reference)
  alone(batches[RANK]).pow(2).sum().backward()
  with parallel.no_sync():
    parallel(batches[RANK].to("jax")).pow(2).sum().backward()
  torch.testing.assert_close(module.weight.grad.cpu(), alone.weight.grad)
  parallel.zero_grad()
  parallel(batches[RANK].to("jax")).pow(2).sum().backward()
  (reference(batches.flatten(0, 1)).pow(2).sum() / 2).backward()
  torch.testing.assert_close(module.weight.grad.cpu(), reference.weight.grad)
  torch.testing.assert_close(module.bias.grad.cpu(), reference.bias.grad)
  assert list(parallel.state_dict()) == ["module.weight", "module.bias"]


@case
def copied_data_parallel_module_averages_gradients():
  parallel = DistributedDataParallel(nn.Linear(3, 2).to("jax"))
  for again in (copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))):
    again(torch.full((2, 3), 1.0 + RANK).to("jax")).sum().backward()
    assert torch.equal(again.module.weight.grad.cpu(), torch.full((2, 3), 3.0))
    assert parallel.module.weight.grad is None


@case
def state_of_the_first_process_is_broadcast():
  mesh = init_device_mesh("jax", (4,), mesh_dim_names=("shards",))
  whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
  from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

  def trained(seed: int, rate: float):
    # Unequal seeds: the first process's tensors are distributed.
    torch.manual_seed(seed + RANK)
    layer = fully_shard(nn.Linear(8, 4), mesh=mesh)
    optimizer = torch.optim.Adam(layer.parameters(), rate)
    layer(torch.ones(4, 8, device="jax")).sum().backward()
    optimizer.step()
    return layer, optimizer

  source, target = trained(0, 0.5), trained(5, 0.1)
  state = get_state_dict(*source, options=whole)
  assert bool(state[0]) == (RANK == 0)
  set_model_state_dict(target[0], dict(state[0]), options=from_first)
  set_optimizer_state_dict(*target, dict(state[1]), options=from_first)
  for mine, other in zip(target[0].parameters(), source[0].parameters(), strict=True):
    assert mine.placements == (Shard(0),)
    assert torch.equal(mine.full_tensor().cpu(), other.full_tensor().cpu())
    moments = [o.state[p]["exp_avg"] for (_, o), p in ((target, mine), (source, other))]
    assert torch.equal(*(moment.full_tensor().cpu() for moment in moments))
  with torch.device("meta"):
    deferred = fully_shard(nn.Linear(8, 4), mesh=mesh)
  set_model_state_dict(deferred, state[0], options=from_first)
  for mine, other in zip(deferred.parameters(), source[0].parameters(), strict=True):
    assert torch.equal(mine.full_tensor().cpu(), other.full_tensor().cpu())
  with pytest.raises(NotAddressableError, match=r"torchax\.save_checkpoint"):
    torch.save(source[0].state_dict(), io.BytesIO())


@case
def traced_data_parallel_backward_names_the_remedy():
  parallel = DistributedDataParallel(nn.Linear(3, 2).to("jax"))

  def step(x):
    parallel(x).sum().backward()
    return x

  with pytest.raises(CollectiveError, match="was traced(.|\n)*distribute_tensor"):
    jax_jit(step)(torch.ones(4, 3, device="jax"))


@case
def mesh_spans_the_processes():
  mesh = init_device_mesh("jax", (2, 2), mesh_dim_names=("dp", "tp"))
  assert mesh.get_local_rank("dp") == RANK and mesh.get_local_rank("tp") == 0
  # `distribute_tensor` takes the values of the first process.
  x = torch.arange(8.0).reshape(4, 2) + 100 * RANK
  placed = distribute_tensor(x, mesh, [Shard(0), Replicate()])
  array = placed.jax()
  assert not array.is_fully_addressable and placed.shape == (4, 2)
  expected = np.arange(8, dtype=np.float32).reshape(4, 2)
  for shard in array.addressable_shards:
    np.testing.assert_array_equal(shard.data, expected[shard.index])
  total = jax_jit(lambda x: (x * 2).sum())(placed).full_tensor()
  assert np.asarray(total.jax().addressable_data(0)) == 2 * expected.sum()
  whole = placed.full_tensor().jax().addressable_data(0)
  np.testing.assert_array_equal(whole, expected)
  with pytest.raises(CollectiveError, match="global array of shape .4, 2."):
    dist.all_reduce(placed)


@case
def unsupported_collectives_name_the_remedy():
  x = torch.ones(2, device="jax")
  with pytest.raises(CollectiveError, match="permute_tensor"):
    dist.send(x, 1 - RANK)
  with pytest.raises(CollectiveError, match="in a compiled function"):
    jax_jit(lambda x: dist.all_reduce(x) or x)(x)


if __name__ == "__main__":
  assert torchax.__name__
  jax.distributed.initialize(os.environ["COORDINATOR"], 2, RANK)
  dist.init_process_group("jax")
  many_devices.main(CASES)
  dist.destroy_process_group()
  assert not dist.is_initialized()
