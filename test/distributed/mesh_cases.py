"""Laws of meshes on eight devices; `test_meshes.py` runs them.

Each function of `CASES` is a law; a law with `@for_each_kind` is asserted on a mesh of
automatic axes and on one of explicit axes. Laws of shardings that results inherit are
in `following_cases.py`, and those of draws in `draw_cases.py`.
"""

import contextlib
import functools
import re
import tempfile
from collections.abc import Callable

import jax
import many_devices
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed import draw_cases, following_cases  # noqa: F401  enter their laws
from distributed.mesh_parts import (
  ALL,
  CASES,
  TENSOR_PARALLEL,
  Model,
  batch,
  case,
  for_each_kind,
  made_on,
  mesh_of,
  on_one_device,
  require_alike,
  trained,
)
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.torch import save_file
from torch import nn

import torchax
from torchax import mesh_util
from torchax.devices import placement
from torchax.dispatch import compiling
from torchax.errors import ShardingError
from torchax.interop import jax_jit
from torchax.train import mark_sharding

# Models -------------------------------------------------------------------------------


@for_each_kind
def model_initialized_sharded_equals_one_device(kind):
  first, _ = on_one_device()
  for mesh in (
    mesh_of(kind, ALL, fsdp=8),
    mesh_of(kind, TENSOR_PARALLEL, data=4, model=2),
  ):
    model = made_on(mesh)
    sharder = mesh._sharder
    if isinstance(sharder, mesh_util.ShardingRules):
      sharder = sharder.of(model)
    for name, tensor in model.state_dict().items():
      assert torch.equal(tensor.cpu(), first[name]), name
      expected = mesh.sharding(sharder(name, tensor))
      assert tensor.jax().sharding.is_equivalent_to(expected, tensor.dim()), name
    assert torch.rand(2, device="jax").tolist() == after_making()
    assert all(
      isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters()
    )


@functools.cache
def after_making() -> list:
  """Return the next draws after the model is made on one device."""
  torch.manual_seed(0)
  with torchax.default_env(), torch.device("jax"):
    Model()
  return torch.rand(2, device="jax").tolist()


@for_each_kind
def training_equals_one_device_and_state_shards_as_parameters(kind):
  _, expected = on_one_device()
  mesh = mesh_of(kind, ALL, fsdp=8)
  model = made_on(mesh)
  losses, optimizer = trained(model, *batch(mesh), compiles=False)
  np.testing.assert_allclose(losses, expected, rtol=1e-6)
  for parameter in model.parameters():
    state = optimizer.state[parameter]
    for tensor in (parameter.grad, state["exp_avg"], state["exp_avg_sq"]):
      require_alike(tensor, parameter)


@for_each_kind
def compiled_tensor_parallel_step_equals_one_device(kind):
  _, expected = on_one_device(compiles=True)
  mesh = mesh_of(kind, TENSOR_PARALLEL, data=4, model=2)
  model = made_on(mesh)
  before = {name: p.detach().clone() for name, p in model.named_parameters()}
  losses, optimizer = trained(model, *batch(mesh), compiles=True)
  np.testing.assert_allclose(losses, expected, rtol=1e-6)
  for name, parameter in model.named_parameters():
    require_alike(parameter, before[name])
    require_alike(optimizer.state[parameter]["exp_avg"], parameter)


@case
def sharded_initialization_holds_one_shard_per_device():
  largest = []

  class Watched(nn.Module):
    def __init__(self):
      super().__init__()
      self.made = nn.ModuleList()
      for _ in range(3):
        self.made.append(nn.Linear(256, 512, bias=False))
        sizes = [
          shard.data.nbytes
          for array in jax.live_arrays()
          if array.ndim == 2
          for shard in array.addressable_shards
        ]
        largest.append(max(sizes))

  mesh_of(AxisType.Auto, fsdp=8).initialize_model_sharded(Watched, ())
  assert largest == [256 * 512 * 4 // 8] * 3
  largest.clear()
  with torch.device("jax"):
    Watched()
  assert largest == [256 * 512 * 4] * 3  # without a mesh, the check sees whole tensors


@case
def sharded_factories_use_the_memory_of_one_shard():
  sizes, compiled = {}, compiling.jit_if_possible

  def watched(function, operator=None, place=None, *options):
    jitted = compiled(function, operator, place, *options)
    if place is None:
      return jitted

    def run(*operands):
      memory = jitted.lower(*operands).compile().memory_analysis()
      taken = memory.temp_size_in_bytes, memory.output_size_in_bytes
      sizes[function.__name__] = taken
      return jitted(*operands)

    return run

  class Made(nn.Module):
    def __init__(self):
      super().__init__()
      self.uniform = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(136, 248)))
      self.normal = nn.Parameter(nn.init.normal_(torch.empty(136, 248)))
      self.scaled = nn.Parameter(torch.randn(136, 248) * 0.02)

  compiling.jit_if_possible = watched
  try:
    mesh_of(AxisType.Auto, fsdp=8).initialize_model_sharded(Made, ())
  finally:
    compiling.jit_if_possible = compiled
  assert {"aten_randn_default", "aten_uniform_default"} <= set(sizes)
  part = 136 * 248 * 4 // 8
  for name, (temporary, output) in sizes.items():
    assert output == part and temporary <= part, (name, temporary, output)


@case
def meta_model_is_sharded_and_initialized_later():
  mesh = mesh_of(AxisType.Auto, fsdp=8)
  model = nn.Linear(4, 8, bias=False, device="meta")
  mesh.shard_model(model)
  require_alike(model.weight, mesh.shard(torch.zeros(8, 4), ("fsdp",)))
  assert not model.weight.any()
  expected = nn.Linear(4, 8, bias=False).to("jax")
  for each in (model, expected):
    torch.manual_seed(0)
    each.reset_parameters()
  assert torch.equal(model.weight.cpu(), expected.weight.cpu())


@case
def shard_model_changes_the_model_in_place():
  mesh = mesh_of(AxisType.Auto, ALL, fsdp=8)
  for device in ("cpu", "jax"):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to(
      device
    )
    model[2].weight = model[0].weight
    frozen = model[0].bias.requires_grad_(False)
    before = {name: t.detach().cpu().clone() for name, t in model.state_dict().items()}
    assert mesh.shard_model(model) is model
    assert model[2].weight is model[0].weight and not model[0].bias.requires_grad
    assert (model[0].bias is frozen) == (device == "jax")
    for name, tensor in model.state_dict().items():
      assert torch.equal(tensor.cpu(), before[name]), name
      assert len(tensor.jax().sharding.device_set) == 8, name
    require_alike(model[1].running_mean, model[1].weight)


@case
def sharders_are_called_with_names_and_shapes():
  asked = []

  def sharder(name, shapedtype):
    asked.append((name, tuple(shapedtype.shape)))
    return P()

  mesh = mesh_of(AxisType.Auto, data=4, model=2)
  mesh.shard_model(nn.Linear(2, 3), sharder)
  assert asked == [("weight", (3, 2)), ("bias", (3,))]
  model = nn.Sequential(nn.Linear(4, 8), nn.Linear(4, 8))
  rules = mesh_util.ShardingRules(
    [("*.weight", (None, "model")), ("0.*", ("model",)), ("0.bias", ("data",))],
    by_module={model[1]: {"weight": ("data",)}},
  )
  mesh.shard_model(model, rules)
  specs = {name: t.jax().sharding.spec for name, t in model.named_parameters()}
  assert specs["0.weight"] == P(None, "model") and specs["1.weight"] == P("data")
  assert specs["0.bias"] == P("model") and specs["1.bias"] == P()


# Explicit axes ------------------------------------------------------------------------


def _gradient(x):
  leaf = x.clone().requires_grad_()
  y = leaf * 1
  (y.view(4, 16) @ y.view(16, 4)).relu()[1:].sum().backward()
  return leaf.grad


def _assigned(x):
  y = x.clone()
  y[:, 2] = x[:, 1]
  y[3] = 7.0
  return y


def _indices(count: int) -> torch.Tensor:
  return torch.arange(count).to("jax")


# Operations whose sharding JAX leaves open, and some whose sharding it infers.
OPERATIONS: dict[str, Callable] = {
  "add": lambda x: x + 1,
  "view": lambda x: x.view(4, 16),
  "flatten": torch.flatten,
  "x[i]": lambda x: x[3],
  "x[:, i]": lambda x: x[:, 2],
  "slices": lambda x: x[2:6, 1:3],
  "tensors as indices": lambda x: x[torch.tensor([1, 2])],
  "assignment": _assigned,
  "sort": lambda x: x.sort(0).values,
  "topk": lambda x: x.topk(2, 0).values,
  "cumsum": lambda x: x.cumsum(0),
  "matmul": lambda x: x @ x.T,
  "einsum": lambda x: torch.einsum("ij,ik->jk", x, x),
  "cat": lambda x: torch.cat([x, x], 0),
  "pad": lambda x: F.pad(x, (1, 1)),
  "gather": lambda x: x.gather(0, torch.zeros(1, 8, dtype=torch.int64).to("jax")),
  "roll": lambda x: x.roll(1, 0),
  "argmax": torch.argmax,
  "softmax": lambda x: x.softmax(0),
  "layer_norm": lambda x: F.layer_norm(x, (8,)),
  "cross_entropy": lambda x: F.cross_entropy(x, _indices(8)),
  "embedding": lambda x: F.embedding(_indices(4), x),
  "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 2, 8, 4)] * 3),
  "dropout": F.dropout,
  "multinomial": lambda x: torch.multinomial(x + 1, 2),
}
EAGER_ALONE: dict[str, Callable] = {
  "item": lambda x: x[1, 2].item(),
  "tolist": lambda x: x.tolist(),
  "mask": lambda x: x[x > 5],
  "nonzero": torch.nonzero,
  "unique": torch.unique,
  "gradient": _gradient,
}


def _attention_and_gradients(query, key, value):
  leaves = [t.detach().requires_grad_() for t in (query, key, value)]
  with torchax.default_env():
    output = F.scaled_dot_product_attention(*leaves, dropout_p=0.3, is_causal=True)
  return [output.detach(), *torch.autograd.grad(output.sin().sum(), leaves)]


@for_each_kind
def blockwise_attention_equals_one_device_in_all_shardings(kind):
  mesh = mesh_of(kind, x=4, y=2)
  tensors = [torch.randn(4, 2, 16, 8, device="cpu") for _ in range(3)]
  config = torchax.default_env().config
  torch.manual_seed(3)
  expected = _attention_and_gradients(*[t.to("jax") for t in tensors])
  config.attention = "blockwise"
  try:
    for spec in (("x", "y"), (None, None, "x"), (None, None, None, "x")):
      torch.manual_seed(3)
      parts = [mesh.shard(t, spec) for t in tensors]
      found = jax_jit(_attention_and_gradients)(*parts)
      for have, want in zip(found, expected, strict=True):
        torch.testing.assert_close(
          have, want, check_device=False, atol=1e-5, rtol=1e-5, msg=str(spec)
        )
  finally:
    config.attention = "auto"


@case
def operations_on_explicit_axes_equal_one_device():
  mesh = mesh_of(AxisType.Explicit, x=4, y=2)
  numbers = torch.arange(64.0).reshape(8, 8) / 7
  for name, function in {**OPERATIONS, **EAGER_ALONE}.items():
    torch.manual_seed(3)
    expected = function(numbers.to("jax"))
    for compiles in (False, True)[: 1 + (name in OPERATIONS)]:
      torch.manual_seed(3)
      run = jax_jit(function) if compiles else function
      found = run(mesh.shard(numbers, ("x", "y")))
      try:
        torch.testing.assert_close(found, expected, check_device=False)
      except AssertionError as error:
        raise AssertionError(f"{name}, compiled: {compiles}") from error


@case
def eager_and_compiled_results_have_equal_explicit_shardings():
  mesh = mesh_of(AxisType.Explicit, x=4, y=2)
  x = mesh.shard(torch.arange(64.0).reshape(8, 8), ("x", "y"))
  for name in ("add", "view", "sort", "matmul", "x[i]", "softmax", "attention"):
    eager, compiled = OPERATIONS[name](x), jax_jit(OPERATIONS[name])(x)
    assert eager.jax().sharding.mesh == mesh.jax_mesh, name
    require_alike(compiled, eager)
  assert (x + 1).jax().sharding.spec == P("x", "y")
  types = []
  jax_jit(lambda t: types.append(jax.typeof(t.jax()).sharding.spec) or t + 1)(x)
  assert types == [P("x", "y")]


@case
def tensors_of_two_explicit_meshes_do_not_mix():
  x = mesh_of(AxisType.Explicit, x=8).shard(torch.ones(8, 8), ("x",))
  y = mesh_of(AxisType.Explicit, a=4, b=2).shard(torch.ones(8, 8), ("a",))
  with pytest.raises(ShardingError, match=r"aten\.mm.*one mesh.*shard_"):
    x @ y
  with pytest.raises(ShardingError, match="one mesh"):
    jax_jit(torch.matmul)(x, y)


@case
def jax_gradients_on_explicit_axes_work_in_set_mesh():
  mesh = mesh_of(AxisType.Explicit, x=8)
  numbers = torch.arange(16.0).reshape(8, 2)
  gradient = torchax.interop.jax_value_and_grad(lambda t: (t.view(4, 4) ** 2).sum())
  with jax.set_mesh(mesh.jax_mesh):
    value, found = gradient(mesh.shard(numbers, ("x",)))
  assert value.item() == (numbers**2).sum() and torch.equal(found.cpu(), 2 * numbers)


# Meshes and files ---------------------------------------------------------------------


@for_each_kind
def mesh_block_sets_the_mesh_of_the_environment(kind):
  mesh, env = mesh_of(kind, x=8), torchax.default_env()
  with mesh, mesh_of(kind, y=8), mesh:
    assert env.param.mesh is mesh.jax_mesh
    x = mesh.shard(torch.ones(8, 2), ("x",))
    assert (x @ x.T).sum().item() == 128
    assert len(torch.rand(3, device="jax").jax().sharding.device_set) == 1
  assert env.param.mesh is None
  with contextlib.suppress(ZeroDivisionError), mesh:
    raise ZeroDivisionError
  assert env.param.mesh is None


@for_each_kind
def bare_spec_uses_the_mesh_of_its_block(kind):
  mesh = mesh_of(kind, data=4, model=2)
  columns = jax_jit(lambda x: mark_sharding(x + 1, P(None, "model")))
  with mesh:
    found = columns(mesh.shard(torch.ones(8, 8), ("data",)))
    whole = mark_sharding(torch.ones(8, 8, device="jax"), P(None, "model"))
  require_alike(whole, found)
  require_alike(found, mesh.shard(torch.ones(8, 8), (None, "model")))


@case
def fsdp_mesh_shards_dims_that_divide():
  mesh = mesh_util.Mesh.fsdp_mesh()
  assert dict(mesh.jax_mesh.shape) == {"fsdp": 8}
  assert mesh_util.Mesh.fsdp_mesh("data").jax_mesh.axis_names == ("data",)
  model = mesh.initialize_model_sharded(nn.Linear, (8, 16), {"bias": False})
  assert model.weight.jax().sharding.spec[0] == "fsdp"
  found = model(torch.ones(2, 8, device="jax"))
  assert torch.allclose(found.cpu(), model.weight.cpu().sum(1).expand(2, 16))
  with pytest.raises(AssertionError, match=r"bias of shape \[3\] has no dimension"):
    mesh.initialize_model_sharded(nn.Linear, (8, 3))


def _resident() -> int:
  """Return the bytes of resident memory of this process, without mapped files."""
  with open("/proc/self/status") as file:
    return int(re.search(r"RssAnon:\s+(\d+) kB", file.read())[1]) * 1024


@case
def files_are_loaded_with_the_memory_of_one_shard():
  size, part = 32 * 2**20, 4 * 2**20
  state = {"weight": torch.arange(size // 4, dtype=torch.float32).reshape(1024, -1)}
  mesh = mesh_of(AxisType.Auto, x=8)
  model = nn.Linear(size // 4096, 1024, bias=False, device="meta")
  excess, from_parts = [], placement.from_shards
  with tempfile.TemporaryDirectory() as folder:
    save_file(state, f"{folder}/model.safetensors")
    rows = state["weight"][::100, :2].clone()
    state.clear()
    before = _resident()

    def watched(shape, sharding, read):
      def read_one(index):
        found = read(index)
        excess.append(_resident() - before - part * len(excess))
        assert found.nbytes == part
        return found

      return from_parts(shape, sharding, read_one)

    placement.from_shards = watched
    try:
      mesh.load_safetensors(model, f"{folder}/model.safetensors")
    finally:
      placement.from_shards = from_parts
  assert len(excess) == 8 and max(excess) < 3 * part, excess
  require_alike(model.weight, mesh.shard(torch.zeros(8, 1), ("x",)).expand(8, 1024))
  assert torch.equal(model.weight[::100, :2].cpu(), rows) and model.weight.requires_grad


@for_each_kind
def model_loaded_from_files_equals_the_saved_one(kind):
  first, _ = on_one_device()
  names = sorted(first)
  mesh = mesh_of(kind, TENSOR_PARALLEL, data=4, model=2)
  with tempfile.TemporaryDirectory() as folder:
    paths = [f"{folder}/{n}.safetensors" for n in (0, 1)]
    for path, part in zip(paths, (names[::2], names[1::2])):
      save_file({name: first[name] for name in part}, path)
    for device in ("meta", "jax"):
      with torch.device(device):
        model = Model()
      mesh.load_safetensors(model, *paths)
      for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), first[name]), name
      assert model.layer.linear1.weight.jax().sharding.spec[0] == "model"
    half = Model().to(torch.bfloat16)
    mesh.load_safetensors(half, *paths)
    assert torch.equal(half.out.weight.cpu(), first["out.weight"].bfloat16())
    before = model.out.weight
    with pytest.raises(KeyError, match="lack .* tensors of the model"):
      mesh.load_safetensors(model, paths[0])
    with pytest.raises(ValueError, match="is in two files"):
      mesh.load_safetensors(model, paths[0], *paths)
    save_file({**first, "out.weight": torch.ones(3, 3)}, paths[0])
    with pytest.raises(ShardingError, match=r"out\.weight .* has the shape \[3, 3\]"):
      mesh.load_safetensors(model, paths[0])
    assert model.out.weight is before


@case
def invalid_specs_are_refused_without_changes():
  mesh = mesh_of(AxisType.Auto, data=4, model=2)
  rows = {
    r"dimension 0 of 6 is no multiple of 4.*pad it": ((6, 8), ("data",)),
    r"dimension 1 of 4 is no multiple of 8": ((8, 4), (None, ("data", "model"))),
    r"no axis 'rows': its axes are \{'data': 4, 'model': 2\}": ((8, 8), ("rows",)),
    r"has 1 dimensions.*has 2 parts": ((8,), ("data", None)),
  }
  for message, (shape, spec) in rows.items():
    for tensor in (torch.ones(shape), torch.ones(shape, device="jax")):
      with pytest.raises(ShardingError, match=message):
        mesh.shard(tensor, spec)
    if "rows" not in message:  # JAX refuses to construct such a sharding
      with pytest.raises(ShardingError, match=message):
        tensor.shard_(NamedSharding(mesh.jax_mesh, P(*spec)))
    model = nn.Module()
    model.first = nn.Parameter(torch.ones(8, 8, device="jax"))
    model.second = nn.Parameter(torch.ones(shape))
    first, second = model.first.jax(), model.second
    rules = mesh_util.ShardingRules([("second", spec)], otherwise=P("data"))
    with pytest.raises(ShardingError, match=f"second .*{message}"):
      mesh.shard_model(model, rules)
    assert model.first.jax() is first and model.second is second
  with pytest.raises(ShardingError, match="'data' twice"):
    mesh.shard(torch.ones(8, 8), ("data", "data"))
  for use in (
    lambda: mesh.shard_model(nn.Linear(2, 2)),
    lambda: mesh.initialize_model_sharded(nn.Linear, (2, 2)),
  ):
    state = torch.jax.get_rng_state()
    with pytest.raises(ValueError, match="has no sharder.*override_sharder"):
      use()
    assert torch.equal(torch.jax.get_rng_state(), state)


@case
def jax_meshes_are_accepted_as_they_are():
  plain = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
  assert mesh_util.Mesh(plain)._sharder is None
  one = mesh_util.Mesh(jax.make_mesh((8,), ("x",)))
  assert (one._sharder.axis_name, one._sharder.axis_size) == ("x", 8)


if __name__ == "__main__":
  many_devices.main(CASES)
