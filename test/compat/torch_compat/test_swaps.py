"""Swaps of tensors: observed, with references to them and in graphs."""

import gc
import weakref

import pytest
import torch

from torchax.compat import torch_compat


@pytest.fixture
def notices(monkeypatch):
  """List with one entry per observed swap of tensors of the class `Swapped`."""
  monkeypatch.setattr(torch.utils, "swap_tensors", torch.utils.swap_tensors)
  seen = []
  torch_compat.watch_swaps(Swapped, lambda: seen.append(1))
  return seen


class Swapped(torch.Tensor):
  """A class whose swaps are watched."""


def test_swaps_are_noticed(notices):
  first, second = torch.zeros(2).as_subclass(Swapped), torch.ones(2)
  torch.utils.swap_tensors(first, second)
  assert notices == [1] and type(second) is Swapped
  assert torch.equal(first, torch.ones(2)) and type(first) is torch.Tensor
  torch.utils.swap_tensors(first, torch.ones(2))
  assert notices == [1]


def test_module_moves_use_the_watched_swap():
  called = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(torch.utils, "swap_tensors", lambda *tensors: called.append(tensors))
    patch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    torch.nn.Linear(2, 2, bias=False).to(torch.float64)
  assert len(called) == 1


def test_tensor_in_a_graph_is_swapped(notices):
  held = torch.ones(2, requires_grad=True)
  product = (held * held).sum()
  new = torch.zeros(2).as_subclass(Swapped).requires_grad_()
  torch.utils.swap_tensors(held, new)
  assert notices == [1] and held.tolist() == [0, 0] and new.tolist() == [1, 1]
  with pytest.raises(RuntimeError, match="moved to another device"):
    product.backward()


def test_weak_references_keep_their_tensor_after_a_swap(notices):
  held = torch.ones(2, requires_grad=True)
  product, reference = (held * held).sum(), weakref.ref(held)
  new = torch.zeros(2).as_subclass(Swapped).requires_grad_()
  torch.utils.swap_tensors(held, new)
  assert notices == [1] and reference() is held and held.tolist() == [0, 0]
  del new, product
  gc.collect()
  assert reference() is held and type(held) is Swapped
  del held
  gc.collect()
  assert reference() is None
