"""Files of `torch.save` with jax tensors, also opened by processes without torchax.

Copies and pickles are in `test_copies.py`, checkpoints of runs in `test_checkpoint.py`.
"""

import io
import os
import pickle
import subprocess
import sys
import warnings
import zipfile

import pytest
import torch
from compare import assert_same
from safetensors.torch import load_file
from saving.saved_tensors import (
  BASE,
  COMPLEX,
  DTYPES,
  FORMATS,
  all_kinds,
  each_format,
  same_bits,
  stream_of,
)

import torchax
from torchax.errors import NoSuchDeviceError, TracedStateError
from torchax.interop import jax_jit
from torchax.tensor import Tensor


class Tied(torch.nn.Module):
  """Two layers of one weight, and a buffer."""

  def __init__(self):
    super().__init__()
    self.embedding = torch.nn.Embedding(7, 4)
    self.norm = torch.nn.BatchNorm1d(4)
    self.head = torch.nn.Linear(4, 7, bias=False)
    self.head.weight = self.embedding.weight

  def forward(self, tokens):
    return self.head(self.norm(self.embedding(tokens)))


def _trained(device: str):
  torch.manual_seed(0)
  model = Tied().to(device)
  optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
  _step(model, optimizer, device)
  return model, optimizer


def _step(model, optimizer, device: str) -> None:
  model(torch.tensor([1, 2, 3]).to(device)).square().sum().backward()
  optimizer.step()
  optimizer.zero_grad()


# Without torchax ----------------------------------------------------------------------


_WITHOUT = """
import sys
sys.modules["torchax"] = sys.modules["jax"] = None
import torch
for place in sys.argv[1:]:
  found = torch.load(place, weights_only=True)
  base = found["whole"]
  assert all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in found.values())
  assert all(t.device.type == "cpu" for t in found.values())
  views = "row", "strided", "transposed", "expanded", "diagonal", "reshaped"
  shared = "whole", "parameter", *views
  starts = {found[name].untyped_storage().data_ptr() for name in shared}
  assert len(starts) == 1, starts
  assert type(found["parameter"]) is torch.nn.Parameter
  assert found["parameter"].note == "kept" and found["attributes"].note == [1, 2]
  assert found["leaf"].requires_grad and not found["whole"].requires_grad
  assert found["conjugate"].is_conj()
  assert found["conjugate"].untyped_storage().data_ptr() == (
    found["complex"].untyped_storage().data_ptr()
  )
  torch.save({name: t.detach().clone() for name, t in found.items()}, place + ".seen")
"""


def test_process_without_torchax_opens_saved_files(tmp_path):
  places = [str(tmp_path / name) for name in FORMATS]
  for place, options in zip(places, FORMATS.values()):
    torch.save(all_kinds("jax"), place, **options)
  subprocess.run([sys.executable, "-c", _WITHOUT, *places], check=True)
  for place in places:
    seen = torch.load(place + ".seen")
    for name, expected in all_kinds("cpu").items():
      assert same_bits(seen[name], expected), (place, name)


# To the requested device --------------------------------------------------------------

TO_JAX = {
  "name": "jax",
  "index": "jax:0",
  "device": torch.device("jax"),
  "dict": {"cpu": "jax"},
  "function": lambda storage, location: storage.jax(),
  "to in a function": lambda storage, location: storage.to(device="jax"),
}


# torch's older format has no storages of the newer dtypes on the CPU.
SOURCES = {
  "zip of the CPU": ("cpu", DTYPES, {}),
  "zip of jax": ("jax", DTYPES, {}),
  "older of the CPU": ("cpu", [torch.bool, torch.bfloat16], FORMATS["older"]),
  "older of jax": ("jax", DTYPES, FORMATS["older"]),
}
each_source = pytest.mark.parametrize(
  "source, dtypes, options", SOURCES.values(), ids=SOURCES
)


@each_source
def test_every_tensor_is_loaded_onto_jax(source, dtypes, options):
  saved = all_kinds(source, dtypes)
  loaded = torch.load(stream_of(saved, **options), map_location="jax")
  for name, expected in all_kinds("cpu", dtypes).items():
    assert isinstance(loaded[name], Tensor) and loaded[name].device.type == "jax", name
    assert same_bits(loaded[name], expected), name
    assert loaded[name].requires_grad == expected.requires_grad, name
  assert isinstance(loaded["parameter"], torch.nn.Parameter)
  assert loaded["parameter"].note == "kept" and loaded["attributes"].note == [1, 2]


@each_source
def test_every_tensor_is_loaded_onto_the_cpu(source, dtypes, options):
  saved = all_kinds(source, dtypes)
  loaded = torch.load(stream_of(saved, **options), map_location="cpu")
  for name, expected in all_kinds("cpu", dtypes).items():
    assert type(loaded[name]) is type(expected), name
    assert same_bits(loaded[name], expected), name


@pytest.mark.parametrize("place", TO_JAX.values(), ids=TO_JAX)
def test_map_location_is_a_device_a_dict_or_a_function(place):
  loaded = torch.load(stream_of([BASE]), map_location=place)
  assert_same(loaded, [BASE])


WAYS_TO_JAX = {
  "home": ({}, {}),
  "zip": ({}, {"map_location": "jax"}),
  "older": (FORMATS["older"], {"map_location": "jax"}),
}


@pytest.mark.parametrize("options, load", WAYS_TO_JAX.values(), ids=WAYS_TO_JAX)
def test_shared_memory_is_shared_after_loading(options, load):
  base = BASE.to("jax")
  saved = [base[1:, ::2], base, torch.nn.Parameter(base.t())]
  part, whole, parameter = torch.load(stream_of(saved, **options), **load)
  whole.mul_(2)
  assert_same(part, 2 * BASE[1:, ::2])
  assert_same(parameter.detach(), 2 * BASE.t())
  part.fill_(-1)
  assert whole[1, 0].item() == -1


def test_tensors_come_back_to_where_they_were():
  loaded = torch.load(stream_of([BASE.to("jax"), BASE, COMPLEX.to("jax").conj()]))
  assert_same(loaded[0], BASE)
  assert type(loaded[1]) is torch.Tensor and torch.equal(loaded[1], BASE)
  assert loaded[2].is_conj()
  assert_same(loaded[2], COMPLEX.conj())


def test_the_older_format_comes_back_on_the_cpu():
  (loaded,) = torch.load(stream_of([BASE.to("jax")], **FORMATS["older"]))
  assert type(loaded) is torch.Tensor and torch.equal(loaded, BASE)


@pytest.mark.parametrize("place", [None, "cpu", "jax"])
def test_a_mapped_file_is_loaded(place, tmp_path):
  path = tmp_path / "state.pt"
  torch.save({"a": BASE.to("jax"), "b": BASE.to("jax").bfloat16()[1:]}, path)
  loaded = torch.load(path, mmap=True, map_location=place)
  path.unlink()  # the mapping stays; nothing of it is needed on jax
  assert {t.device.type for t in loaded.values()} == {place or "jax"}
  assert same_bits(loaded["a"], BASE) and same_bits(loaded["b"], BASE.bfloat16()[1:])


@each_format
def test_64_bit_values_of_a_file_get_jaxs_dtypes(options):
  wide = {"a": torch.arange(6).reshape(2, 3), "b": torch.tensor([1.5]).double()}
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    loaded = torch.load(stream_of(wide, **options), map_location="jax")
    expected = {name: value.to("jax") for name, value in wide.items()}
  for name, value in expected.items():
    assert loaded[name].dtype == value.dtype
    assert loaded[name].tolist() == value.tolist() == wide[name].tolist()
  with pytest.raises(OverflowError, match="enable_x64"):
    torch.load(stream_of([torch.tensor([2**40])]), map_location="jax")


_ON_FOUR_DEVICES = """
import io, pickle, torch, torchax

base = torch.arange(8.0)
there = base.to("jax:2")
stream = io.BytesIO()
torch.save([there, there[2:4]], stream)

def devices(**options):
  stream.seek(0)
  loaded = torch.load(stream, **options)
  assert torch.equal(loaded[0].cpu(), base) and loaded[1].tolist() == [2, 3]
  assert loaded[1].data_ptr() == loaded[0].data_ptr() + 8
  return {str(tensor.device) for tensor in loaded}

assert devices() == {"jax:2"}
assert devices(map_location="jax") == {"jax:0"}
assert devices(map_location="jax:1") == {"jax:1"}
assert devices(map_location={"cpu": "jax:3"}) == {"jax:3"}
assert devices(map_location=lambda storage, _: storage.jax("jax:3")) == {"jax:3"}
with torch.jax.device(1):
  assert devices(map_location="jax") == {"jax:1"}
  assert devices() == {"jax:2"}
assert str(pickle.loads(pickle.dumps(there)).device) == "jax:2"
print(stream.getvalue().hex())
"""


def test_an_index_says_which_device_a_file_is_loaded_onto():
  flag = "--xla_force_host_platform_device_count=4"
  program = subprocess.run(
    [sys.executable, "-c", _ON_FOUR_DEVICES],
    env={**os.environ, "XLA_FLAGS": flag},
    check=True,
    capture_output=True,
    text=True,
  )
  # This process has one device, which receives tensors of other devices.
  first, _ = torch.load(io.BytesIO(bytes.fromhex(program.stdout)))
  assert str(first.device) == "jax:0"
  assert_same(first, torch.arange(8.0))


def test_map_location_cuda_means_jax_if_configured(monkeypatch):
  config = torchax.default_env().config
  monkeypatch.setattr(config, "treat_cuda_as_jax_device", True)
  stream = stream_of([BASE])
  with torchax.default_env():
    assert_same(torch.load(stream, map_location="cuda"), [BASE])


def test_tensor_with_strides_unlike_its_memory_is_saved_by_value():
  odd = torch.arange(6.0).reshape(2, 3).to("jax")
  other = Tensor.__tensor_unflatten__(
    {"_shell": torch.empty_strided((2, 3), (1, 2), device="meta")},
    odd.__tensor_flatten__()[1],
    torch.Size([2, 3]),
    (1, 2),
  )
  loaded = torch.load(stream_of([other, other[1]]), map_location="cpu")
  assert torch.equal(loaded[0], odd.cpu()) and torch.equal(loaded[1], odd[1].cpu())


# Modules and optimizers ---------------------------------------------------------------


def test_a_module_is_saved_whole():
  model, _ = _trained("jax")
  loaded = torch.load(stream_of(model), weights_only=False, map_location="cpu")
  assert loaded.head.weight is loaded.embedding.weight
  assert type(loaded.head.weight) is torch.nn.Parameter
  for name, value in model.state_dict().items():
    assert torch.equal(loaded.state_dict()[name], value.cpu()), name
  assert_same(dict(loaded.to("jax").state_dict()), dict(loaded.cpu().state_dict()))


@pytest.mark.parametrize("place", [None, "cpu", "jax"])
def test_training_resumes_from_a_file(place):
  model, optimizer = _trained("jax")
  state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
  loaded = torch.load(stream_of(state), map_location=place)
  resumed = Tied().to("jax")
  resumed.load_state_dict(loaded["model"])
  again = torch.optim.AdamW(resumed.parameters(), lr=0.1)
  again.load_state_dict(loaded["optimizer"])
  _step(model, optimizer, "jax")
  _step(resumed, again, "jax")
  for name, value in model.state_dict().items():
    assert torch.equal(resumed.state_dict()[name].cpu(), value.cpu()), name


def test_a_run_on_the_cpu_goes_on_on_jax():
  model, optimizer = _trained("cpu")
  state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
  loaded = torch.load(stream_of(state), map_location="jax")
  resumed = Tied().to("jax")
  resumed.load_state_dict(loaded["model"])
  again = torch.optim.AdamW(resumed.parameters(), lr=0.1)
  again.load_state_dict(loaded["optimizer"])
  _step(model, optimizer, "cpu")
  _step(resumed, again, "jax")
  assert_same(dict(resumed.state_dict()), dict(model.state_dict()))


def test_transformers_save_and_load_from_jax(tmp_path):
  transformers = pytest.importorskip("transformers", reason="not installed")
  config = transformers.GPT2Config(
    n_layer=1,
    n_head=2,
    n_embd=8,
    vocab_size=32,
    n_positions=8,
    bos_token_id=0,
    eos_token_id=0,
  )
  model = transformers.GPT2LMHeadModel(config).to("jax")
  assert model.lm_head.weight is model.transformer.wte.weight
  model.save_pretrained(tmp_path, max_shard_size="1KB")
  shards = sorted(tmp_path.glob("*.safetensors"))
  assert len(shards) > 1
  found = [name for shard in shards for name in load_file(shard, device="jax")]
  assert len(found) == len(set(found)) and "lm_head.weight" not in found
  loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).to("jax")
  assert loaded.lm_head.weight is loaded.transformer.wte.weight
  for name, value in model.state_dict().items():
    assert torch.equal(loaded.state_dict()[name], value), name


# Invalid files ------------------------------------------------------------------------


class _Calls:
  """A pickle that runs a function of its choice."""

  def __init__(self, function, *args):
    self.function, self.args = function, args

  def __reduce__(self):
    return self.function, self.args


def test_a_malicious_file_runs_nothing(tmp_path):
  made = tmp_path / "made"
  inner = _Calls(made.write_text, "ran")
  for value in (inner, [BASE.to("jax"), inner]):
    with pytest.raises(pickle.UnpicklingError, match="[Ww]eights"):
      torch.load(stream_of(value), weights_only=True)
  assert not made.exists()


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.1, 0.5, 0.95])
@pytest.mark.parametrize("place", [None, "jax"])
@each_format
def test_truncated_file_raises(options, place, kept, tmp_path):
  whole = stream_of({"a": torch.zeros(2000).to("jax")}, **options).getvalue()
  path = tmp_path / "part.pt"
  path.write_bytes(whole[: int(len(whole) * kept)])
  with pytest.raises((RuntimeError, EOFError, OSError, pickle.UnpicklingError)):
    torch.load(path, map_location=place)


def _with_version(whole: bytes, version: bytes) -> bytes:
  parts, changed = zipfile.ZipFile(io.BytesIO(whole)), io.BytesIO()
  with zipfile.ZipFile(changed, "w") as archive:
    for name in parts.namelist():
      is_version = name.endswith("/version")
      archive.writestr(name, version if is_version else parts.read(name))
  return changed.getvalue()


@pytest.mark.parametrize("place", [None, "jax"])
def test_file_of_a_newer_version_raises_with_advice(place):
  """torch's own error says it; its formats are nothing of jax's."""
  newer = _with_version(stream_of([BASE.to("jax")]).getvalue(), b"99\n")
  with pytest.raises(RuntimeError, match="version 99.*please upgrade"):
    torch.load(io.BytesIO(newer), map_location=place)


def test_unreadable_file_raises_torchs_error(tmp_path):
  with pytest.raises(FileNotFoundError):
    torch.load(tmp_path / "none.pt")
  with pytest.raises(IsADirectoryError):
    torch.load(tmp_path, map_location="jax")
  other = tmp_path / "other.zip"
  with zipfile.ZipFile(other, "w") as archive:
    archive.writestr("a.txt", "no tensor")
  for file in (other, other.open("rb")):
    with pytest.raises(RuntimeError, match="subdirectory"):
      torch.load(file)


def test_a_device_that_does_not_exist_is_named():
  stream = stream_of([BASE])
  with pytest.raises(NoSuchDeviceError, match="jax:99 does not exist: this process"):
    torch.load(stream, map_location="jax:99")


@pytest.mark.parametrize("way", [pickle.dumps, stream_of])
def test_a_traced_tensor_is_not_saved(way):
  def save(x):
    way(x)
    return x

  with pytest.raises(TracedStateError, match="Saving or pickling"):
    jax_jit(save)(BASE.to("jax"))
