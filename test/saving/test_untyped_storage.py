"""Untyped storages: from a pickle, and layouts on them."""

import pickle

import pytest
import torch
from compare import assert_same
from saving.saved_tensors import BASE, stream_of

from torchax.errors import MutationError


def test_a_storage_that_was_pickled_moves_with_its_bytes():
  storage = pickle.loads(pickle.dumps(BASE)).untyped_storage()
  moved = torch.empty(0, device="jax").set_(storage.to(device="jax"))
  assert_same(moved, BASE.view(-1))


def test_a_saved_storage_keeps_its_bytes(tmp_path):
  storage = BASE.to("jax").untyped_storage()
  torch.save(storage, tmp_path / "storage.pt")
  saved = torch.load(tmp_path / "storage.pt", weights_only=False)
  for copied in (saved, pickle.loads(pickle.dumps(storage))):
    assert_same(torch.empty(0, device="jax").set_(copied), BASE.view(-1))


def test_a_layout_outside_of_its_storage_raises():
  stream = stream_of(BASE)
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


def test_a_copy_of_the_storage_for_async_save_needs_a_mesh():
  storage = BASE.to("jax").untyped_storage()
  with pytest.raises(NotImplementedError, match="init_device_mesh.* before it"):
    type(storage)(storage.size(), device="cpu")
