"""Laws of the state of modules on a mesh: initialized, copied, saved and loaded.

`dtensor_cases.py` runs them.
"""

import copy
import io
import pathlib
import pickle
import tempfile

import pytest
import torch
import torch.distributed as dist
from distributed.dtensor_parts import Block, X, case, grid, line, numbers, pair
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
  StateDictOptions,
  get_model_state_dict,
  get_optimizer_state_dict,
  get_state_dict,
  set_model_state_dict,
  set_optimizer_state_dict,
  set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import (
  DTensor,
  Replicate,
  Shard,
  distribute_module,
  distribute_tensor,
)
from torch.distributed.tensor.parallel import (
  ColwiseParallel,
  RowwiseParallel,
  parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import torchax
from torchax import mesh_util
from torchax.distributed import jax_mesh
from torchax.errors import CollectiveError, TracedStateError
from torchax.interop import jax_jit

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def sharded(seed: int = 0) -> Block:
  """Return a block that is fully sharded, part by part and as a whole."""
  torch.manual_seed(seed)
  block = Block()
  fully_shard(block.up, mesh=line())
  return fully_shard(block, mesh=line())


def on_meta() -> Block:
  with torch.device("meta"):
    return Block()


def in_parts(name: str) -> Block:
  """Return a block of the meta device, put on a mesh by the function of this name."""
  block = on_meta()
  if name == "fully_shard":
    fully_shard(block.up, mesh=line())
    return fully_shard(block, mesh=line())
  if name == "distribute_module":
    return distribute_module(block, line())
  mesh = grid()
  parallelize_module(block, mesh["tp"], PLAN)
  return fully_shard(block, mesh=mesh["dp"])


def assert_equal(found, expected) -> None:
  """Assert that two state dicts have the same names and values."""
  assert list(found) == list(expected)
  for name, tensor in expected.items():
    assert torch.equal(found[name].cpu(), tensor.cpu()), name


# From the meta device -----------------------------------------------------------------


@case
def meta_module_is_initialized_by_shards():
  torch.manual_seed(3)
  with torch.device("jax"):
    expected = Block()
  for name in ("fully_shard", "distribute_module", "parallelize_module"):
    block = in_parts(name)
    where = {name: p.placements for name, p in block.named_parameters()}
    assert all(where.values()) and not any(p.is_meta for p in block.parameters())
    block.to_empty(device="jax")
    torch.manual_seed(3)
    for part in (block.norm, block.up, block.down):
      part.reset_parameters()
    assert_equal(block.state_dict(), expected.state_dict())
    assert {n: p.placements for n, p in block.named_parameters()} == where
    block(X.to("jax")).sum().backward()


@case
def meta_module_is_loaded_by_shards():
  full = Block().state_dict()
  for assign in (False, True):
    block = in_parts("fully_shard")
    state = {
      name: nn.Parameter(distribute_tensor(full[name], p.device_mesh, p.placements))
      for name, p in block.state_dict().items()
    }
    block.load_state_dict(state, assign=assign)
    assert_equal(block.state_dict(), full)
    assert {p.placements for p in block.parameters()} == {(Shard(0),)}


@case
def tensors_outside_of_plans_go_to_the_current_device():
  with torch.device("meta"):
    norm = nn.BatchNorm1d(8)
  frozen = norm.weight
  fully_shard(norm, mesh=line(), ignored_params={frozen})
  assert norm.weight is frozen and norm.weight.placements == ()
  assert norm.bias.placements == (Shard(0),)
  assert norm.running_mean.device.type == frozen.device.type == "jax"
  assert norm.running_mean.dtype == torch.float32


# Device contexts in which modules are made and loaded ---------------------------------

AROUND = {
  "on meta": lambda: torch.device("meta"),
  "on jax": lambda: torch.device("jax"),
  "without gradients": torch.no_grad,
}
FULL = StateDictOptions(full_state_dict=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def sharding_mesh() -> mesh_util.Mesh:
  sharder = mesh_util.SingleAxisSharder("dim_0", 8)
  return mesh_util.Mesh(jax_mesh(line()), sharder)


def from_files(model: nn.Module, state: dict) -> nn.Module:
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "model.safetensors")
    save_file(state, path)
    return sharding_mesh().load_safetensors(model, path)


def from_state(options):
  def load(model, state):
    fully_shard(model, mesh=line())
    set_model_state_dict(model, dict(state), options=options)
    return model

  return load


LOADS = {
  "safetensors": from_files,
  "fully_shard": from_state(FULL),
  "the first process": from_state(FROM_FIRST),
}


@case
def modules_are_loaded_in_any_block():
  state = Block().state_dict()
  for around in AROUND.values():
    for name, load in LOADS.items():
      for model in (Block(), on_meta()):
        with around():
          loaded = load(model, state)
        assert_equal(loaded.state_dict(), state)
        assert all(p.requires_grad and p.is_leaf for p in loaded.parameters()), name
  loaded(X.to("jax")).sum().backward()


KEPT = {
  "Mesh.load_safetensors": lambda: from_files(Block(), {}),
  "Mesh.shard_model": lambda: sharding_mesh().shard_model(Block()),
  "Mesh.initialize_model_sharded": lambda: sharding_mesh().initialize_model_sharded(
    Block, ()
  ),
  "fully_shard": lambda: fully_shard(Block(), mesh=line()),
  "distribute_module": lambda: distribute_module(Block(), line()),
  "load_checkpoint": lambda: torchax.load_checkpoint("."),
}


@case
def compiled_function_refuses_to_shard_modules():
  def step(x):
    KEPT[name]()
    return x

  for name in KEPT:
    with torch.device("jax"), pytest.raises(TracedStateError) as caught:
      jax_jit(step)(X.to("jax"))
    assert f"`{name}` was called while `step` is being traced" in str(caught.value)


@case
def constant_of_a_compiled_function_is_sharded():
  x = numbers(8)
  found = jax_jit(lambda y: sharding_mesh().shard(x, ("dim_0",)) + y)(x.to("jax"))
  assert torch.equal(found.cpu(), 2 * x)


@case
def meta_tensor_that_is_no_parameter_is_refused():
  with torch.device("meta"):
    for place in (distribute_tensor, DTensor.from_local):
      with pytest.raises(
        CollectiveError, match=f"{place.__name__}` was given a tensor"
      ):
        place(torch.ones(8), line(), [Shard(0)])


# State dicts --------------------------------------------------------------------------


def trained() -> tuple[Block, torch.optim.Optimizer]:
  block = sharded()
  optimizer = torch.optim.AdamW(block.parameters(), 1e-2)
  block(X.to("jax")).sum().backward()
  optimizer.step()
  return block, optimizer


def assert_as_trained(block, optimizer, others) -> None:
  """Assert that a module and its optimizer equal another pair, placements included."""
  assert_equal(block.state_dict(), others[0].state_dict())
  assert optimizer.param_groups[0]["lr"] == 1e-2
  for mine, other in zip(block.parameters(), others[0].parameters(), strict=True):
    assert mine.placements == other.placements == (Shard(0),)
    found, expected = optimizer.state[mine], others[1].state[other]
    assert_equal(found, expected)
    assert found["exp_avg"].placements == expected["exp_avg"].placements


@case
def state_dicts_load_into_another_optimizer():
  source = trained()
  on_cpu = StateDictOptions(full_state_dict=True, cpu_offload=True)
  flat = StateDictOptions(flatten_optimizer_state_dict=True)
  for given, taken in (
    (None, None),
    (on_cpu, FULL),
    (on_cpu, FROM_FIRST),
    (flat, flat),
  ):
    model_state = get_model_state_dict(source[0], options=given)
    state = get_optimizer_state_dict(*source, options=given)
    if given is on_cpu:
      assert not isinstance(model_state["up.weight"], DTensor)
      assert model_state["up.weight"].device.type == "cpu"
    block = sharded(1)
    optimizer = torch.optim.AdamW(block.parameters(), 1.0)
    set_model_state_dict(block, model_state, options=taken)
    set_optimizer_state_dict(block, optimizer, state, options=taken)
    assert_as_trained(block, optimizer, source)


class App:
  """Stateful object for checkpoints of torch.distributed."""

  def __init__(self, block, optimizer):
    self.block, self.optimizer = block, optimizer

  def state_dict(self):
    model, optimizer = get_state_dict(self.block, self.optimizer)
    return {"model": model, "optimizer": optimizer}

  def load_state_dict(self, state):
    set_state_dict(
      self.block,
      self.optimizer,
      model_state_dict=state["model"],
      optim_state_dict=state["optimizer"],
    )


@case
def torch_distributed_checkpoints_round_trip():
  source = trained()
  for save in (
    checkpoint.save,
    lambda *args, **kwargs: checkpoint.async_save(*args, **kwargs).result(),
  ):
    with tempfile.TemporaryDirectory() as folder:
      save({"app": App(*source)}, checkpoint_id=folder)
      block = sharded(1)
      optimizer = torch.optim.AdamW(block.parameters(), 1.0)
      checkpoint.load({"app": App(block, optimizer)}, checkpoint_id=folder)
    assert_as_trained(block, optimizer, source)


# Copies and pickles -------------------------------------------------------------------


def parallelized() -> nn.Module:
  block, _ = pair()
  return parallelize_module(block.to("jax"), grid()["tp"], PLAN)


ON_MESHES = {
  "fully_shard": sharded,
  "parallelize_module": parallelized,
  "distribute_module": lambda: distribute_module(
    pair()[0], line(), None, lambda module, inputs, mesh: inputs
  ),
}


@case
def modules_on_a_mesh_are_copied_and_refuse_pickling():
  for name, make in ON_MESHES.items():
    block = make()
    copied = copy.deepcopy(block)
    assert isinstance(copied, FSDPModule) == isinstance(block, FSDPModule)
    assert copied.up.weight is not block.up.weight
    assert copied.up.weight.placements == block.up.weight.placements
    x = X.to("jax")
    assert torch.equal(copied(x), block(x))
    for dump in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
      with pytest.raises(pickle.PicklingError, match=name) as caught:
        dump(block)
      assert "torch.save(model.state_dict(), path)" in str(caught.value)
    file = io.BytesIO()
    torch.save(block.state_dict(), file)
    file.seek(0)
    again = make()
    again.load_state_dict(torch.load(file))
    assert_equal(again.state_dict(), block.state_dict())
    assert again.up.weight.placements == block.up.weight.placements


@case
def pickled_replicated_module_loads_on_one_device():
  block = distribute_module(pair()[0], line())
  again = pickle.loads(pickle.dumps(block))
  assert_equal(again.state_dict(), block.state_dict())
  assert again.up.weight.placements == ()
  assert distribute_module(again, line()).up.weight.placements == (Replicate(),)


@case
def data_parallel_module_is_copied_and_pickled():
  line()
  parallel = DistributedDataParallel(pair()[0].to("jax"))
  for again in (copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))):
    assert type(again) is type(parallel) and again.process_group is dist.group.WORLD
    assert_equal(again.state_dict(), parallel.state_dict())
    again(X.to("jax")).sum().backward()
    assert again.module.up.weight.grad is not None
    assert parallel.module.up.weight.grad is None


@case
def mesh_distributes_after_its_process_group_ends():
  known = line()
  block = sharded()
  dist.destroy_process_group()
  try:
    assert block.up.weight.placements == (Shard(0),)
    placed = distribute_tensor(numbers(8), known, [Shard(0)])
    assert torch.equal(placed.full_tensor().cpu(), numbers(8))
  finally:
    dist.init_process_group("jax")
