"""Files of safetensors: the device of their tensors, and errors for invalid files."""

import json
import os
import pickle

import pytest
import safetensors
import torch
from compare import assert_same
from safetensors.torch import load_file, save_file
from saving.saved_tensors import BASE

from torchax.compat import versions


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
