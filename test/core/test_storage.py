"""Storages as libraries read them: addresses, sizes and aliases."""

import copy
import gc
import weakref

import pytest
import torch
from compare import assert_same
from safetensors import torch as safetensors

from torchax.errors import NoSuchDeviceError, TracedStateError
from torchax.interop import jax_jit

BASE = torch.arange(12.0).reshape(3, 4)
VIEWS = {
  "row": lambda x: x[1],
  "strided": lambda x: x[1:, ::2],
  "transposed": lambda x: x.t(),
  "reshaped": lambda x: x.view(-1),
  "detached": lambda x: x.detach(),
  "data": lambda x: x.data,
  "parameter": torch.nn.Parameter,
  "diagonal": lambda x: x.diagonal(1),
  "bytes": lambda x: x.view(torch.uint8)[:, 3:],
}
each_view = pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)


@pytest.fixture
def x():
  return BASE.to("jax")


@each_view
def test_views_have_the_storage_offsets_of_the_cpu(x, make):
  view, on_cpu = make(x), make(BASE)
  assert view.data_ptr() - x.data_ptr() == on_cpu.data_ptr() - BASE.data_ptr()
  assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
  assert view.untyped_storage() is x.untyped_storage()
  assert view.storage_offset() == on_cpu.storage_offset()
  assert view.untyped_storage().nbytes() == BASE.untyped_storage().nbytes()
  assert view.nbytes == on_cpu.nbytes and view.element_size() == on_cpu.element_size()


COPIES = {
  "clone": torch.clone,
  "sum of two": lambda x: x + 0,
  "deepcopy": copy.deepcopy,
  "contiguous": lambda x: x.t().contiguous(),
  "to another dtype and back": lambda x: x.half().float(),
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_memory_of_its_own_has_an_address_of_its_own(x, make):
  copied = make(x)
  start, end = x.data_ptr(), x.data_ptr() + x.nbytes
  assert copied.data_ptr() >= end or copied.data_ptr() + copied.nbytes <= start
  assert copied.untyped_storage() is not x.untyped_storage()


def test_an_address_is_never_given_again():
  seen = set()
  for _ in range(20):
    tensor = BASE.to("jax")
    assert tensor.data_ptr() not in seen
    seen.add(tensor.data_ptr())
    del tensor
    gc.collect()


def test_an_address_stays_when_the_numbers_change(x):
  before, untyped = x.data_ptr(), x.untyped_storage()
  x.add_(1)
  x[0] = 5
  assert x.data_ptr() == before and x.untyped_storage() is untyped


def test_an_address_follows_the_memory(x):
  other = torch.zeros(3, 4).to("jax")
  address = other.data_ptr()
  x.data = other
  assert x.data_ptr() == address and x.untyped_storage() is other.untyped_storage()
  grown = torch.zeros(2).to("jax")
  view, before = grown[1:], grown.data_ptr()
  grown.resize_(1000)
  assert grown.data_ptr() != before and grown.untyped_storage().nbytes() == 4000
  assert view.untyped_storage() is grown.untyped_storage()


def test_nothing_has_no_address():
  assert torch.zeros(0, 3).to("jax").data_ptr() == 0
  assert torch.zeros(0).to("jax").untyped_storage().data_ptr() == 0


def test_a_storage_lives_as_long_as_it_is_used():
  tensor = BASE.to("jax")
  untyped = weakref.ref(tensor.untyped_storage())
  gc.collect()
  assert untyped() is tensor.untyped_storage()
  del tensor
  gc.collect()
  assert untyped() is None


def test_a_storage_answers(x):
  untyped = x.untyped_storage()
  assert untyped.device == x.device and untyped.size() == len(untyped) == 48
  assert untyped.element_size() == 1 and not untyped.is_pinned()
  assert not x.is_pinned() and not x.is_shared() and not untyped.is_shared()
  assert untyped.tolist() == BASE.untyped_storage().tolist() == list(untyped)
  assert untyped[6] == BASE.untyped_storage()[6]
  assert str(untyped) == f"[torchax.UntypedStorage(device={x.device}) of size 48]"
  assert untyped.cpu().tolist() == untyped.to(device="cpu").tolist() == untyped.tolist()
  assert untyped.to(device="jax") is untyped
  with pytest.warns(UserWarning, match="nothing for jax tensors"):
    assert x.share_memory_() is x
  with pytest.raises(NotImplementedError, match=r"tensor.resize_"):
    untyped.resize_(0)


def test_a_storage_is_written_to(x):
  other = torch.zeros(3, 4).to("jax")
  other.untyped_storage().copy_(x.untyped_storage())
  assert_same(other, BASE)
  other.untyped_storage().copy_((BASE + 1).untyped_storage())
  assert_same(other, BASE + 1)
  other.untyped_storage()[3] = 0x40
  expected = BASE + 1
  expected.untyped_storage()[3] = 0x40
  assert_same(other, expected)
  other.untyped_storage().fill_(0)
  assert_same(other, torch.zeros(3, 4))
  copied = x.untyped_storage().clone()
  x.zero_()
  assert_same(torch.empty(0, device="jax").set_(copied), BASE.view(-1))
  with pytest.raises(RuntimeError, match="48 bytes, but got 4"):
    x.untyped_storage().copy_(torch.zeros(1).untyped_storage())


@pytest.mark.parametrize("device", ["jax", 0, torch.device("jax:0")])
def test_a_storage_is_made_by_torch_s_own_name(device):
  """Otherwise torch's C++ would abort the process."""
  made = torch.UntypedStorage(8, device=device)
  assert made.device == torch.device("jax:0") and made.tolist() == [0] * 8
  assert_same(torch.empty(0, device="jax").set_(made), torch.zeros(2))
  assert torch.UntypedStorage([1, 2], device=device).tolist() == [1, 2]
  assert torch.UntypedStorage(device=device).nbytes() == 0
  for kind in ("cpu", "meta"):
    assert type(torch.UntypedStorage(4, device=kind)) is torch.UntypedStorage
  with pytest.raises(NoSuchDeviceError, match="jax:9 does not exist"):
    torch.UntypedStorage(8, device="jax:9")


def test_a_tensor_is_set_to_a_storage(x):
  view = torch.empty(0, device="jax").set_(x.untyped_storage(), 4, (2, 2), (4, 1))
  assert_same(view, BASE[1:, :2])
  # Views without strides.
  rows = torch.empty(0, device="jax").set_(x.untyped_storage(), 1, (2, 3))
  assert_same(rows, BASE.view(-1)[1:7].view(2, 3))
  view.zero_()
  assert x[1].tolist() == [0, 0, 6, 7]


def test_identity_is_known_inside_of_a_compiled_function(x):
  seen = []

  @jax_jit
  def double(inner):
    view, new = inner[1:], inner * 2
    seen.append((inner.data_ptr(), view.data_ptr(), new.data_ptr(), x.data_ptr()))
    seen.append((inner.untyped_storage().nbytes(), new.untyped_storage().nbytes()))
    with pytest.raises(TracedStateError):
      new.untyped_storage().tolist()
    return new

  double(x)
  (inner, view, new, outer), sizes = seen[:2]
  assert view - inner == 16 and len({inner, new}) == 2 and outer == x.data_ptr()
  assert sizes == (48, 48)


class Tied(torch.nn.Module):
  """Module with two names of one weight, and a buffer that is a view of another one."""

  def __init__(self):
    super().__init__()
    self.embedding = torch.nn.Embedding(7, 4)
    self.head = torch.nn.Linear(4, 7, bias=False)
    self.head.weight = self.embedding.weight


def test_tied_weights_are_found_and_saved_once(tmp_path):
  model = Tied().to("jax")
  found = safetensors._find_shared_tensors(model.state_dict())
  assert found == [{"embedding.weight", "head.weight"}]
  path = tmp_path / "model.safetensors"
  safetensors.save_model(model, path)
  assert len(safetensors.load_file(path)) == 1
  other = Tied().to("jax")
  assert safetensors.load_model(other, path) == (set(), [])
  assert_same(dict(other.state_dict()), dict(model.cpu().state_dict()))
  assert other.head.weight is other.embedding.weight
