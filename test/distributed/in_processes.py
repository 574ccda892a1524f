"""Laws of a world of eight devices, for any number of processes.

usage: in_processes.py FOLDER    in processes that torchrun has started

Each process writes FOLDER/<rank>.json: "" or a traceback for each of `CASES`. FOLDER
has the checkpoint "of one": the state of `state_on`, saved by one process.
"""

import copy
import io
import json
import pathlib
import pickle
import sys
from collections.abc import Callable

import jax
import many_devices
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torchax
from torchax import mesh_util, processes
from torchax.distributed.processes import agreement
from torchax.errors import NotAddressableError, ProcessError
from torchax.interop import jax_jit
from torchax.mesh_util import ShardingRules
from torchax.tensor import new_tensor
from torchax.train import mark_sharding

CASES: dict[str, Callable] = {}
FOLDER = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".")


def case(function: Callable) -> Callable:
  """Register a law."""
  CASES[function.__name__] = function
  return function


def over(*axes, spec=("data",)) -> NamedSharding:
  """Return a sharding over all devices; `axes` are the sizes of "data" and "model"."""
  mesh = Mesh(np.array(jax.devices()).reshape(axes or (8, 1)), ("data", "model"))
  return NamedSharding(mesh, PartitionSpec(*spec))


def spread(values: np.ndarray, sharding: NamedSharding) -> torch.Tensor:
  """Return a global tensor of values that each process has."""
  array = jax.make_array_from_callback(values.shape, sharding, lambda i: values[i])
  return new_tensor(array, torchax.default_env())


def split() -> torch.Tensor:
  return spread(np.arange(8.0, dtype=np.float32), over())


def whole() -> torch.Tensor:
  return spread(np.arange(8.0, dtype=np.float32), over(spec=()))


@case
def the_devices_of_all_processes_are_one_world():
  assert jax.process_count() in (2, 4)
  assert len(jax.devices()) == 8
  assert len(jax.local_devices()) == 8 // jax.process_count()
  assert torch.jax.device_count() == len(jax.local_devices())


@case
def print_shows_addressable_shards():
  text, own = repr(split()), 8 // jax.process_count()
  first = own * jax.process_index()
  count = jax.process_count()
  assert (
    f"process {jax.process_index()} of {count} holds [{first}:{first + own}]" in text
  )
  numbers = ", ".join(f"{n}." for n in range(first, first + own))
  assert f"tensor([{numbers}])" in text
  assert text.startswith("tensor(size=(8,), ") and "'data': 8" in text


@case
def print_shows_replicated_tensors_whole():
  text = "tensor([0., 1., 2., 3., 4., 5., 6., 7.], device='jax:0', sharding"
  assert repr(whole()).startswith(text)
  assert repr(split().sum()).startswith("tensor(28., device='jax:0'")


@case
def print_shows_bfloat16_and_blocks():
  values = np.arange(64.0).reshape(8, 8).astype(jax.numpy.bfloat16)
  text = repr(spread(values, over(4, 2, spec=("data", "model"))))
  assert "dtype=torch.bfloat16" in text and "0:8]:" in text


@case
def shards_that_form_no_block_print_without_numbers():
  mesh = Mesh(np.array(jax.devices()).reshape(2, 4).T.reshape(8), ("data",))
  sharding = NamedSharding(mesh, PartitionSpec("data"))
  text = repr(spread(np.arange(8.0, dtype=np.float32), sharding))
  assert "holds several blocks, device=" in text


ASK_FOR_NUMBERS = {
  "numpy": lambda t: t.numpy(),
  "asarray": np.asarray,
  "cpu": lambda t: t.cpu(),
  "tolist": lambda t: t.tolist(),
  "pickle": pickle.dumps,
  "save": lambda t: torch.save(t, io.BytesIO()),
  "bfloat16": lambda t: t.bfloat16().cpu(),
}


@case
def reading_shards_of_other_processes_names_the_remedy():
  for ask in ASK_FOR_NUMBERS.values():
    with pytest.raises(NotAddressableError, match=r"shape \[8\].*processes\.gather"):
      ask(split())


@case
def replicated_tensors_are_read_by_each_process():
  assert split().sum().item() == 28.0 and split()[3].item() == 3.0
  assert whole().tolist() == list(range(8)) and float(split().mean()) == 3.5
  assert torch.equal(whole().cpu(), torch.arange(8.0))


@case
def gather_replicates_and_keeps_its_input():
  kept, local = whole(), torch.ones(2, device="jax")
  found = processes.gather({"a": split(), "b": kept, "c": local, "d": 3})
  assert found["a"].tolist() == list(range(8))
  assert found["b"] is kept and found["c"] is local and found["d"] == 3


@case
def batches_equal_those_of_one_process_row_by_row():
  data = torch.arange(40.0).reshape(20, 2)
  for axes in ((8, 1), (4, 2), (2, 4)):
    sharding = over(*axes)
    mine = processes.Batches(20, 8, sharding, seed=5, epochs=2)
    everybody = processes.Batches(20, 8, seed=5, epochs=2)
    loader = torch.utils.data.DataLoader(data, batch_sampler=mine)
    assert len(loader) == 4
    for local, rows in zip(loader, everybody, strict=True):
      batch = processes.global_batch(local, sharding)
      assert batch.shape == (8, 2)
      assert torch.equal(processes.gather(batch).cpu(), data[rows])


@case
def rows_that_devices_share_are_read_by_each_process():
  assert processes.rows_here(over(1, 8), 8) == list(range(8))
  own = 8 // jax.process_count()
  first = own * jax.process_index()
  assert processes.rows_here(over(8, 1), 8) == list(range(first, first + own))


@case
def a_batch_without_rows_is_refused():
  with pytest.raises(ProcessError, match="the same number in all"):
    processes.global_batch([torch.ones(4), torch.ones(2)], over())


@case
def one_seed_is_one_stream_in_all_processes():
  torch.manual_seed(3)
  local = torch.rand(4, device="jax")
  processes.require_equal("what was drawn", local.tolist())
  assert local.tolist() == pytest.approx(FIRST, abs=0)
  drop = jax_jit(lambda x: F.dropout(torch.ones_like(x), 0.5))
  torch.manual_seed(3)
  masks = processes.gather(drop(split())).tolist()
  assert masks == FIRST_MASK


# Draws of a single process; `main` fills them in before it connects the processes.
FIRST: list[float] = []
FIRST_MASK: list[float] = []


@case
def connecting_twice_is_refused():
  with pytest.raises(RuntimeError, match=r"connected: this one is \d of \d"):
    processes.initialize()


@case
def different_values_are_reported_in_every_process():
  with pytest.raises(ProcessError) as caught:
    processes.require_equal(
      "the seed", jax.process_index() // (jax.process_count() - 1)
    )
  last = jax.process_count() - 1
  text = str(caught.value)
  assert f"process {last}: the seed: '1'" in text and "the seed: '0'" in text


@case
def different_programs_are_reported_in_every_process():
  by_rank = (lambda x: x.sum(), lambda x: x.mean())[jax.process_index() == 0]
  with pytest.raises(ProcessError, match="the program of `<lambda>`: .* operations"):
    processes.require_same_program(jax_jit(by_rank), split())
  processes.require_same_program(jax_jit(lambda x: F.dropout(x)), split())


@case
def mismatched_barriers_are_reported_in_every_process():
  with pytest.raises(ProcessError, match="process 0: the barrier first: reached"):
    processes.barrier("second" if jax.process_index() else "first")


@case
def process_missing_at_a_barrier_is_named():
  if jax.process_index() == 0:
    with pytest.raises(ProcessError, match=r"1.* did not come to the barrier of one"):
      processes.barrier("of one", timeout=1)
  else:
    # The process skips its round, and the barrier tells it so.
    next(agreement._rounds)
  processes.barrier("of all")


# Meshes -------------------------------------------------------------------------------

RULES = ShardingRules(
  [("*.weight", ("model", "data")), ("*.bias", ("model",))],
  by_module={nn.Embedding: {"weight": ("data", "model")}},
)


def made() -> nn.Module:
  return nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16), nn.Dropout(0.2))


def losses_of(model: nn.Module, tokens: torch.Tensor) -> list[float]:
  """Train two steps, which change the model; return the losses."""
  optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

  def step(tokens):
    optimizer.zero_grad()
    loss = model(tokens).square().mean()
    loss.backward()
    optimizer.step()
    return loss

  torch.manual_seed(1)
  with torchax.default_env():
    return [step(tokens).item(), jax_jit(step)(tokens).item()]


@case
def sharded_model_trains_as_on_one_device():
  mesh = mesh_util.Mesh(over(4, 2).mesh, RULES)
  tokens = torch.arange(32).reshape(8, 4) % 8
  torch.manual_seed(0)
  with torchax.default_env(), torch.device("jax"):
    alone = made()
  first = {name: t.cpu().clone() for name, t in alone.state_dict().items()}
  torch.manual_seed(0)
  model = mesh.initialize_model_sharded(made, ())
  specs = {name: p.jax().sharding.spec for name, p in model.named_parameters()}
  assert specs["0.weight"] == PartitionSpec("data", "model")
  assert specs["1.weight"] == PartitionSpec("model", "data")
  assert specs["1.bias"] == PartitionSpec("model")
  for name, tensor in processes.gather(model.state_dict()).items():
    assert torch.equal(tensor.cpu(), first[name]), name
  expected = losses_of(alone, tokens.to("jax"))
  found = losses_of(model, mesh.shard(tokens, ("data",)))
  assert found == pytest.approx(expected, rel=4e-6)
  for name, parameter in model.named_parameters():
    assert parameter.jax().sharding.spec == specs[name], name


@case
def model_is_sharded_and_loaded_from_files():
  mesh = mesh_util.Mesh(over(4, 2).mesh, RULES)
  torch.manual_seed(0)
  plain = made()
  path = FOLDER / f"{jax.process_index()}.safetensors"
  save_file(plain.state_dict(), path)
  laid_out = mesh.shard_model(copy.deepcopy(plain))
  with torch.device("meta"):
    empty = made()
  loaded = mesh.load_safetensors(empty, path)
  for model in (laid_out, loaded):
    for name, tensor in model.state_dict().items():
      assert not tensor.jax().is_fully_addressable, name
      assert torch.equal(processes.gather(tensor).cpu(), plain.state_dict()[name]), name


@case
def bare_spec_uses_the_mesh_of_the_block():
  mesh = mesh_util.Mesh(over(4, 2).mesh)
  with mesh:
    compiled = jax_jit(lambda x: mark_sharding(x * 2, PartitionSpec("model")))
    found = compiled(split())
    eager = mark_sharding(split() * 2, PartitionSpec("model"))
  for tensor in (found, eager):
    assert tensor.jax().sharding.spec == PartitionSpec("model")
    assert processes.gather(tensor).tolist() == [2.0 * n for n in range(8)]
  assert torchax.default_env().param.mesh is None


@case
def factories_of_global_tensors_return_global_tensors():
  for name in ("new_zeros", "new_ones", "new_empty"):
    made = getattr(split(), name)(3)
    assert made.jax().sharding == over(spec=()), name
    assert (made * 0 + split().sum()).tolist() == [28.0] * 3
  like = torch.full_like(split(), 2.0)
  assert like.jax().sharding == over() and (like * split()).sum().item() == 56.0


@case
def tensors_on_torch_meshes_span_all_processes():
  mesh = dist.init_device_mesh("jax", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
  flat = mesh["dp", "cp"]._flatten("dp_cp")
  numbers = torch.arange(16.0).reshape(8, 2)
  # `distribute_tensor` takes the values of the first process.
  mine = numbers + 100 * jax.process_index()
  x = distribute_tensor(mine, flat, [Shard(0)])
  assert isinstance(x, DTensor) and x.placements == (Shard(0),)
  assert torch.equal(x.full_tensor().cpu(), numbers)
  first = jax.devices().index(jax.local_devices()[0])
  assert flat.get_local_rank() == first // 2 and mesh.get_local_rank("tp") == 0
  assert mesh.get_coordinate() == (first // 4, first // 2 % 2, 0)
  torch.manual_seed(0)
  layer = nn.Linear(2, 8)
  expected = layer(numbers).square().sum()
  expected.backward()
  norm = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
  torch.manual_seed(0)
  sharded = fully_shard(nn.Linear(2, 8), mesh=flat)
  loss = sharded(x).square().sum()
  loss.backward()
  assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
  found = nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
  assert found.full_tensor().item() == pytest.approx(norm.item(), rel=1e-5)
  for mine, other in zip(sharded.parameters(), layer.parameters(), strict=True):
    assert mine.grad.placements == mine.placements
    torch.testing.assert_close(mine.grad.full_tensor().cpu(), other.grad)


# Checkpoints -------------------------------------------------------------------------


def state_on(sharding_of: Callable) -> dict:
  """Return a state whose tensors have the shardings `sharding_of(spec)`."""
  numbers = np.arange(128.0, dtype=np.float32).reshape(16, 8)
  draws = torchax.rng.RngState.from_seed(7)
  return {
    "model": {
      "rows": spread(numbers, sharding_of(("data",))),
      "blocks": spread(numbers + 1, sharding_of(("model", "data"))),
      "whole": spread(numbers[0].astype(jax.numpy.bfloat16), sharding_of(())),
    },
    "step": 3,
    "local": torch.arange(3.0).to("jax"),
    "cpu": torch.arange(3),
    "rng": draws,
    "key": draws.key,
  }


def require_state(found: dict, is_spread: bool = True) -> None:
  """Raise unless the state equals that of `state_on`, bit for bit."""
  expected = np.arange(128.0, dtype=np.float32).reshape(16, 8)
  model = {name: processes.gather(t) for name, t in found["model"].items()}
  assert (model["rows"].numpy() == expected).all()
  assert (model["blocks"].numpy() == expected + 1).all()
  assert model["whole"].dtype == torch.bfloat16
  assert model["whole"].tolist() == expected[0].tolist()
  assert found["step"] == 3 and found["local"].tolist() == [0, 1, 2]
  assert found["local"].device.type == "jax" and found["cpu"].device.type == "cpu"
  assert found["cpu"].tolist() == [0, 1, 2]
  assert found["rng"] == torchax.rng.RngState.from_seed(7)
  # Local and global tensors can be added.
  found["local"] + found["model"]["rows"][0, :3]
  if is_spread:
    specs = [tuple(t.jax().sharding.spec) for t in found["model"].values()]
    assert specs == [("data",), ("model", "data"), ()]
    assert len(found["model"]["rows"].jax().sharding.device_set) == 8


@case
def state_saved_by_one_process_is_loaded_by_several():
  require_state(torchax.load_checkpoint(FOLDER / "of one"))


@case
def state_of_several_processes_is_saved():
  state = state_on(lambda spec: over(4, 2, spec=spec))
  torchax.save_checkpoint(state, FOLDER / "of several", 0)
  require_state(torchax.load_checkpoint(FOLDER / "of several"))
  with pytest.raises(FileExistsError):
    torchax.save_checkpoint(state, FOLDER / "of several", 0)


@case
def loaded_state_takes_the_shardings_of_its_target():
  like = {"model": {"rows": spread(np.zeros((16, 8), np.float32), over(2, 4))}}
  found = torchax.load_checkpoint(FOLDER / "of one", like)
  assert found["model"]["rows"].jax().sharding == over(2, 4)
  require_state(found, is_spread=False)


@case
def checkpoint_of_other_shapes_is_reported_in_every_process():
  for wrong, said in (
    ({"model": {"rows": torch.zeros(8, 8)}}, r"\['rows'\] has shape \[16, 8\]"),
    ({"model": {"columns": torch.zeros(8)}}, r"has no 'columns'"),
    ({"step": [1], "local": "text"}, r"state\['local'\] has an array of shape \[3\]"),
  ):
    with pytest.raises(ValueError, match=said):
      torchax.load_checkpoint(FOLDER / "of one", wrong)


@case
def background_save_ignores_later_changes():
  state = state_on(lambda spec: over(4, 2, spec=spec))
  torchax.save_checkpoint(state, FOLDER / "background", 0, background=True)
  rows = state["model"]["rows"]
  jax_jit(lambda t: t.mul_(0), donate_argnums=0)(rows)
  state["cpu"].zero_()
  state["local"].zero_()
  require_state(torchax.load_checkpoint(FOLDER / "background"))
  torchax.save_checkpoint({"step": 1}, FOLDER / "background", 1, background=True)
  torchax.checkpoint.finish_saving()
  assert torchax.load_checkpoint(FOLDER / "background") == {"step": 1}


@case
def different_states_are_reported_in_every_process():
  rank = jax.process_index()
  for state, said in (
    ({"rng": torchax.rng.RngState.from_seed(rank)}, r"state\['rng'\] \w+"),
    ({"a": 1, "step": rank}, r"state\['step'\] \w+"),
  ):
    with pytest.raises(ProcessError, match=said):
      torchax.save_checkpoint(state, FOLDER / "of several", 1)
    assert not (FOLDER / "of several" / "1").exists()


@case
def missing_checkpoint_is_named():
  with pytest.raises(FileNotFoundError, match="no such path"):
    torchax.load_checkpoint(FOLDER / "nothing")


def main() -> None:
  """Run the laws in the same order in all processes."""
  processes.initialize()
  rng = torchax.rng.RngState.from_seed(3)
  with torchax.rng_scope(rng):
    FIRST.extend(torch.rand(4, device="jax").tolist())
  with torchax.rng_scope(rng):
    ones = torch.ones(8, device="jax")
    FIRST_MASK.extend(jax_jit(lambda x: F.dropout(x, 0.5))(ones).tolist())
  found = {}
  for name, law in CASES.items():
    found[name] = many_devices.failure(law)
    sys.stdout.write(f"{name}: {'ok' if not found[name] else found[name]}\n")
    sys.stdout.flush()
  (FOLDER / f"{jax.process_index()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
  main()
