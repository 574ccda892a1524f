"""Guards, constructed by hand without tracing a function."""

import gc

import numpy as np
import pytest
import torch
from torch import nn

from torchax.errors import MutationError
from torchax.tracing import guards as module_of_guards
from torchax.tracing.guards import MOST_CHANGES, Guards


class Number:
  """Number of the host that Python branches on."""

  def __init__(self, value):
    self.value = value

  def now(self):
    return self.value

  def describe(self) -> str:
    return str(self.value)

  def __str__(self) -> str:
    return "number"


def _with_module() -> tuple[Guards, nn.Module]:
  guards, module = Guards("f"), nn.Dropout(0.5)
  guards.guard_on_module(module)
  return guards, module


def test_without_guards_the_key_is_empty():
  guards = Guards()
  assert guards.is_empty and guards.key() == ()


def test_key_contains_an_attribute_while_it_differs():
  guards, module = _with_module()
  assert not guards.is_empty and guards.key() == ()
  module.p = 0.25
  assert guards.key() != ()
  module.p = 0.5
  assert guards.key() == ()


def test_a_submodule_is_guarded_on_with_its_parent():
  guards, module = Guards(), nn.Sequential(nn.Dropout(0.5))
  guards.guard_on_module(module)
  module[0].eval()
  assert guards.key() != ()


def test_a_list_changed_in_place_changes_the_key():
  guards, module = Guards(), nn.Module()
  module.sizes = [1, 2]
  guards.guard_on_module(module)
  module.sizes.append(3)
  assert guards.key() != ()


def test_a_replaced_member_counts_in_the_edition_of_members():
  guards, module = Guards(), nn.Sequential(nn.ReLU())
  with guards.watching(lambda module: None):
    guards.guard_on_module(module)
  before = guards.members_edition()
  module[0] = nn.Sigmoid()
  assert guards.members_edition() == before + 1


def test_a_cpu_tensor_is_compared_by_its_numbers():
  guards, tensor = Guards(), torch.zeros(2)
  guards.guard_on_host(tensor)
  tensor += 1
  assert guards.key() != ()
  tensor -= 1
  assert guards.key() == ()


def test_a_collected_host_value_increments_the_edition():
  guards, tensor = Guards(), torch.zeros(2)
  guards.guard_on_host(tensor)
  del tensor
  gc.collect()
  assert guards.key() == (1,)


def test_an_array_too_large_to_compare_is_refused(monkeypatch):
  monkeypatch.setattr(module_of_guards, "MOST_BYTES_OF_ARRAY", 8)
  guards, array = Guards("f"), np.zeros(4)
  guards.guard_on_host(array)
  with (
    pytest.raises(MutationError, match="f closes over a numpy array"),
    guards.watching(lambda module: None),
  ):
    pass


def test_a_number_is_compared_with_its_first_value():
  guards, number = Guards(), Number(1.0)
  guards.guard_on_number(number)
  assert guards.key() == ()
  number.value = 2.0
  assert guards.key() != ()
  assert guards.describe() == {"number": "2.0"}


def test_outer_function_has_the_guards_of_the_inner_one():
  outer, (inner, module) = Guards(), _with_module()
  outer.guard_on_function(inner)
  assert outer.key() == ()
  module.eval()
  assert outer.key() != ()
  assert any(name.startswith("f: ") for name in outer.describe())


def test_modules_that_run_in_a_trace_are_guarded_on():
  guards, module, met = Guards(), nn.ReLU(), []
  with guards.watching(met.append):
    module(torch.zeros(1))
  module(torch.zeros(1))
  assert met == [module]
  assert [path for path, _ in guards.modules] == ["ReLU"]


def test_an_attribute_changed_by_each_trace_is_not_guarded():
  guards, module = Guards("f"), nn.Module()
  module.count = 0
  guards.guard_on_module(module)
  with pytest.warns(UserWarning, match="f changes Module.count each time"):
    for _ in range(MOST_CHANGES):
      with guards.watching(lambda module: None):
        module.count += 1
  guards.key()
  module.count += 1
  assert guards.key() == ()


def test_guards_follow_a_function_at_an_address_used_again(monkeypatch):
  outer, first = Guards(), Guards()
  # One number for all objects replaces an address that is used again.
  monkeypatch.setattr(module_of_guards, "id", lambda value: 7, raising=False)
  outer.guard_on_function(first)
  del first
  gc.collect()
  second, module = _with_module()
  outer.guard_on_function(second)
  before = outer.key()
  monkeypatch.undo()
  module.p = 0.25
  assert outer.key() != before
