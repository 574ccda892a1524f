"""Saving, loading, pickling and sending jax tensors, also to processes without torchax.

Checkpoints of whole runs are in `test_checkpoint.py`.
"""

import copy
import io
import json
import os
import pickle
import subprocess
import sys
import warnings
import zipfile

import cloudpickle
import pytest
import safetensors
import torch
from compare import assert_same
from safetensors.torch import load_file, save_file
from spawned import answer

import torchax
from torchax.compat import versions
from torchax.errors import (
  MutationError,
  NoSuchDeviceError,
  TracedStateError,
)
from torchax.interop import jax_jit
from torchax.tensor import Tensor

DTYPES = (
  torch.bool,
  torch.uint8,
  torch.int8,
  torch.int16,
  torch.int32,
  torch.uint16,
  torch.float16,
  torch.bfloat16,
  torch.float32,
  torch.complex64,
  torch.float8_e4m3fn,
  torch.float8_e5m2,
)
BASE = torch.arange(12.0).reshape(3, 4)
COMPLEX = torch.complex(BASE, BASE - 3)

# What is saved, by a name: functions of the base, of which views share its memory.
TENSORS = {
  "whole": lambda base: base,
  "0-d": lambda base: base.sum(),
  "empty": lambda base: base.new_empty((0, 3)),
  "row": lambda base: base[1],
  "strided": lambda base: base[1:, ::2],
  "transposed": lambda base: base.t(),
  "expanded": lambda base: base[:, :1].expand(3, 5),
  "diagonal": lambda base: base.diagonal(),
  "reshaped": lambda base: base.view(2, 6),
}
FORMATS = {"zip": {}, "older": {"_use_new_zipfile_serialization": False}}
each_format = pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)


def _saved(value, **options) -> io.BytesIO:
  stream = io.BytesIO()
  torch.save(value, stream, **options)
  stream.seek(0)
  return stream


def _same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
  actual, expected = actual.detach().cpu(), expected.detach()
  bits = [t.resolve_conj().contiguous().view(-1) for t in (actual, expected)]
  return (
    actual.dtype == expected.dtype
    and actual.shape == expected.shape
    and torch.equal(*(b.view(torch.uint8) if b.numel() else b for b in bits))
  )


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


# Without torchax --------------------------------------------------------------------

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


def _values(device: str, dtypes=DTYPES) -> dict[str, torch.Tensor]:
  """Tensors of all kinds; on the CPU, what they are to be compared with."""
  base = BASE.to(device, copy=True)
  values = {name: make(base) for name, make in TENSORS.items()}
  values |= {str(dtype): BASE.to(dtype).to(device) for dtype in dtypes}
  values["parameter"] = torch.nn.Parameter(base)
  values["parameter"].note = "kept"
  values["attributes"] = BASE.to(device, copy=True)
  values["attributes"].note = [1, 2]
  values["leaf"] = BASE.to(device, copy=True).requires_grad_()
  values["complex"] = COMPLEX.to(device)
  values["conjugate"] = values["complex"].conj()
  return values


def test_process_without_torchax_opens_saved_files(tmp_path):
  places = [str(tmp_path / name) for name in FORMATS]
  for place, options in zip(places, FORMATS.values()):
    torch.save(_values("jax"), place, **options)
  subprocess.run([sys.executable, "-c", _WITHOUT, *places], check=True)
  for place in places:
    seen = torch.load(place + ".seen")
    for name, expected in _values("cpu").items():
      assert _same_bits(seen[name], expected), (place, name)


# To the device that is asked for ----------------------------------------------------

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
  saved = _values(source, dtypes)
  loaded = torch.load(_saved(saved, **options), map_location="jax")
  for name, expected in _values("cpu", dtypes).items():
    assert isinstance(loaded[name], Tensor) and loaded[name].device.type == "jax", name
    assert _same_bits(loaded[name], expected), name
    assert loaded[name].requires_grad == expected.requires_grad, name
  assert isinstance(loaded["parameter"], torch.nn.Parameter)
  assert loaded["parameter"].note == "kept" and loaded["attributes"].note == [1, 2]


@each_source
def test_every_tensor_is_loaded_onto_the_cpu(source, dtypes, options):
  saved = _values(source, dtypes)
  loaded = torch.load(_saved(saved, **options), map_location="cpu")
  for name, expected in _values("cpu", dtypes).items():
    assert type(loaded[name]) is type(expected), name
    assert _same_bits(loaded[name], expected), name


@pytest.mark.parametrize("place", TO_JAX.values(), ids=TO_JAX)
def test_map_location_is_a_device_a_dict_or_a_function(place):
  loaded = torch.load(_saved([BASE]), map_location=place)
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
  part, whole, parameter = torch.load(_saved(saved, **options), **load)
  whole.mul_(2)
  assert_same(part, 2 * BASE[1:, ::2])
  assert_same(parameter.detach(), 2 * BASE.t())
  part.fill_(-1)
  assert whole[1, 0].item() == -1


def test_tensors_come_back_to_where_they_were():
  loaded = torch.load(_saved([BASE.to("jax"), BASE, COMPLEX.to("jax").conj()]))
  assert_same(loaded[0], BASE)
  assert type(loaded[1]) is torch.Tensor and torch.equal(loaded[1], BASE)
  assert loaded[2].is_conj()
  assert_same(loaded[2], COMPLEX.conj())


def test_the_older_format_comes_back_on_the_cpu():
  (loaded,) = torch.load(_saved([BASE.to("jax")], **FORMATS["older"]))
  assert type(loaded) is torch.Tensor and torch.equal(loaded, BASE)


@pytest.mark.parametrize("place", [None, "cpu", "jax"])
def test_a_mapped_file_is_loaded(place, tmp_path):
  path = tmp_path / "state.pt"
  torch.save({"a": BASE.to("jax"), "b": BASE.to("jax").bfloat16()[1:]}, path)
  loaded = torch.load(path, mmap=True, map_location=place)
  path.unlink()  # the mapping stays; nothing of it is needed on jax
  assert {t.device.type for t in loaded.values()} == {place or "jax"}
  assert _same_bits(loaded["a"], BASE) and _same_bits(loaded["b"], BASE.bfloat16()[1:])


@each_format
def test_64_bit_values_of_a_file_get_jaxs_dtypes(options):
  wide = {"a": torch.arange(6).reshape(2, 3), "b": torch.tensor([1.5]).double()}
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    loaded = torch.load(_saved(wide, **options), map_location="jax")
    expected = {name: value.to("jax") for name, value in wide.items()}
  for name, value in expected.items():
    assert loaded[name].dtype == value.dtype
    assert loaded[name].tolist() == value.tolist() == wide[name].tolist()
  with pytest.raises(OverflowError, match="enable_x64"):
    torch.load(_saved([torch.tensor([2**40])]), map_location="jax")


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
  # Here there is one device, which takes what was on another one.
  first, _ = torch.load(io.BytesIO(bytes.fromhex(program.stdout)))
  assert str(first.device) == "jax:0"
  assert_same(first, torch.arange(8.0))


def test_map_location_cuda_means_jax_if_configured(monkeypatch):
  config = torchax.default_env().config
  monkeypatch.setattr(config, "treat_cuda_as_jax_device", True)
  stream = _saved([BASE])
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
  loaded = torch.load(_saved([other, other[1]]), map_location="cpu")
  assert torch.equal(loaded[0], odd.cpu()) and torch.equal(loaded[1], odd[1].cpu())


# Modules and optimizers -------------------------------------------------------------


def test_a_module_is_saved_whole():
  model, _ = _trained("jax")
  loaded = torch.load(_saved(model), weights_only=False, map_location="cpu")
  assert loaded.head.weight is loaded.embedding.weight
  assert type(loaded.head.weight) is torch.nn.Parameter
  for name, value in model.state_dict().items():
    assert torch.equal(loaded.state_dict()[name], value.cpu()), name
  assert_same(dict(loaded.to("jax").state_dict()), dict(loaded.cpu().state_dict()))


@pytest.mark.parametrize("place", [None, "cpu", "jax"])
def test_training_resumes_from_a_file(place):
  model, optimizer = _trained("jax")
  state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
  loaded = torch.load(_saved(state), map_location=place)
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
  loaded = torch.load(_saved(state), map_location="jax")
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


def test_safetensors_load_onto_the_device_that_is_asked_for(tmp_path):
  path = tmp_path / "state.safetensors"
  saved = {"a": BASE.to("jax"), "b": BASE.to("jax").bfloat16()[1]}
  save_file(saved, path, metadata={"of": "a test"})
  expected = {"a": BASE, "b": BASE.bfloat16()[1]}
  for device in ("jax", "jax:0", torch.device("jax")):
    assert_same(load_file(path, device=device), expected)
  for name, value in load_file(path).items():
    assert type(value) is torch.Tensor and torch.equal(value, expected[name])
  with safetensors.safe_open(path, "pt", device="jax") as file:
    assert sorted(file.keys()) == ["a", "b"] and file.metadata() == {"of": "a test"}
    part = file.get_slice("a")
    assert part.get_shape() == [3, 4]
    assert_same(part[1:, :2], BASE[1:, :2])
    assert_same(file.get_tensor("b"), expected["b"])
  with pytest.raises(RuntimeError, match="jax:99 does not exist"):
    load_file(path, device="jax:99")
  path.write_bytes(path.read_bytes()[:-3])
  with pytest.raises(safetensors.SafetensorError, match="incomplete"):
    load_file(path, device="jax")


# Copies and pickles -----------------------------------------------------------------

COPIES = {
  "pickle": lambda value: pickle.loads(pickle.dumps(value)),
  "pickle 2": lambda value: pickle.loads(pickle.dumps(value, protocol=2)),
  "cloudpickle": lambda value: pickle.loads(cloudpickle.dumps(value)),
  "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
def test_copies_keep_class_values_and_attributes(way):
  copied = way(_values("jax"))
  for name, expected in _values("cpu").items():
    assert isinstance(copied[name], Tensor), name
    assert _same_bits(copied[name], expected), name
    assert copied[name].requires_grad == expected.requires_grad, name
  assert isinstance(copied["parameter"], torch.nn.Parameter)
  assert copied["parameter"].note == "kept" and copied["attributes"].note == [1, 2]
  copied["whole"].zero_()
  assert copied["row"].tolist() == [0] * 4
  assert copied["parameter"].data_ptr() == copied["whole"].data_ptr()


def test_a_deep_copy_keeps_the_gradient():
  leaf = BASE.to("jax").requires_grad_()
  (leaf * leaf).sum().backward()
  copied = copy.deepcopy(leaf)
  assert_same(copied.grad, 2 * BASE)
  copied.grad.zero_()
  assert_same(leaf.grad, 2 * BASE)


def test_a_shallow_copy_shares_memory():
  parameter = torch.nn.Parameter(BASE.to("jax"))
  parameter.note = "kept"
  copied = copy.copy(parameter)
  assert copied is not parameter and copied.note == "kept"
  assert isinstance(copied, torch.nn.Parameter) and copied.requires_grad
  copied.data.add_(1)
  assert_same(parameter.detach(), BASE + 1)


def test_another_process_gets_values_and_sends_some():
  context = torch.multiprocessing.get_context("spawn")
  received, answers = context.Queue(), context.Queue()
  base = BASE.to("jax")
  child = context.Process(target=answer, args=(base, received, answers))
  child.start()
  received.put([base, base[1]])
  total, changed, parameter = answers.get(timeout=120)
  child.join(timeout=60)
  assert child.exitcode == 0
  expected = BASE.clone()
  expected[1] += 1
  assert_same([total, changed], [BASE + expected, expected])
  assert isinstance(parameter, torch.nn.Parameter)
  assert_same(parameter.detach(), BASE[1] + 1)
  assert_same(base, BASE)  # a value was sent, not the memory


def test_a_storage_that_was_pickled_moves_with_its_bytes():
  storage = pickle.loads(pickle.dumps(BASE)).untyped_storage()
  moved = torch.empty(0, device="jax").set_(storage.to(device="jax"))
  assert_same(moved, BASE.view(-1))


# What is refused --------------------------------------------------------------------


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
      torch.load(_saved(value), weights_only=True)
  assert not made.exists()


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.1, 0.5, 0.95])
@pytest.mark.parametrize("place", [None, "jax"])
@each_format
def test_truncated_file_raises(options, place, kept, tmp_path):
  whole = _saved({"a": torch.zeros(2000).to("jax")}, **options).getvalue()
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
  newer = _with_version(_saved([BASE.to("jax")]).getvalue(), b"99\n")
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


def test_a_truncated_file_of_safetensors_is_named(tmp_path):
  path = tmp_path / "part.safetensors"
  save_file({"a": torch.zeros(20)}, path)
  os.truncate(path, path.stat().st_size - 8)
  with pytest.raises(
    safetensors.SafetensorError, match=r"part\.safetensors is damaged"
  ):
    load_file(path, device="jax")


def _of_a_newer_dtype() -> bytes:
  content = {"dtype": "F3_NEW", "shape": [3], "data_offsets": [0, 12]}
  header = json.dumps({"a": content}).encode()
  return len(header).to_bytes(8, "little") + header + bytes(12)


@pytest.mark.parametrize(
  "content", [b"", b"a text and no tensor", pickle.dumps([1]), _of_a_newer_dtype()]
)
def test_a_file_that_safetensors_cannot_read_is_named(content, tmp_path):
  path = tmp_path / "other.safetensors"
  path.write_bytes(content)
  message = r"other\.safetensors is damaged, or of another kind.*a newer safetensors"
  # Before 2.13 torch.load takes torch's own files alone.
  is_old = versions.is_older(torch.__version__, "2.13")
  for load in (load_file,) if is_old else (load_file, torch.load):
    with pytest.raises(safetensors.SafetensorError, match=message):
      load(path, "jax")
  with pytest.raises(IsADirectoryError, match="expects a file, but got a directory"):
    load_file(tmp_path, device="jax")


def test_a_device_that_does_not_exist_is_named():
  stream = _saved([BASE])
  with pytest.raises(NoSuchDeviceError, match="jax:99 does not exist.*Ask for one"):
    torch.load(stream, map_location="jax:99")


def test_a_layout_outside_of_its_storage_raises():
  stream = _saved(BASE)
  storage = torch.load(stream, map_location="jax").untyped_storage()
  empty = torch.empty(0, device="jax")
  for layout in (
    (0, (13,), (1,)),
    (10, (3,), (1,)),
    (0, (4, 4), (4, 1)),
    (-1, (1,), (1,)),
  ):
    with pytest.raises(RuntimeError, match="storage"):
      empty.set_(storage, *layout)
  assert empty.numel() == 0
  with pytest.raises(MutationError, match="storage of one"):
    empty.set_(BASE.untyped_storage())


@pytest.mark.parametrize("way", [pickle.dumps, _saved])
def test_a_traced_tensor_is_not_saved(way):
  def save(x):
    way(x)
    return x

  with pytest.raises(TracedStateError, match="Saving or pickling"):
    jax_jit(save)(BASE.to("jax"))
