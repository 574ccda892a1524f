"""`torchax.memory_by_module`: bytes of each kind of tensor, with shared ones once."""

import pytest
import torch

import torchax


def model(device="jax"):
  layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
  return torch.nn.Sequential(layers, torch.nn.Linear(3, 1)).to(device)


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_bytes_are_those_of_the_tensors(device):
  trained = model(device)
  optimizer = torch.optim.AdamW(trained.parameters(), capturable=device == "jax")
  trained(torch.ones(4, 2, device=device)).sum().backward()
  optimizer.step()
  found = torchax.memory_by_module(trained, optimizer)
  linear = found["0.0"]
  assert linear.parameters == linear.gradients == 4 * (2 * 3 + 3)
  assert linear.optimizer_state == 2 * linear.parameters + 2 * 4  # a count for each
  assert found["0.1"].buffers == sum(b.nbytes for b in trained.buffers())
  assert next(iter(found)) == "0.0"


def test_depth_adds_up_inner_modules():
  found = torchax.memory_by_module(model(), depth=1)
  every = torchax.memory_by_module(model())
  assert found["0"].total == every["0.0"].total + every["0.1"].total


def test_shared_parameters_count_once():
  first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
  second.weight = first.weight
  found = torchax.memory_by_module(torch.nn.Sequential(first, second))
  assert (found["0"].parameters, found["1"].parameters) == (48, 12)


def test_tensors_of_the_outermost_module_have_an_empty_path():
  assert list(torchax.memory_by_module(torch.nn.Linear(2, 2))) == [""]
