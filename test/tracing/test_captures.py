"""`Captures` of tensors and numbers, constructed by hand without tracing a function."""

import gc

import pytest
import torch
from torch import nn

from torchax.core.boundary import Boundary
from torchax.core.host_numbers import Entry
from torchax.tracing.captures import Captures, Numbers, module_of, reachable
from torchax.tracing.guards import Guards

pytestmark = pytest.mark.usefixtures("env")


def _tensor(value: float = 0.0, **options) -> torch.Tensor:
  return torch.full((2,), value, device="jax", **options)


def _arrays(captures: Captures, guards: Guards | None = None) -> list:
  arrays, _ = captures.operands(guards or Guards())
  return [array.tolist() for array in arrays]


def test_without_tensors_there_are_no_operands_and_no_key():
  assert Captures().operands(Guards()) == ((), None)


def test_operands_are_the_current_arrays():
  tensor = _tensor()
  captures = Captures([tensor])
  assert _arrays(captures) == [[0, 0]]
  tensor.add_(1)
  assert _arrays(captures) == [[1, 1]]


def test_add_captures_each_storage_once_with_a_new_key():
  tensor, other = _tensor(), _tensor()
  captures = Captures([tensor])
  key = captures.key
  captures.add([tensor.detach(), other])
  assert captures.tensors == captures.key.tensors and len(captures.tensors) == 2
  assert captures.key is not key and captures.key.edition == key.edition


def test_a_key_that_was_replaced_has_no_tensors():
  captures = Captures([_tensor()])
  key = captures.key
  captures.drop(captures.tensors)
  gc.collect()
  assert key.tensors == [] and captures.tensors == []


def test_setting_and_clearing_a_gradient_keeps_the_key():
  leaf = _tensor(requires_grad=True)
  leaf.grad = _tensor(1.0)
  captures = Captures([leaf, leaf.grad])
  captures.add_graded([leaf])
  key = captures.key
  assert captures.has_gradients() == (0,)
  leaf.grad = _tensor(2.0)
  assert _arrays(captures) == [[0, 0], [2, 2]]
  leaf.grad = None
  assert _arrays(captures) == [[0, 0]]
  assert captures.key is key and captures.has_gradients() == ()


def test_new_memory_of_a_tensor_keeps_the_edition():
  tensor = _tensor()
  captures = Captures([tensor])
  tensor.data = _tensor(3.0)
  assert _arrays(captures) == [[3, 3]]
  assert captures.key.edition == 0


def test_becoming_a_view_increments_the_edition():
  tensor, whole = _tensor(), torch.ones(2, 2, device="jax")
  captures = Captures([tensor])
  tensor.data = whole[0]
  captures.operands(Guards())
  assert captures.key.edition == 1


def test_the_tensors_of_a_module_are_guessed_once():
  module = nn.Linear(2, 1).to("jax")
  captures = Captures(guess_from=lambda: module)
  assert len(_arrays(captures)) == 2
  assert {id(t) for t in captures.tensors} == set(map(id, module.parameters()))


class _Weight(nn.Parameter):
  pass


def test_parameters_of_subclasses_are_guessed():
  module = nn.Linear(2, 1).to("jax")
  module.bias = _Weight(module.bias.data)
  captures = Captures(guess_from=lambda: module)
  assert len(_arrays(captures)) == 2


def test_a_wrong_guess_is_dropped_after_the_first_trace():
  module = nn.Linear(2, 1).to("jax")
  captures = Captures(guess_from=lambda: module)
  arrays, _ = captures.operands(Guards())
  with Boundary().enter() as boundary:
    for tensor, array in zip(captures.tensors, arrays):
      boundary.lift(tensor._storage, array, tensor)
    module.weight + 1
  wrong = captures.wrong_guesses(boundary, captures.tensors)
  assert len(wrong) == 1 and wrong[0] is module.bias
  assert captures.wrong_guesses(boundary, captures.tensors) == []


def test_a_replaced_parameter_increments_the_edition():
  module, guards = nn.Linear(2, 1).to("jax"), Guards()
  captures = Captures(guess_from=lambda: module)
  with guards.watching(lambda module: None):
    guards.guard_on_module(module)
  captures.operands(guards)
  module.bias = nn.Parameter(_tensor(5.0)[:1].clone())
  assert [5.0] in _arrays(captures, guards)
  assert captures.key.edition == 1


def test_missing_finds_the_storages_met_by_a_trace():
  known, met = _tensor(), _tensor(requires_grad=True)
  captures = Captures([known])
  with Boundary(records=True).enter() as boundary:
    boundary.lift(known._storage, known._storage.array, known)
    known + met.detach()
  (found,) = captures.missing(boundary, captures.tensors)
  assert found._storage is met._storage
  captures.add([found])
  assert captures.missing(boundary, captures.tensors) == []


def test_add_records_leaves_that_are_views():
  leaf = nn.Parameter(torch.ones(2, 2, device="jax")[0])
  captures = Captures()
  captures.add([], [leaf])
  assert captures.view_leaves == {id(leaf._storage): [leaf]}


def test_modules_that_a_function_refers_to_are_reachable():
  module = nn.Linear(2, 1)
  for function in (lambda x, m=module: m(x), module.forward):
    found = [value for value in reachable(function) if isinstance(value, nn.Module)]
    assert found == [module]
  assert module_of(module) is module and module_of(module.forward) is module
  assert module_of(len) is None


def _optimizer(lr: float) -> torch.optim.Optimizer:
  return torch.optim.SGD([nn.Parameter(torch.ones(1, device="cpu"))], lr)


def test_numbers_are_added_once_and_follow_the_optimizer():
  optimizer, numbers = _optimizer(0.5), Numbers()
  numbers.add([Entry(optimizer, 0, "lr")])
  numbers.add([Entry(optimizer, 0, "lr")])
  assert numbers.operands() == (0.5,)
  optimizer.param_groups[0]["lr"] = 0.25
  assert numbers.operands() == (0.25,)
  optimizer.param_groups = [{"lr": 0.125}]  # as `load_state_dict` does
  assert numbers.operands() == (0.125,)


def test_numbers_of_a_collected_optimizer_are_zero():
  optimizer, numbers = _optimizer(0.5), Numbers()
  numbers.add([Entry(optimizer, 0, "lr"), Entry(optimizer, 1, "lr")])
  assert numbers.operands() == (0.5, 0.0)
  del optimizer
  assert numbers.operands() == (0.0, 0.0)


@pytest.mark.usefixtures("strict_mode")  # reads operands
def test_unchanged_numbers_become_arrays():
  optimizer, numbers = _optimizer(0.5), Numbers()
  numbers.add([Entry(optimizer, 0, "lr")])
  numbers.operands()
  (array,) = numbers.operands()
  assert not isinstance(array, float) and float(array) == 0.5
