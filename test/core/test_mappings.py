"""Dtypes and data between torch and JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ops.harness import NARROWED, floats, ints

from torchax.errors import UnsupportedDtypeError
from torchax.ops import mappings

pytestmark = pytest.mark.filterwarnings("ignore:.*32 bits wide")

DTYPES = [dtype for dtype in mappings.TORCH_DTYPE_TO_JAX if dtype is not None]
WIDE = (torch.int64, torch.float64, torch.complex128)
FLOAT8 = [dtype for dtype in DTYPES if "float8" in str(dtype)]


# Dtypes -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_comes_back_as_wide_as_x64_allows(dtype):
  assert mappings.j2t_dtype(mappings.t2j_dtype(dtype)) == NARROWED.get(dtype, dtype)
  with jax.enable_x64(True):
    assert mappings.j2t_dtype(mappings.t2j_dtype(dtype)) == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_worlds_give_a_dtype_one_width(dtype):
  with jax.enable_x64(True):
    assert mappings.t2j_dtype(dtype).itemsize == dtype.itemsize


def test_none_means_no_dtype():
  assert mappings.t2j_dtype(None) is None


@pytest.mark.parametrize("dtype", [jnp.float32, np.float32, np.dtype("float32")])
def test_numpy_and_jax_spellings_are_one_dtype(dtype):
  assert mappings.j2t_dtype(dtype) == torch.float32


def test_four_bit_integers_show_as_bytes():
  assert mappings.j2t_dtype(jnp.int4) == torch.int8
  assert mappings.j2t_dtype(jnp.uint4) == torch.uint8
  assert mappings.j2t(jnp.array([1, -2, 3], jnp.int4)).tolist() == [1, -2, 3]


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, "float32"], ids=str)
def test_a_dtype_unknown_to_jax_is_named_with_the_known_ones(dtype):
  with pytest.raises(UnsupportedDtypeError, match="torch.bfloat16") as error:
    mappings.t2j_dtype(dtype)
  assert str(dtype) in str(error.value)


def test_a_dtype_unknown_to_torch_is_named():
  with pytest.raises(UnsupportedDtypeError, match="key"):
    mappings.j2t_dtype(jax.random.key(0).dtype)
  with pytest.raises(UnsupportedDtypeError, match="datetime64"):
    mappings.j2t_dtype(np.dtype("datetime64[s]"))


# Data ---------------------------------------------------------------------------------


def values_of(dtype: torch.dtype) -> torch.Tensor:
  if dtype == torch.bool:
    return ints(2, 3, high=2).bool()
  if dtype == torch.float4_e2m1fn_x2:
    return ints(2, 3, high=256).to(torch.uint8).view(dtype)
  if dtype.is_floating_point or dtype.is_complex:
    return floats(2, 3).to(dtype)
  return ints(2, 3).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
  return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("use_dlpack", [False, True], ids=["numpy", "dlpack"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_round_trip_keeps_every_bit(dtype, use_dlpack):
  values = values_of(dtype)
  with jax.enable_x64(True):
    array = mappings.t2j(values, use_dlpack)
    back = mappings.j2t(array, use_dlpack)
  assert array.shape == (2, 3)
  assert back.dtype == dtype
  assert bits(back) == bits(values)


@pytest.mark.parametrize("device", ["jax", "cpu"])
def test_j2t_copies_tensors_to_the_cpu(device):
  tensor = torch.ones(2, 3).to(device).requires_grad_()
  copy = mappings.j2t(tensor)
  assert type(copy) is torch.Tensor and copy.device.type == "cpu"
  assert not copy.requires_grad
  copy.zero_()
  assert tensor.sum().item() == 6.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, *FLOAT8], ids=str)
def test_special_values_survive(dtype):
  values = torch.tensor([0.0, -0.0, 1.0, torch.nan, torch.inf, 448.0]).to(dtype)
  assert bits(mappings.j2t(mappings.t2j(values))) == bits(values)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_shape_survives(shape, dtype):
  back = mappings.j2t(mappings.t2j(torch.ones(shape, dtype=dtype)))
  assert back.shape == shape and back.dtype == dtype


LAYOUTS = {
  "transposed": lambda t: t.t(),
  "sliced": lambda t: t[:, ::2],
  "expanded": lambda t: t[:1].expand(3, 3),
  "offset": lambda t: t[1:],
  "conjugated": lambda t: torch.complex(t.float(), t.float()).conj(),
  "negated": lambda t: torch.complex(t.float(), t.float()).conj().imag,
  "requires_grad": lambda t: t.clone().requires_grad_(),
  "parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_layout_moves_by_its_numbers(layout, dtype):
  values = layout(floats(2, 3).to(dtype))
  back = mappings.j2t(mappings.t2j(values))
  assert torch.equal(back, values.detach().resolve_conj().resolve_neg())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_neither_side_aliases_the_other(dtype):
  values = torch.ones(64, dtype=dtype)
  array = mappings.t2j(values)
  values.zero_()
  assert float(array.sum()) == 64
  back = mappings.j2t(array)
  back.zero_()
  assert float(array.sum()) == 64


# Values that cannot be converted ----------------------------------------------------


def test_an_integer_that_needs_64_bits_is_never_cut():
  with pytest.raises(OverflowError, match="jax_enable_x64"):
    mappings.t2j(torch.tensor([1, 2**40]))
  with pytest.raises(OverflowError, match="jax_enable_x64"):
    mappings.t2j(torch.tensor([-(2**31) - 1]))
  assert mappings.t2j(torch.tensor([2**31 - 1, -(2**31)])).tolist() == [
    2**31 - 1,
    -(2**31),
  ]
  with jax.enable_x64(True):
    assert mappings.t2j(torch.tensor([2**40])).tolist() == [2**40]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_sparse_or_quantised_tensor_is_refused():
  with pytest.raises(UnsupportedDtypeError, match=r"to_dense\(\)"):
    mappings.t2j(torch.eye(2).to_sparse())
  quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
  with pytest.raises(UnsupportedDtypeError, match=r"dequantize\(\)"):
    mappings.t2j(quantised)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_is_refused(layout):
  nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
  with pytest.raises(UnsupportedDtypeError, match="to_padded_tensor"):
    mappings.t2j(nested)


def test_a_conversion_on_the_way_is_made_by_torch():
  values = torch.tensor([2**40, 3])
  assert mappings.t2j(values, dtype=torch.float32).tolist() == [2.0**40, 3.0]
  with pytest.raises(UnsupportedDtypeError, match="complex32"):
    mappings.t2j(values, dtype=torch.complex32)


def test_a_tensor_without_data_is_refused():
  with pytest.raises(NotImplementedError, match="no data"):
    mappings.t2j(torch.empty(2, device="meta"))
  with pytest.raises(NotImplementedError, match="no data"):
    torch.empty(2, device="meta").to("jax")
  with pytest.raises(NotImplementedError, match="use torch.nn.Module.to_empty"):
    torch.nn.Linear(2, 2, device="meta").to("jax")
