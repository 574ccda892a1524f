"""Cases of `test_dtensor.py`, run in one process that has eight devices.

  XLA_FLAGS=--xla_force_host_platform_device_count=8 python dtensor_cases.py out.json

What torch's functions of meshes and `DTensor` give is compared with the same module on
one device, and the collectives of compiled modules are counted.
"""

import copy
import io
import re
import tempfile
from collections.abc import Callable

import jax
import many_devices
import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as factories

# After torch.distributed: a program may have imported its functions before torchax.
from distributed import (  # noqa: F401  enter their laws
  context_parallel_cases,
  device_mesh_cases,
  fsdp_cases,
  state_cases,
)
from distributed.dtensor_parts import (
  CASES,
  X,
  assert_trains_alike,
  case,
  collectives,
  enter_refusals,
  grid,
  line,
  numbers,
  pair,
)
from jax.sharding import PartitionSpec
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
  StateDictOptions,
  get_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
  DTensor,
  Partial,
  Replicate,
  Shard,
  distribute_module,
  distribute_tensor,
)
from torch.distributed.tensor.parallel import (
  ColwiseParallel,
  PrepareModuleInput,
  PrepareModuleInputOutput,
  PrepareModuleOutput,
  RowwiseParallel,
  SequenceParallel,
  parallelize_module,
)
from torch.optim import swa_utils

from torchax.distributed import jax_mesh, placements_of, sharding_of
from torchax.errors import CollectiveError
from torchax.interop import jax_jit, jax_view
from torchax.tensor import Tensor

# Tensors ------------------------------------------------------------------------------


PLACED = {
  (Shard(0), Shard(1)): PartitionSpec("dp", "tp"),
  (Shard(1), Replicate()): PartitionSpec(None, "dp"),
  (Shard(0), Shard(0)): PartitionSpec(("dp", "tp")),
  (Replicate(), Shard(-1)): PartitionSpec(None, "tp"),
  (Replicate(), Replicate()): PartitionSpec(),
  (Replicate(), Partial()): PartitionSpec(),
}


@case
def placements_are_shardings():
  mesh, x = grid(), numbers(8, 4)
  for placements, spec in PLACED.items():
    placed = distribute_tensor(x, mesh, placements)
    wanted = jax.sharding.NamedSharding(jax_mesh(mesh), spec)
    assert placed.jax().sharding.is_equivalent_to(wanted, 2), placements
    assert sharding_of(mesh, placements, (8, 4)).is_equivalent_to(wanted, 2)
    assert placed.shape == x.shape and torch.equal(placed.cpu(), x)
    kept = tuple(
      Replicate() if p.is_partial() else Shard(p.dim % 2) if p.is_shard() else p
      for p in placements
    )
    assert placed.placements == placements_of(placed.jax(), mesh) == kept
    assert placed.device_mesh == mesh
  assert distribute_tensor(x, mesh).placements == (Replicate(), Replicate())
  with mesh:
    assert distribute_tensor(x).placements == (Replicate(), Replicate())


@case
def distributing_a_parameter_gives_a_leaf():
  parameter = nn.Parameter(numbers(8, 4))
  placed = distribute_tensor(parameter, grid(), [Shard(0), Replicate()])
  assert placed.is_leaf and placed.requires_grad
  assert not distribute_tensor(numbers(8), line(), [Shard(0)]).requires_grad


@case
def redistribution_keeps_numbers_and_gradients():
  mesh = grid()
  x = distribute_tensor(numbers(8, 4), mesh, [Shard(0), Replicate()]).requires_grad_()
  y = x.redistribute(placements=[Replicate(), Shard(1)])
  assert y.placements == (Replicate(), Shard(1)) and y.device_mesh == mesh
  (y * y).sum().backward()
  torch.testing.assert_close(x.grad.cpu(), 2 * numbers(8, 4))
  whole = y.full_tensor()
  assert whole.placements == (Replicate(), Replicate())
  assert torch.equal(whole.detach().cpu(), numbers(8, 4))
  assert y.to_local() is y
  local = DTensor.from_local(numbers(8, 4).to("jax"), mesh, [Shard(0), Shard(1)])
  assert local.placements == (Shard(0), Shard(1)) and local.shape == (8, 4)


@case
def copies_and_files_have_the_numbers():
  placed = distribute_tensor(numbers(8, 4), grid(), [Shard(0), Shard(1)])
  copied = copy.deepcopy(placed)
  assert copied.placements == placed.placements and torch.equal(copied, placed)
  file = io.BytesIO()
  torch.save({"x": placed}, file)
  file.seek(0)
  assert torch.equal(torch.load(file)["x"].cpu(), numbers(8, 4))
  block, reference = pair()
  distribute_module(block, line())
  again = copy.deepcopy(block)
  assert {p.placements for p in again.parameters()} == {(Replicate(),)}
  reference.load_state_dict({n: p.cpu() for n, p in again.state_dict().items()})
  mesh = copy.deepcopy(grid())
  assert mesh == grid() and jax_mesh(mesh) == jax_mesh(grid())


@case
def a_part_of_a_mesh_leaves_the_other_axes_alone():
  mesh = grid()
  x = distribute_tensor(numbers(8, 4), mesh, [Shard(0), Replicate()])
  y = x.redistribute(mesh["tp"], [Shard(1)])
  assert placements_of(y.jax(), mesh) == (Shard(0), Shard(1))
  z = y.redistribute(mesh["tp"], [Replicate()])
  assert placements_of(z.jax(), mesh) == (Shard(0), Replicate())


# Functions whose result, like their input, is on a mesh.
DTENSORS: dict[str, Callable] = {
  "distribute_tensor": lambda x: x,
  "from_local": lambda x: DTensor.from_local(x, grid(), [Shard(0), Shard(1)]),
  "redistribute": lambda x: x.redistribute(placements=[Replicate(), Shard(0)]),
  "full_tensor": lambda x: x.full_tensor(),
  "to_local": lambda x: x.to_local(),
  "a result": lambda x: x @ x.T + 1,
  "a view": lambda x: x[2:6],
  "a parameter": nn.Parameter,
  "a gradient": lambda x: torch.autograd.grad(x.requires_grad_().sum(), x)[0],
  "a copy": copy.deepcopy,
  "a detached one": lambda x: x.detach(),
  "of a state": lambda x: fully_sharded_layer().state_dict()["weight"],
  "an average": lambda x: next(
    swa_utils.AveragedModel(fully_sharded_layer()).parameters()
  ),
}


def fully_sharded_layer() -> nn.Module:
  return distribute_module(nn.Linear(8, 8, device="jax"), line())


@case
def tensors_on_a_mesh_are_dtensors():
  for name, function in DTENSORS.items():
    found = function(distribute_tensor(numbers(8, 4), grid(), [Shard(0), Replicate()]))
    assert isinstance(found, DTensor) and isinstance(found, Tensor), name
    assert found.placements and found.device_mesh in (grid(), line()), name
    assert not issubclass(type(found), DTensor), name
  layer = fully_sharded_layer()
  assert isinstance(layer.weight, nn.Parameter)
  for other in (
    torch.ones(2, device="jax"),
    torch.ones(2),
    numbers(8, 4).to("jax").shard_(jax.sharding.SingleDeviceSharding(jax.devices()[1])),
    layer.to("cpu").weight,
  ):
    assert not isinstance(other, DTensor)
  assert layer.weight.device.type == "cpu" and isinstance(layer.weight, nn.Parameter)


@case
def fake_and_escaped_tensors_are_no_dtensors():
  grid()
  seen = []

  def inspected(graph, inputs):
    seen.extend(node.meta.get("example_value") for node in graph.graph.nodes)
    return graph.forward

  x = torch.ones(3, device="jax")
  torch.compile(lambda x: x + 1, backend=inspected)(x)
  jax_jit(lambda x: seen.append(x * 2))(x)
  assert len(seen) > 3 and not any(isinstance(value, DTensor) for value in seen)


@case
def functions_of_dtensors_take_jax_tensors():
  x = distribute_tensor(numbers(8, 4), grid(), [Shard(0), Shard(1)])
  torch.testing.assert_close(x, copy.deepcopy(x))
  with pytest.raises(TypeError, match="Comparing a DTensor to a non-DTensor"):
    torch.testing.assert_close(x, numbers(8, 4))
  compiled = torch.compile(lambda x: (x * 2).sum(0), backend="jax", fullgraph=True)
  torch.testing.assert_close(compiled(x).cpu(), (numbers(8, 4) * 2).sum(0))
  layer = fully_sharded_layer()
  whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
  state = get_model_state_dict(layer, options=whole)
  assert torch.equal(state["weight"], layer.weight.detach().cpu())
  assert type(state["weight"]) is torch.Tensor
  with tempfile.TemporaryDirectory() as folder:
    checkpoint.save({"x": x}, checkpoint_id=folder)
    for target in (torch.zeros(8, 4), distribute_tensor(torch.zeros(8, 4), line())):
      loaded = {"x": target}
      checkpoint.load(loaded, checkpoint_id=folder)
      assert torch.equal(loaded["x"].cpu(), numbers(8, 4))


@case
def a_plan_takes_inputs_sharded_along_other_axes():
  plans = (
    {"up": ColwiseParallel(), "down": RowwiseParallel()},
    {
      "norm": SequenceParallel(),
      "up": ColwiseParallel(input_layouts=Shard(1)),
      "down": RowwiseParallel(output_layouts=Shard(1)),
    },
    PrepareModuleInputOutput(
      input_layouts=(Shard(1),),
      desired_input_layouts=(Replicate(),),
      output_layouts=(Replicate(),),
      desired_output_layouts=(Shard(1),),
    ),
    PrepareModuleInput(
      input_kwarg_layouts={"x": Shard(1)},
      desired_input_kwarg_layouts={"x": Replicate()},
    ),
  )
  for plan in plans:
    block, reference = pair()
    mesh = grid()
    parallelize_module(block.to("jax"), mesh["tp"], plan)
    x = distribute_tensor(X, mesh, [Shard(0), Replicate()])
    found = block(x=x) if plan is plans[-1] else block(x)
    torch.testing.assert_close(found.detach().cpu(), reference(X).detach())
    assert placements_of(found.jax(), mesh)[0] == Shard(0)


@case
def the_first_process_or_each_one_gives_the_numbers():
  for source in (0, None):
    x = distribute_tensor(numbers(8), line(), [Shard(0)], src_data_rank=source)
    assert x.placements == (Shard(0),) and torch.equal(x.cpu(), numbers(8))


@case
def a_compiled_function_obeys_placements():
  mesh = grid()

  @jax_jit
  def step(x):
    placed = DTensor.from_local(x, mesh, [Shard(0), Replicate()])
    assert placed.placements == (Shard(0), Replicate()) and placed.device_mesh == mesh
    assert isinstance(placed, DTensor)
    return placed.redistribute(placements=[Shard(1), Replicate()]) * 2

  assert placements_of(step(numbers(8, 4).to("jax")).jax(), mesh)[0] == Shard(1)


@case
def factories_make_tensors_on_a_mesh():
  mesh, where = grid(), [Shard(0), Shard(1)]
  options = {"device_mesh": mesh, "placements": where}
  for name, value in (("zeros", 0.0), ("ones", 1.0)):
    made = getattr(factories, name)(8, 4, **options)
    assert made.placements == tuple(where)
    assert torch.equal(made.cpu(), torch.full((8, 4), value))
  full = factories.full((8, 4), 3.0, requires_grad=True, **options)
  assert full.requires_grad and full.is_leaf and (full.detach().cpu() == 3).all()
  torch.manual_seed(3)
  drawn = factories.rand(8, 4, **options)
  torch.manual_seed(3)
  assert torch.equal(drawn.cpu(), torch.rand(8, 4, device="jax").cpu())


@case
def a_tensor_on_no_mesh_has_no_placements():
  x = torch.ones(2, device="jax")
  assert x.placements == () and x.full_tensor() is x and not hasattr(x, "device_mesh")
  with pytest.raises(AttributeError, match="on no DeviceMesh. Place it"):
    x.redistribute(placements=[Replicate()])


# Modules ------------------------------------------------------------------------------


@case
def a_module_is_replicated_with_its_ties():
  block, reference = pair()
  block.alias = block.up
  distribute_module(block, line())
  assert block.alias is block.up
  assert {p.placements for p in block.parameters()} == {(Replicate(),)}
  del block.alias
  assert_trains_alike(block, reference)
  with pytest.raises(RuntimeError, match="called once"):
    distribute_module(block, line())


@case
def a_module_is_distributed_by_functions():
  def partition(name, module, mesh):
    if name == "up":
      weight = distribute_tensor(module.weight, mesh, [Shard(0)])
      module.register_parameter("weight", nn.Parameter(weight))

  block, reference = pair()
  distribute_module(
    block,
    line(),
    partition,
    lambda module, inputs, mesh: (DTensor.from_local(inputs[0], mesh, [Shard(1)]),),
    lambda module, outputs, mesh: outputs.redistribute(placements=[Replicate()]),
  )
  assert block.up.weight.placements == (Shard(0),)
  assert block.up.bias.placements == (Replicate(),)
  assert_trains_alike(block, reference)


@case
def columns_then_rows_communicate_once():
  block, reference = pair()
  mesh = grid()
  plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
  parallelize_module(block.to("jax"), mesh["tp"], plan)
  assert block.up.weight.placements == (Replicate(), Shard(0))
  assert block.up.bias.placements == (Replicate(), Shard(0))
  assert block.down.weight.placements == (Replicate(), Shard(1))
  assert block.down.bias.placements == (Replicate(), Replicate())
  assert_trains_alike(block, reference)
  block, _ = pair()
  line_mesh = init_device_mesh("jax", (8,), mesh_dim_names=("tp",))
  parallelize_module(block, line_mesh, plan)
  distribute_module(block.norm, line_mesh)
  x = distribute_tensor(X, line_mesh)
  assert collectives(block, x) == {"all-reduce": 1}


@case
def sequences_are_sharded_between_layers():
  block, reference = pair()
  mesh = init_device_mesh("jax", (8,), mesh_dim_names=("tp",))
  plan = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
  }
  parallelize_module(block, mesh, plan)
  assert block.norm.weight.placements == (Replicate(),)
  assert placements_of(block(X.to("jax")).jax(), mesh) == (Shard(1),)
  assert_trains_alike(block, reference)


@case
def inputs_and_outputs_are_prepared():
  mesh = init_device_mesh("jax", (8,), mesh_dim_names=("tp",))
  styles = (
    PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
    PrepareModuleInputOutput(
      input_layouts=(Shard(1),),
      desired_input_layouts=(Replicate(),),
      output_layouts=(Replicate(),),
      desired_output_layouts=(Shard(1),),
    ),
  )
  for style in styles:
    block, reference = pair()
    parallelize_module(block.to("jax"), mesh, style)
    assert_trains_alike(block, reference)
    if not isinstance(style, PrepareModuleInput):
      assert placements_of(block(X.to("jax")).jax(), mesh) == (Shard(1),)


@case
def embeddings_are_sharded_by_columns_and_by_rows():
  mesh = init_device_mesh("jax", (8,), mesh_dim_names=("tp",))
  tokens = torch.arange(16).reshape(2, 8)
  torch.manual_seed(0)
  table = nn.Embedding(16, 8)
  expected = table(tokens).detach()
  for style, where in ((ColwiseParallel(), Shard(1)), (RowwiseParallel(), Shard(0))):
    sharded = parallelize_module(copy.deepcopy(table), mesh, style)
    assert sharded.weight.placements == (where,)
    found = sharded(tokens.to("jax"))
    torch.testing.assert_close(found.detach().cpu(), expected)


@case
def a_sharded_batch_is_reduced_once_for_each_gradient():
  mesh = line()
  layer = distribute_module(nn.Linear(8, 8, bias=False), mesh)
  batch = distribute_tensor(torch.randn(16, 8), mesh, [Shard(0)])

  def loss(parameters, x):
    return torch.func.functional_call(layer, parameters, (x,)).pow(2).sum()

  arrays = jax_view((dict(layer.named_parameters()), batch))
  step = jax.jit(jax.grad(jax_view(loss)))
  text = step.lower(*arrays).compile().as_text()
  assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 1
  assert not re.findall(r" all-gather(?:-start)?\(", text)


# Refusals -----------------------------------------------------------------------------


REFUSALS = {
  "more devices than there are": (
    lambda: init_device_mesh("jax", (16,)),
    CollectiveError,
    "up to number 15, but JAX has 8",
  ),
  "a dimension that does not divide": (
    lambda: distribute_tensor(torch.ones(6), line(), [Shard(0)]),
    CollectiveError,
    r"shape \(6,\) does not divide into 8 parts along dim_0",
  ),
  "a dimension that is not there": (
    lambda: distribute_tensor(torch.ones(8), line(), [Shard(1)]),
    CollectiveError,
    r"expects a dimension 1, but got a tensor of shape \(8,\)",
  ),
  "too few placements": (
    lambda: distribute_tensor(torch.ones(8), grid(), [Shard(0)]),
    ValueError,
    "each of the 2 dimensions of the mesh, but got 1",
  ),
  "a tensor that is no leaf": (
    lambda: distribute_tensor(torch.ones(8).requires_grad_() * 2, line(), [Shard(0)]),
    RuntimeError,
    "DTensor.from_local",
  ),
  "a tensor of meta": (
    lambda: distribute_tensor(torch.ones(8, device="meta"), line(), [Shard(0)]),
    CollectiveError,
    "meta device, which has no numbers. Make it with",
  ),
  "a local tensor of another shape": (
    lambda: DTensor.from_local(
      torch.ones(2), line(), [Shard(0)], shape=torch.Size([16]), stride=(1,)
    ),
    CollectiveError,
    r"expects the whole tensor.*\(2,\) for one of \(16,\)",
  ),
  "a mesh that is unflattened": (
    lambda: init_device_mesh("jax", (8,), mesh_dim_names=("w",))._unflatten(
      0, (2, 4), ("dp", "tp")
    ),
    CollectiveError,
    "cannot be unflattened. Make it with all of them",
  ),
  "a name that is taken": (
    lambda: grid()._flatten("dp"),
    ValueError,
    "dp already exists for submesh",
  ),
  "a mesh of the CPU": (
    lambda: jax_mesh("cpu"),
    CollectiveError,
    "Expected a mesh of",
  ),
  "a collective of processes over an axis": (
    lambda: dist.all_reduce(torch.ones(2, device="jax"), group=grid().get_group("tp")),
    CollectiveError,
    "joins devices, not processes",
  ),
  "a dtype of communication": (
    lambda: distribute_tensor(torch.ones(8), line()).redistribute(
      placements=[Shard(0)], forward_dtype=torch.bfloat16
    ),
    CollectiveError,
    "takes no forward_dtype",
  ),
}
enter_refusals(REFUSALS)


if __name__ == "__main__":
  many_devices.main(CASES)
