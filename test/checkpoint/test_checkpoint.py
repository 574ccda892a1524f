"""Checkpoints restore the saved state, bit for bit, also in another process."""

import collections
import json
import math
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import torchax
from torchax.checkpoint.structure import to_jax, to_torch
from torchax.errors import TracedStateError, UnsupportedDtypeError

pytest.importorskip("orbax.checkpoint", reason="the checkpoint extra is not installed")


class Point(NamedTuple):
  x: object
  y: object


def _round_trip(value, directory):
  torchax.save_checkpoint({"value": value}, directory / "run", 0)
  return torchax.load_checkpoint(directory / "run")["value"]


def _bits(value) -> tuple:
  """Return type, dtype, shape and bytes of a value with numbers."""
  if isinstance(value, torch.Tensor):
    kind = (type(value).__name__, value.device.type, str(value.dtype))
    array = np.asarray(to_jax(value))
  else:
    kind, array = (type(value).__name__,), np.asarray(value)
  return (*kind, str(array.dtype), array.shape, array.tobytes())


def _flat(state) -> list:
  leaves = torch.utils._pytree.tree_leaves(state)
  return [_bits(v) if isinstance(v, torch.Tensor) else v for v in leaves]


def _model():
  return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).to("jax")


SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 1 / 3]


@pytest.mark.parametrize(
  "array",
  [
    np.array(SPECIAL, np.float32),
    np.array(SPECIAL, np.float64),
    np.array(SPECIAL, np.float16),
    np.array(SPECIAL, ml_dtypes.bfloat16),
    np.array([1, -2, 0.5], ml_dtypes.float8_e4m3fn),
    np.array([1 + 2j, -0.0 - 1j], np.complex64),
    np.array([1 / 3 + 2j], np.complex128),
    np.array([True, False]),
    np.array([-(2**63), 2**63 - 1], np.int64),
    np.array([2**64 - 1], np.uint64),
    np.array([[-128, 127]], np.int8),
    np.array(7, np.int16),
    np.zeros((0, 3), np.float32),
  ],
  ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_numbers_of_every_dtype_come_back_bit_for_bit(array, tmp_path):
  on_cpu = to_torch(array)
  assert on_cpu.device.type == "cpu"
  values = {"numpy": array, "CPU": on_cpu}
  if jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype:
    values["jax"] = jnp.asarray(array)
    values["tensor"] = on_cpu.to("jax")
  found = _round_trip(values, tmp_path)
  for kind, value in values.items():
    assert _bits(found[kind]) == _bits(value)


@pytest.mark.parametrize(
  "value",
  [
    None,
    True,
    1,
    -(2**80),
    0.1,
    math.inf,
    "jax ✓ \n",
    b"\x00\xff",
    1 - 2j,
    torch.bfloat16,
    torch.Size([2, 3]),
    np.float64(1 / 3),
    np.int64(2**62),
    {},
    [],
    (),
    [1, (2, [None, "a"]), {"b": ()}],
    {0: "integer", "0": "string", (1, "a"): "tuple", None: "none", 2.5: "float"},
    collections.OrderedDict(b=1, a=2),
    Point([1], Point(2, None)),
  ],
  ids=repr,
)
def test_plain_values_keep_value_and_type(value, tmp_path):
  found = _round_trip(value, tmp_path)
  assert found == value and type(found) is type(value)
  assert repr(found) == repr(value), "types and order within it"


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_and_random_states_come_back_exactly(impl, tmp_path):
  state = torchax.RngState.from_seed(2**40 + 3, impl).advance(12)
  keys = jax.random.split(state.key, 6).reshape(2, 3)
  with jax.legacy_prng_key("error"):
    found = _round_trip({"state": state, "key": state.key, "keys": keys}, tmp_path)
  assert found["state"].state_dict() == state.state_dict()
  assert isinstance(found["state"].count, int)
  for name, key in (("key", state.key), ("keys", keys)):
    assert found[name].dtype == key.dtype and found[name].shape == key.shape
    assert jnp.array_equal(jax.random.key_data(found[name]), jax.random.key_data(key))


def test_states_of_generators_and_of_torch_itself_come_back(tmp_path):
  generator = torch.Generator().manual_seed(4)
  torch.manual_seed(9)
  torch.rand(3, device="jax")
  saved = {
    "generator": generator.get_state(),
    "cpu": torch.get_rng_state(),
    "jax": torch.jax.get_rng_state(),
  }

  def draw():
    return (
      torch.rand(2, generator=generator),
      torch.rand(2),
      torch.rand(2, device="jax"),
    )

  expected = draw()
  found = _round_trip(saved, tmp_path)
  generator.set_state(found["generator"])
  torch.set_rng_state(found["cpu"])
  torch.jax.set_rng_state(found["jax"])
  assert all(torch.equal(a, b) for a, b in zip(draw(), expected))


def test_state_dicts_load_into_a_model_and_its_optimizer(tmp_path):
  def build():
    model = _model()
    return model, torch.optim.AdamW(model.parameters(), amsgrad=True)

  model, optimizer = build()
  model(torch.rand(5, 2, device="jax")).square().sum().backward()
  optimizer.step()
  saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
  found = _round_trip(saved, tmp_path)
  assert found["model"]._metadata == saved["model"]._metadata
  other, its_optimizer = build()
  other.load_state_dict(found["model"])
  its_optimizer.load_state_dict(found["optimizer"])
  assert _flat(other.state_dict()) == _flat(saved["model"])
  assert _flat(its_optimizer.state_dict()) == _flat(saved["optimizer"])


def test_an_optax_state_keeps_its_classes(tmp_path):
  optax = pytest.importorskip("optax", reason="the optax extra is not installed")
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
  state = optimizer.init({"w": jnp.arange(3.0)})
  found = _round_trip(state, tmp_path)
  assert jax.tree.structure(found) == jax.tree.structure(state)
  assert all(map(jnp.array_equal, jax.tree.leaves(found), jax.tree.leaves(state)))


def test_named_tuple_of_missing_class_keeps_name_and_fields(tmp_path):
  gone = collections.namedtuple("Gone", ["a", "b"])
  found = _round_trip(gone(1, [2]), tmp_path)
  assert type(found).__name__ == "Gone" and (found.a, found.b) == (1, [2])


def test_tied_tensors_are_saved_once_and_come_back_apart(tmp_path):
  weight = torch.arange(4.0).to("jax")
  found = _round_trip({"encoder": weight, "decoder": weight}, tmp_path)
  names = json.loads((tmp_path / "run/0/structure/metadata").read_text())
  assert json.dumps(names).count('"name": "value/encoder"') == 2
  found["encoder"].add_(1)
  assert torch.equal(found["decoder"], weight)


def test_loaded_arrays_are_writable(tmp_path):
  found = _round_trip([np.zeros(2), torch.zeros(2), torch.zeros(2).to("jax")], tmp_path)
  for value in found:
    value += 1
    assert value.sum() == 2


def test_trees_of_tensors_and_of_arrays_convert_into_each_other():
  tree = {"a": [torch.ones(2).to("jax"), torch.ones(2, dtype=torch.float64)], "b": 3}
  arrays = to_jax(tree)
  assert isinstance(arrays["a"][0], jax.Array) and arrays["a"][1].dtype == np.float64
  assert _flat(to_torch(arrays)) == _flat(tree)


# Steps and folders -------------------------------------------------------------------


def test_load_reads_latest_step_or_the_step_of_the_directory(tmp_path):
  for step in (9, 100, 20):
    torchax.save_checkpoint({"step": step}, tmp_path / "run", step)
  assert torchax.load_checkpoint(tmp_path / "run") == {"step": 100}
  assert torchax.load_checkpoint(str(tmp_path / "run" / "9")) == {"step": 9}


def test_a_step_is_never_overwritten(tmp_path):
  torchax.save_checkpoint({"a": 1}, tmp_path, 3)
  with pytest.raises(FileExistsError, match="never overwritten"):
    torchax.save_checkpoint({"a": 2}, tmp_path, 3)
  assert torchax.load_checkpoint(tmp_path) == {"a": 1}


_DIES = """
import os, sys, torch, torchax, orbax.checkpoint as ocp

save = ocp.StandardCheckpointHandler.async_save

async def dies(self, *args, **kwargs):
  await save(self, *args, **kwargs)
  os._exit(7)  # in the middle: some files are there, others are not

torchax.save_checkpoint({"w": torch.zeros(3)}, sys.argv[1], 1)
ocp.StandardCheckpointHandler.async_save = dies
torchax.save_checkpoint({"w": torch.ones(3)}, sys.argv[1], 2)
"""


def test_a_save_that_dies_midway_leaves_the_step_before(tmp_path):
  done = subprocess.run([sys.executable, "-c", _DIES, str(tmp_path)], check=False)
  assert done.returncode == 7
  assert len(list(tmp_path.iterdir())) == 2, "the unfinished step is there"
  assert torch.equal(torchax.load_checkpoint(tmp_path)["w"], torch.zeros(3))
  torchax.save_checkpoint({"w": torch.full((3,), 2.0)}, tmp_path, 2)
  assert torchax.load_checkpoint(tmp_path)["w"].sum() == 6


def test_a_relative_path_is_good(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  torchax.save_checkpoint({"a": 1}, "run", 0)
  assert torchax.load_checkpoint("run/0") == {"a": 1}
  assert pathlib.Path("run/0").is_dir()


# Mistakes ----------------------------------------------------------------------------


def test_a_missing_checkpoint_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="no such path"):
    torchax.load_checkpoint(tmp_path / "nowhere")
  with pytest.raises(FileNotFoundError, match="holds none"):
    torchax.load_checkpoint(tmp_path)


# torch's readers raise the errors of their parsers.
@pytest.mark.parametrize(
  "content, error",
  [
    (b"", EOFError),
    (b"a text", (pickle.UnpicklingError, IndexError)),
    (pickle.dumps([1]), pickle.UnpicklingError),
  ],
)
def test_a_file_that_torch_has_not_written_is_refused(tmp_path, content, error):
  path = tmp_path / "state.pt"
  path.write_bytes(content)
  with pytest.raises(error):
    torchax.load_checkpoint(path)


def _largest(directory: pathlib.Path) -> pathlib.Path:
  files = [path for path in directory.rglob("*") if path.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def _structure(step: pathlib.Path) -> pathlib.Path:
  return step / "structure" / "metadata"


def _cut(path: pathlib.Path) -> None:
  os.truncate(path, path.stat().st_size // 2)


DAMAGES = {
  "structure cut off": lambda step: _cut(_structure(step)),
  "array cut off": lambda step: _cut(_largest(step / "arrays")),
  "names of arrays cut off": lambda step: _cut(step / "arrays" / "_METADATA"),
  "arrays missing": lambda step: shutil.rmtree(step / "arrays"),
  "unknown value": lambda step: _edit(step, "jax tensor", "mystery"),
}


def _edit(step: pathlib.Path, old: str, new: str) -> None:
  path = _structure(step)
  text = path.read_text()
  assert old in text
  path.write_text(text.replace(old, new))


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_named(damage, tmp_path):
  value = torch.randn(100, 100).to("jax")
  for step in (1, 2):
    torchax.save_checkpoint({"value": value}, tmp_path / "run", step)
  damage(tmp_path / "run" / "2")
  with pytest.raises(ValueError, match=r"run/2 is damaged.*earlier step"):
    torchax.load_checkpoint(tmp_path / "run")
  earlier = torchax.load_checkpoint(tmp_path / "run" / "1")
  assert torch.equal(earlier["value"], value)


def test_checkpoint_of_a_newer_version_raises_with_advice(tmp_path):
  torchax.save_checkpoint({"value": 1}, tmp_path, 3)
  path = _structure(tmp_path / "3")
  path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
  with pytest.raises(ValueError, match="newer torchax, in format 99.*Update torchax"):
    torchax.load_checkpoint(tmp_path)


def test_a_checkpoint_of_another_program_is_refused(tmp_path):
  import orbax.checkpoint as ocp

  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "5", {"a": np.ones(2)})
  with pytest.raises(ValueError, match="not written by"):
    torchax.load_checkpoint(tmp_path)


@pytest.mark.parametrize(
  "make, where",
  [
    (lambda: torch.nn.Linear(1, 1), r"state\['a'\]\[1\].*Linear.*state_dict"),
    (torch.Generator, r"Generator.*get_state"),
    (lambda: torchax.default_env().rng, r"RngStream.*\.state"),
    (object, "builtins.object"),
    (lambda: lambda: 0, "function"),
    (lambda: {1, 2}, "set"),
    (lambda: np.array(["text"]), "dtype <U4"),
    (lambda: np.array([object()]), "dtype object"),
    (lambda: torch.zeros(2).to_sparse(), "sparse"),
  ],
)
def test_unsupported_value_raises_with_its_path(make, where, tmp_path):
  with pytest.raises(TypeError, match=where):
    torchax.save_checkpoint({"a": [0, make()]}, tmp_path / "run", 0)
  assert not (tmp_path / "run").exists(), "nothing is written"


def test_a_state_is_a_dict_and_a_step_a_number(tmp_path):
  with pytest.raises(TypeError, match="dict"):
    torchax.save_checkpoint([1], tmp_path, 0)
  for step in (-1, True):
    with pytest.raises(ValueError, match="step"):
      torchax.save_checkpoint({}, tmp_path, step)
  with pytest.raises(TypeError):
    torchax.save_checkpoint({}, tmp_path, 1.5)


def test_a_traced_tensor_cannot_be_saved(tmp_path):
  def save(x):
    torchax.save_checkpoint({"x": x}, tmp_path / "run", 0)
    return x

  with pytest.raises(TracedStateError, match=r"state\['x'\]"):
    torchax.interop.jax_jit(save)(torch.ones(2).to("jax"))


def test_a_missing_orbax_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
  with pytest.raises(ImportError, match='pip install "orbax-checkpoint>='):
    torchax.save_checkpoint({}, tmp_path, 0)


# Other processes ---------------------------------------------------------------------


def _run(program: str, *arguments, **environment) -> str:
  done = subprocess.run(
    [sys.executable, "-c", program, *map(str, arguments)],
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_importing_torchax_imports_neither_orbax_nor_flax():
  program = (
    "import sys, torchax; print([m for m in ('orbax', 'flax') if m in sys.modules])"
  )
  assert _run(program) == "[]\n"


_TRAIN = """
import sys
import torch, torchax

path, first = sys.argv[1], int(sys.argv[2])
env = torchax.default_env()
torch.manual_seed(11)
model = torch.nn.Sequential(
  torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)).to("jax")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
if first:
  saved = torchax.load_checkpoint(path)
  model.load_state_dict(saved["model"])
  optimizer.load_state_dict(saved["optimizer"])
  torch.jax.set_rng_state(saved["rng"].to_tensor())
for step in range(first, 4):
  if step == 2 and not first:
    torchax.save_checkpoint({
      "model": model.state_dict(),
      "optimizer": optimizer.state_dict(),
      "rng": env.rng.state,
    }, path, step)
  optimizer.zero_grad()
  x = torch.randn(16, 4, device="jax")
  loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
  loss.backward()
  optimizer.step()
  print(step, loss.detach().numpy().tobytes().hex())
leaves = torch.utils._pytree.tree_leaves([model.state_dict(), optimizer.state_dict()])
for leaf in leaves:
  print(leaf.numpy().tobytes().hex() if isinstance(leaf, torch.Tensor) else leaf)
print(env.rng.state)
"""


@pytest.mark.usefixtures("strict_mode")  # compares bits
def test_training_goes_on_in_a_new_process_as_if_uninterrupted(tmp_path):
  uninterrupted = _run(_TRAIN, tmp_path, 0).splitlines()
  resumed = _run(_TRAIN, tmp_path, 2).splitlines()
  assert resumed == uninterrupted[2:]
  assert resumed[0].startswith("2 ") and "count=" in resumed[-1]


_DEVICES = "--xla_force_host_platform_device_count={}"
_SHARDED = """
import sys
import jax, numpy as np, torch, torchax
from jax.sharding import NamedSharding, PartitionSpec

if sys.argv[2] == "save":
  mesh = jax.make_mesh((4,), ("data",))
  tensor = torch.arange(8.0).to("jax")
  tensor.shard_(NamedSharding(mesh, PartitionSpec("data")))
  state = {"w": tensor, "host": np.arange(3.0), "key": jax.random.key(5)}
  torchax.save_checkpoint(state, sys.argv[1], 0)
found = torchax.load_checkpoint(sys.argv[1])
assert found["w"].tolist() == list(range(8)) and found["host"].dtype == np.float64
assert jax.random.key_data(found["key"]).tolist() == [0, 5]
print(len(found["w"].jax().sharding.device_set))
"""


def test_sharded_tensors_keep_sharding_or_load_on_one_device(tmp_path):
  flags = {devices: {"XLA_FLAGS": _DEVICES.format(devices)} for devices in (1, 4)}
  assert _run(_SHARDED, tmp_path, "save", **flags[4]) == "4\n"
  assert _run(_SHARDED, tmp_path, "load", **flags[1]) == "1\n"


def test_wide_arrays_are_not_cut_where_x64_is_off(tmp_path):
  with jax.enable_x64(True):
    torchax.save_checkpoint({"w": jnp.array([2**40])}, tmp_path, 0)
    assert torchax.load_checkpoint(tmp_path)["w"][0] == 2**40
  with pytest.raises(UnsupportedDtypeError, match="x64"):
    torchax.load_checkpoint(tmp_path)


# torch.save --------------------------------------------------------------------------


@pytest.mark.parametrize(
  "make",
  [
    lambda: torch.arange(3.0).to("jax"),
    lambda: _model().state_dict(),
    lambda: torch.optim.AdamW(_model().parameters()).state_dict(),
    lambda: torch.jax.get_rng_state(),
    lambda: torchax.RngState.from_seed(3).advance(2).state_dict(),
    lambda: torchax.RngState.from_seed(3).advance(2).to_tensor(),
  ],
)
def test_torch_save_holds_state_dicts_without_code(make, tmp_path):
  value = make()
  torch.save(value, tmp_path / "file.pt")
  found = torch.load(tmp_path / "file.pt", weights_only=True)
  assert _flat(found) == _flat(value)


def test_torch_save_holds_a_random_state_as_an_object(tmp_path):
  state = torchax.RngState.from_seed(3).advance(2)
  torch.save(state, tmp_path / "file.pt")
  found = torch.load(tmp_path / "file.pt", weights_only=False)
  assert found.state_dict() == state.state_dict()


def test_file_of_torch_save_may_hold_optimizer_states(tmp_path):
  optax = pytest.importorskip("optax", reason="optax is not installed")
  weights = {"w": jnp.ones((2, 3), jnp.bfloat16)}
  state = optax.adamw(1e-3).init(weights)
  tensors = torchax.default_env().j2t_iso(state)
  torch.save({"arrays": state, "tensors": tensors, "epoch": 3}, tmp_path / "file.pt")
  found = torchax.checkpoint.load_checkpoint(tmp_path / "file.pt")
  assert found["epoch"] == 3
  assert jax.tree.structure(found["arrays"]) == jax.tree.structure(state)
  assert found["arrays"][0].mu["w"].dtype == jnp.bfloat16
  assert type(found["tensors"][0]) is type(state[0])
  assert found["tensors"][0].mu["w"].device.type == "jax"


class _RunsCode:
  def __reduce__(self):
    return print, ("code of the file",)


def test_file_of_torch_save_runs_no_code(tmp_path, capsys):
  torch.save({"state": _RunsCode()}, tmp_path / "file.pt")
  with pytest.raises(pickle.UnpicklingError):
    torchax.checkpoint.load_checkpoint(tmp_path / "file.pt")
  assert not capsys.readouterr().out
