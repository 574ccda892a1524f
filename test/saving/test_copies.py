"""Copies and pickles of jax tensors, also in other processes."""

import copy
import pickle

import cloudpickle
import pytest
import torch
from compare import assert_same
from saving.saved_tensors import BASE, all_kinds, same_bits
from spawned import answer

from torchax.tensor import Tensor

COPIES = {
  "pickle": lambda value: pickle.loads(pickle.dumps(value)),
  "pickle 2": lambda value: pickle.loads(pickle.dumps(value, protocol=2)),
  "cloudpickle": lambda value: pickle.loads(cloudpickle.dumps(value)),
  "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
def test_copies_keep_class_values_and_attributes(way):
  copied = way(all_kinds("jax"))
  for name, expected in all_kinds("cpu").items():
    assert isinstance(copied[name], Tensor), name
    assert same_bits(copied[name], expected), name
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
