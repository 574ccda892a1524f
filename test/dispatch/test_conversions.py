"""Conversions of jax tensors: numpy, DLPack, Python numbers, text."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from accelerators import cpu_only
from compare import assert_same
from small_tensors import rows

from torchax.ops import mappings
from torchax.tensor import Tensor

pytestmark = [
  pytest.mark.filterwarnings("ignore:.*32 bits wide"),
  pytest.mark.usefixtures("env"),
]

VALUES = torch.tensor([[1.0, 2.0], [0.0, 3.0]])
# No operation computes with packed numbers.
LEFT_OUT = (None, torch.float4_e2m1fn_x2)
DTYPES = tuple(dtype for dtype in mappings.TORCH_DTYPE_TO_JAX if dtype not in LEFT_OUT)


@pytest.fixture(name="x64")
def _x64():
  with jax.enable_x64(True):
    yield


def x(device: str, dtype=torch.float32) -> torch.Tensor:
  return VALUES.to(dtype).to(device)


# Python numbers and text --------------------------------------------------------------

PYTHON = {
  "item": lambda t: t[1, 1].item(),
  "tolist": lambda t: t.tolist(),
  "bool": lambda t: bool(t[1, 0]),
  "float": lambda t: float(t[0, 1]),
  "int": lambda t: int(t[0, 1]),
  "complex": lambda t: complex(t[0, 1]),
  "format": lambda t: f"{t[1, 1]}",
  "length": len,
  "rows": lambda t: [row.tolist() for row in t],
}


@rows(PYTHON)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_python_reads_the_numbers_of_every_dtype(dtype, row, x64):
  expected = row(x("cpu", dtype))
  actual = row(x("jax", dtype))
  assert actual == expected and type(actual) is type(expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_text_matches_torch_and_names_the_device(dtype, x64):
  text = repr(x("cpu", dtype))
  assert repr(x("jax", dtype)) == f"{text[:-1]}, device='jax:0')"
  assert str(x("jax", dtype)) == repr(x("jax", dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_is_its_own_key(dtype):
  t = x("jax", dtype)
  assert {t: 1}[t] == 1 and hash(t) == hash(t)
  assert hash(t) != hash(t.clone())


MORE_PYTHON = {
  "index of a list": lambda d: [10, 20, 30][x(d).int()[0, 1]],
  "slice of a list": lambda d: [10, 20, 30][: x(d).int()[0, 1]],
  "range": lambda d: list(range(x(d).int().sum())),
  "floor": lambda d: math.floor(x(d)[1, 1] / 2),
  "percent": lambda d: f"{x(d)[0, 1]:.2f} {int(x(d)[0, 1]):d}",
  "in": lambda d: (3.0 in x(d), 7.0 in x(d)),
  "equality of ends": lambda d: bool((x(d) == x(d)).all()),
}


@rows(MORE_PYTHON)
def test_tensors_convert_to_python_numbers(row):
  assert row("jax") == row("cpu")


NO_NUMBER = {
  "bool of many": lambda d: bool(x(d)),
  "int of many": lambda d: int(x(d)),
  "item of many": lambda d: x(d).item(),
  "bool of none": lambda d: bool(x(d)[:0]),
  "index by a float": lambda d: [1, 2][x(d)[0, 0]],
  "int of nan": lambda d: int(x(d)[0, 0] * torch.nan),
  "float of complex": lambda d: float(x(d, torch.complex64)[0, 0] * 1j),
  "length of 0-d": lambda d: len(x(d)[0, 0]),
  "format of many": lambda d: f"{x(d):.2f}",
}


@rows(NO_NUMBER)
def test_conversion_to_a_number_raises_as_in_torch(row):
  with pytest.raises((RuntimeError, TypeError, ValueError)) as expected:
    row("cpu")
  with pytest.raises(expected.type):
    row("jax")


# numpy --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numpy_gets_every_dtype(dtype, x64):
  """A dtype that torch does not convert to numpy gets the dtype of JAX's conversion."""
  array = np.asarray(x("jax", dtype))
  assert array.dtype == mappings.t2j_dtype(dtype)
  assert array.astype(np.complex64).tolist() == x("cpu", dtype).cfloat().tolist()
  assert x("jax", dtype).numpy().dtype == array.dtype


NUMPY = {
  "asarray of dtype": lambda d: np.asarray(x(d), dtype=np.float16),
  "array": lambda d: np.array(x(d)),
  "ufunc": lambda d: np.add(np.ones((2, 2), np.float32), x(d)),
  "stack": lambda d: np.stack([x(d), x(d)]),
  "sum": lambda d: np.sum(x(d).numpy()),
}


# numpy's message about torch's own `__array__`.
@pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")
@rows(NUMPY)
def test_numpy_functions_take_jax_tensors(row):
  actual, expected = np.asarray(row("jax")), np.asarray(row("cpu"))
  assert actual.dtype == expected.dtype and actual.tolist() == expected.tolist()


def test_conversion_to_an_array_copies_and_copy_false_raises():
  t = x("jax")
  np.asarray(t)[:] = 0
  assert_same(t, VALUES)
  with pytest.raises(ValueError, match="copy=False"):
    np.array(t, copy=False)


def test_numpy_scalars_act_as_numbers():
  for number in (np.float32(2), np.float64(2), np.int64(2), np.bool_(True)):
    assert_same(x("jax") * number, x("cpu") * number)


ARRAYS = [
  np.ones(2, dtype)
  for dtype in ("bool", "uint8", "uint16", "int16", "int64", "float16", "float32")
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.dtype))
def test_arrays_become_tensors_of_their_dtype(array):
  expected = torch.from_numpy(array)
  for make in (
    lambda: torch.from_numpy(array).to("jax"),
    lambda: torch.as_tensor(array, device="jax"),
    lambda: torch.asarray(array, device="jax"),
    lambda: torch.tensor(array, device="jax"),
  ):
    assert_same(make(), expected)


# Tensors from tensors -----------------------------------------------------------------


def test_as_tensor_and_asarray_of_a_jax_tensor_are_the_tensor():
  t = x("jax")
  assert torch.as_tensor(t) is t and torch.asarray(t) is t
  assert_same(torch.as_tensor(t, device="jax", dtype=torch.float32), VALUES)
  assert torch.asarray(t, copy=True) is not t
  assert_same(torch.as_tensor(t, dtype=torch.float16), VALUES.half())


@pytest.mark.parametrize("make", [torch.as_tensor, torch.asarray])
def test_a_jax_tensor_goes_to_the_cpu_when_asked(make):
  moved = make(x("jax"), device="cpu")
  assert moved.device.type == "cpu" and torch.equal(moved, VALUES)


NESTED = {
  "0-d tensors": lambda d: torch.tensor([x(d)[0, 0], x(d)[0, 1]], device=d),
  "1-d tensors": lambda d: torch.tensor([x(d)[:1, 0], 2.5, x(d)[0, 1:2]], device=d),
  "rows of them": lambda d: torch.tensor([[x(d)[0, 0]], [x(d)[0, 1]]], device=d),
  "mixed": lambda d: torch.tensor([x(d)[0, 0], 2.5], device=d),
  "asarray": lambda d: torch.asarray([1.5, 2], device=d, requires_grad=True).detach(),
}


@rows(NESTED)
def test_lists_of_tensors_become_tensors(row):
  assert_same(row("jax"), row("cpu"))


# DLPack -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_dlpack_exports_a_copy(dtype):
  t = x("jax", dtype)
  exported = torch.from_dlpack(t)
  assert type(exported) is torch.Tensor
  assert torch.equal(exported.cpu(), x("cpu", dtype))  # on CUDA if JAX is
  exported.zero_()
  assert_same(t, x("cpu", dtype))
  assert jnp.from_dlpack(t).tolist() == VALUES.tolist()


@cpu_only("numpy reads no memory of other devices")
def test_numpy_takes_dlpack():
  assert np.from_dlpack(x("jax")).tolist() == VALUES.tolist()


def test_dlpack_raises_for_requires_grad_and_copy_false():
  with pytest.raises(BufferError, match="detach"):
    torch.from_dlpack(x("jax").requires_grad_())
  with pytest.raises(BufferError, match="copy"):
    x("jax").__dlpack__(copy=False)


def test_jax_functions_take_tensors():
  array = jnp.asarray(x("jax"))
  assert not isinstance(array, Tensor) and array.tolist() == VALUES.tolist()
