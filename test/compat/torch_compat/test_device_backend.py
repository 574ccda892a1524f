"""The backend `jax` of torch: its name, kernels and groups of tensors."""

import importlib

import torch
from compare import assert_same

import torchax
from torchax.compat import torch_compat
from torchax.tensor import Tensor


def test_the_backend_has_the_name_jax():
  assert torch._C._get_privateuse1_backend_name() == torch_compat.BACKEND == "jax"
  assert torch.device("jax:0").type == "jax"
  assert torch.jax is torchax.device_module


def test_registering_the_backend_twice_is_harmless():
  torch_compat.register_backend(torchax.device_module)
  assert torch.ones(1, device="jax").device.type == "jax"


def test_generated_methods_exist():
  assert isinstance(torch.ones(2).jax(), Tensor)
  assert not torch.ones(2).is_jax and torch.ones(2, device="jax").is_jax
  assert isinstance(torch.nn.Linear(2, 2).jax().weight, Tensor)


def test_a_kernel_runs_for_factories_without_a_tensor():
  assert_same(torch.ones(2, device="jax"), torch.ones(2))


def test_foreach_groups_have_the_device_that_python_sees():
  group = torch.utils._foreach_utils._group_tensors_by_device_and_dtype
  first, second = torch.ones(2, device="jax"), torch.ones(3, device="jax")
  other = torch.ones(2, dtype=torch.float16, device="jax")
  groups = group([[first, other, second], [None, None, None]], True)
  assert set(groups) == {
    (torch.device("jax:0"), torch.float32),
    (torch.device("jax:0"), torch.float16),
  }
  lists, indices = groups[torch.device("jax:0"), torch.float32]
  assert indices == [0, 2]
  assert lists[0][0] is first and lists[0][1] is second
  plain = group([[torch.ones(2), torch.ones(2, device="meta")]])
  assert {device.type for device, _ in plain} == {"cpu", "meta"}


def test_optimizers_and_clipping_use_foreach_for_jax_tensors():
  parameters = [torch.nn.Parameter(torch.ones(2, device="jax"))]
  choose = importlib.import_module("torch.optim.optimizer")._default_to_fused_or_foreach
  assert choose(parameters, False) == (False, True)
  supports = torch.utils._foreach_utils._has_foreach_support
  assert supports(parameters, parameters[0].device)
  assert not supports(parameters, torch.device("meta"))
