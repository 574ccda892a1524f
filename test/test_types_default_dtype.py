"""The default dtype of factories, draws, modules and integer arithmetic."""

import jax
import pytest
import torch
from small_tensors import in_environment, ints, rows  # noqa: F401  a fixture

from torchax.interop import jax_jit
from torchax.ops import mappings

pytestmark = pytest.mark.filterwarnings("ignore:.*32 bits wide")


@pytest.fixture(
  name="default", params=[torch.bfloat16, torch.float16, torch.float64], ids=str
)
def _default(request):
  """Set the default dtype; for float64, enable x64 too."""
  torch.set_default_dtype(request.param)
  try:
    with jax.enable_x64(request.param is torch.float64):
      yield request.param
  finally:
    torch.set_default_dtype(torch.float32)


MADE = {
  "zeros": lambda d: torch.zeros(2, device=d),
  "full": lambda d: torch.full((2,), 1.5, device=d),
  "full_of_int": lambda d: torch.full((2,), 1, device=d),
  "eye": lambda d: torch.eye(2, device=d),
  "tensor": lambda d: torch.tensor([1.5, 2], device=d),
  "as_tensor": lambda d: torch.as_tensor([1.5, 2], device=d),
  "asarray": lambda d: torch.asarray([1.5, 2], device=d),
  "tensor_of_int": lambda d: torch.tensor([1, 2], device=d),
  "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
  "arange": lambda d: torch.arange(0, 2, 0.5, device=d),
  "arange_of_int": lambda d: torch.arange(3, device=d),
  "scalar_tensor": lambda d: torch.scalar_tensor(2, device=d),
  "int_by_int": lambda d: ints(d, 1, 3) / ints(d, 2, 2),
  "int_with_float": lambda d: ints(d, 1, 3) * 2.5,
  "sqrt_of_int": lambda d: torch.sqrt(ints(d, 4, 9)),
  "where_of_floats": lambda d: torch.where(ints(d, 0, 1) > 0, 1.0, 0.5),
  "sum_of_bools": lambda d: (ints(d, 0, 1) > 0).sum(),
}


@rows(MADE)
def test_factories_and_integers_follow_the_default_dtype(row, default):
  actual = row("jax")
  assert actual.dtype == stored(row("cpu").dtype)
  torch.testing.assert_close(actual.cpu(), row("cpu").to(actual.dtype))


def stored(dtype: torch.dtype) -> torch.dtype:
  return mappings.j2t_dtype(mappings.t2j_dtype(dtype))


def test_draws_and_modules_have_the_default_dtype(default):
  assert torch.rand(2, device="jax").dtype == default
  assert torch.randn(2, device="jax").dtype == default
  assert torch.nn.Linear(2, 2, device="jax").weight.dtype == default


def test_compiled_function_uses_default_dtype_of_its_call():
  @jax_jit
  def half(x):
    return x / 2, torch.ones(2, device="jax")

  values = ints("jax", 1, 2)
  assert [t.dtype for t in half(values)] == [torch.float32, torch.float32]
  torch.set_default_dtype(torch.bfloat16)
  try:
    assert [t.dtype for t in half(values)] == [torch.bfloat16] * 2
  finally:
    torch.set_default_dtype(torch.float32)
