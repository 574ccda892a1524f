"""Conversions leave the storages of CPU tensors resizable."""

import numpy as np
import pytest
import torch
from small_tensors import rows

import torchax
from torchax.core import host_memory, mappings

pytestmark = pytest.mark.filterwarnings("ignore:.*32 bits wide")

VALUES = torch.arange(6.0).reshape(2, 3)
# No operation computes with packed numbers.
LEFT_OUT = (None, torch.float4_e2m1fn_x2)
DTYPES = tuple(dtype for dtype in mappings.TORCH_DTYPE_TO_JAX if dtype not in LEFT_OUT)


def _compiled(tensor):
  return torch.compile(lambda x: x * 2, backend="jax")(tensor)


def _index(tensor):
  return torch.ones(7).to("jax")[tensor.long()]


def _copied_into(tensor):
  return torch.zeros(2, 3).to("jax").copy_(tensor)


def _in_environment(tensor):
  with torchax.default_env():
    return torch.as_tensor(tensor, device="jax").cpu()


def _closed_over(tensor):
  function = torchax.interop.jax_jit(lambda x: x + tensor.sum().item())
  with torchax.default_env():
    return function(torch.ones(3).to("jax"))


READS = {
  "t2j": mappings.t2j,
  "t2j through numpy": lambda tensor: mappings.t2j(tensor, use_dlpack=False),
  "to": lambda tensor: tensor.to("jax"),
  "copy_": _copied_into,
  "Parameter.to": lambda tensor: torch.nn.Parameter(tensor).to("jax"),
  "torch.compile": _compiled,
  "index": _index,
  "as_tensor": _in_environment,
  "values that a jitted function reads": _closed_over,
  "values_for_jax": mappings.values_for_jax,
}


@rows(READS)
def test_conversion_leaves_its_source_resizable(row):
  tensor = VALUES.clone()
  row(tensor)
  tensor.untyped_storage().resize_(0)
  assert tensor.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_array_is_unchanged_when_its_source_is_freed(dtype):
  tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(dtype)
  expected, array = tensor.tolist(), mappings.t2j(tensor)
  tensor.untyped_storage().resize_(0)
  assert array.tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_on_the_cpu_is_resizable(dtype):
  moved = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(dtype).to("jax")
  copy = moved.cpu()
  assert copy.dtype == moved.dtype and copy.tolist() == moved.tolist()
  expected = moved.tolist()
  copy.untyped_storage().resize_(0)
  assert moved.tolist() == expected


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (4, 1)])
def test_tensor_of_copies_arrays_of_every_shape(shape):
  values = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
  tensor = host_memory.tensor_of(values, torch.float32)
  assert tensor.shape == shape and tensor.untyped_storage().resizable()
  assert torch.equal(tensor, torch.from_numpy(values))


def test_array_of_shares_memory():
  tensor = VALUES.clone()
  array = host_memory.array_of(tensor.t())
  tensor[0, 1] = 9.0
  assert array[1, 0] == 9.0


def test_array_of_names_a_dtype_that_numpy_lacks():
  with pytest.raises(TypeError, match="no dtype for torch.bfloat16"):
    host_memory.array_of(VALUES.bfloat16())


def test_freed_tensor_is_a_changed_value_for_a_jitted_function():
  weight = VALUES.clone()
  function = torchax.interop.jax_jit(lambda x: x + weight[0, 2].item())
  with torchax.default_env():
    x = torch.ones(2).to("jax")
    assert function(x).tolist() == [3.0, 3.0]
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(24)
    weight.fill_(5.0)
    assert function(x).tolist() == [6.0, 6.0]
