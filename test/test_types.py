"""Dtypes: default, conversions, bits, integer arithmetic and limits."""

import math

import jax
import pytest
import torch
import torch.nn.functional as F
from compare import assert_close, assert_same
from ops.harness import floats

import torchax
from torchax.compat import versions
from torchax.errors import MixedDeviceError, UnsupportedDtypeError
from torchax.interop import jax_jit
from torchax.ops import mappings

pytestmark = pytest.mark.filterwarnings("ignore:.*32 bits wide")

f16, f32, i8 = torch.float16, torch.float32, torch.int8
FLOAT8 = tuple(dtype for dtype in mappings.TORCH_DTYPE_TO_JAX if "float8" in str(dtype))
NUMBER_DTYPES = tuple(
  dtype
  for dtype in mappings.TORCH_DTYPE_TO_JAX
  if dtype is not None and dtype not in FLOAT8
)


@pytest.fixture(autouse=True)
def _inside_the_environment():
  with torchax.default_env():
    yield


def rows(table: dict):
  return pytest.mark.parametrize("row", table.values(), ids=table)


def agree(actual, expected):
  """Assert that the tensor or value equals the one of the CPU."""
  if isinstance(expected, torch.Tensor):
    assert_same(actual, expected)
  else:
    assert actual == expected and type(actual) is type(expected)


# Default dtype ------------------------------------------------------------------------


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


def ints(device: str, *values, dtype=torch.int32) -> torch.Tensor:
  return torch.tensor(values, dtype=dtype).to(device)


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

  x = ints("jax", 1, 2)
  assert [t.dtype for t in half(x)] == [f32, f32]
  torch.set_default_dtype(torch.bfloat16)
  try:
    assert [t.dtype for t in half(x)] == [torch.bfloat16] * 2
  finally:
    torch.set_default_dtype(f32)


# `.to` and its relatives --------------------------------------------------------------

DATA = torch.tensor([[1.5, -2.5], [3.0, 0.0]])


def x(device: str) -> torch.Tensor:
  return DATA.to(device)


def other(device: str) -> torch.Tensor:
  return torch.zeros(1, dtype=i8).to(device)


FORMS_OF_TO = {
  "nothing": lambda d: x(d).to(),
  "dtype": lambda d: x(d).to(f16),
  "dtype non_blocking": lambda d: x(d).to(f16, True),
  "dtype non_blocking copy": lambda d: x(d).to(f16, False, True),
  "dtype=": lambda d: x(d).to(dtype=f16, copy=True),
  "dtype and all keywords": lambda d: x(d).to(
    f16, non_blocking=True, copy=True, memory_format=torch.preserve_format
  ),
  "device": lambda d: x(d).to(torch.device(d)),
  "device copy=": lambda d: x(d).to(d, copy=True),
  "device dtype": lambda d: x(d).to(d, f16),
  "device dtype non_blocking": lambda d: x(d).to(d, f16, True),
  "device dtype non_blocking copy": lambda d: x(d).to(d, f16, False, True),
  "device dtype copy=": lambda d: x(d).to(d, f16, copy=True),
  "device= dtype=": lambda d: x(d).to(device=d, dtype=f16),
  "None dtype": lambda d: x(d).to(None, f16),
  "device None": lambda d: x(d).to(d, None),
  "tensor": lambda d: x(d).to(other(d)),
  "tensor non_blocking copy": lambda d: x(d).to(other(d), False, True),
  "tensor copy=": lambda d: x(d).to(other(d), copy=True),
  "memory_format": lambda d: x(d).to(memory_format=torch.contiguous_format),
  "from the CPU, all": lambda d: DATA.to(d, f16, True, True),
  "from the CPU, copy=": lambda d: DATA.to(d, f16, copy=True),
  "from the CPU, tensor": lambda d: DATA.to(other(d)),
  "to the CPU, dtype": lambda d: x(d).to("cpu", f16, copy=True).to(d),
  "type dtype": lambda d: x(d).type(f16),
  "type dtype=": lambda d: x(d).type(dtype=f16, non_blocking=True),
  "type_as": lambda d: x(d).type_as(other(d)),
  "float": lambda d: x(d).to(f16).float(),
  "half": lambda d: x(d).half(),
  "bfloat16": lambda d: x(d).bfloat16(),
  "double": lambda d: x(d).double(),
  "int": lambda d: x(d).int(),
  "long": lambda d: x(d).long(),
  "short": lambda d: x(d).short(),
  "char": lambda d: x(d).char(),
  "byte": lambda d: x(d).byte(),
  "bool": lambda d: x(d).bool(),
  "cfloat": lambda d: x(d).cfloat(),
  "cdouble": lambda d: x(d).cdouble(),
  "memory_format of float": lambda d: x(d).float(memory_format=torch.preserve_format),
  "new_tensor": lambda d: x(d).new_tensor([1, 2]),
  "new_full": lambda d: x(d).new_full((2,), 3, dtype=i8),
  "gradient": lambda d: gradient_through(lambda t: t.to(f16), d),
  "gradient across devices": lambda d: gradient_through(
    lambda t: t.to("cpu", torch.float64), d
  ),
  "gradient through complex": lambda d: gradient_through(
    lambda t: t.to(torch.complex64).real, d
  ),
}


def gradient_through(convert, device: str) -> torch.Tensor:
  leaf = x(device).requires_grad_()
  return torch.autograd.grad(convert(leaf).sum(), leaf)[0]


@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@rows(FORMS_OF_TO)
def test_every_conversion_signature_equals_torch(row):
  assert_same(row("jax"), row("cpu"))


def test_conversion_without_a_change_returns_same_tensor():
  t = x("jax")
  same = (
    *(t.to(), t.to("jax"), t.to(f32), t.to("jax", f32, True), t.to(t)),
    *(t.float(), t.type(f32), t.type_as(t), t.to(None, f32)),
  )
  assert all(converted is t for converted in same)


COPIES = {
  "device": lambda t: t.to("jax", copy=True),
  "dtype": lambda t: t.to(f32, copy=True),
  "positional": lambda t: t.to("jax", f32, False, True),
  "dtype_positional": lambda t: t.to(f32, False, True),
  "tensor": lambda t: t.to(t, copy=True),
}


@rows(COPIES)
def test_requested_copy_has_its_own_memory(row):
  t = x("jax")
  row(t).zero_()
  assert_same(t, DATA)


WRONG_TO = {
  "too many": lambda d: x(d).to(d, f16, False, True, 1),
  "unknown device": lambda d: x(d).to("nonsense"),
  "unknown keyword": lambda d: x(d).to(foo=1),
  "two dtypes": lambda d: x(d).to(f16, f16),
  "unknown type": lambda d: x(d).type("torch.FooTensor"),
}


@rows(WRONG_TO)
def test_wrong_conversion_arguments_raise_like_torch(row):
  with pytest.raises((RuntimeError, TypeError, ValueError)) as expected:
    row("cpu")
  with pytest.raises(expected.type):
    row("jax")


def test_type_name_contains_jax_and_converts_back():
  t = x("jax").half()
  assert t.type() == "torch.jax.HalfTensor"
  assert_same(x("jax").type(t.type()), DATA.half())
  with pytest.raises(ValueError, match="FooTensor"):
    t.type("torch.jax.FooTensor")


@pytest.mark.parametrize("kind", [torch.LongTensor, "torch.LongTensor"], ids=str)
def test_cpu_tensor_type_moves_to_the_cpu(kind):
  moved = x("jax").type(kind)
  assert moved.device.type == "cpu"
  assert torch.equal(moved, DATA.type(kind))


def test_cpu_tensor_is_converted_before_narrowing():
  large = torch.tensor([2**40, -1])
  assert_same(large.to("jax", torch.float32), large.float())
  assert_same(torch.zeros(2, device="jax").copy_(large), large.float())


MODULES = {
  "device_dtype": lambda m, d: m.to(d, f16),
  "keywords": lambda m, d: m.to(device=d, dtype=f16, non_blocking=True),
  "tensor": lambda m, d: m.to(x(d).half()),
  "half": lambda m, d: m.to(d).half(),
  "type": lambda m, d: m.to(d).type(f16),
}


@rows(MODULES)
def test_module_conversion_casts_floating_point_tensors(row):
  module = row(torch.nn.BatchNorm1d(2), "jax")
  dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
  assert dtypes.pop("num_batches_tracked") in (torch.int32, f16, torch.int64)
  assert set(dtypes.values()) == {f16}
  assert all(t.device.type == "jax" for t in module.state_dict().values())


# What a dtype says of itself ----------------------------------------------------------

FACTS = {
  "limits": lambda t: (
    str(torch.finfo(t.dtype))
    if t.is_floating_point() or t.is_complex()
    else str(torch.iinfo(t.dtype))
  ),
  "kinds": lambda t: (t.is_floating_point(), t.is_complex(), t.is_signed()),
  "functions": lambda t: (torch.is_floating_point(t), torch.is_complex(t)),
  "sizes": lambda t: (t.element_size(), t.itemsize, t.nbytes),
  "real": lambda t: t.dtype.to_real(),
}


@pytest.mark.parametrize("ask", FACTS.values(), ids=FACTS)
@pytest.mark.parametrize("dtype", (*NUMBER_DTYPES, *FLOAT8), ids=str)
def test_dtype_predicates_equal_torch(dtype, ask):
  if dtype is torch.bool and ask is FACTS["limits"]:
    dtype = torch.uint8  # bool has no limits in torch either
  values = torch.ones(3).to(dtype)
  with jax.enable_x64(True):
    agree(ask(values.to("jax")), ask(values))


@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@pytest.mark.parametrize("dtype", (*NUMBER_DTYPES, *FLOAT8), ids=str)
def test_structural_operations_support_every_dtype(dtype):
  values = torch.tensor([1.0, 2.0, 0.0]).to(dtype)
  with jax.enable_x64(True):
    t = values.to("jax")
    for function in (
      torch.zeros_like,
      torch.clone,
      lambda t: torch.cat([t, t[1:]]),
      lambda t: torch.stack([t, t]),
      lambda t: t == t,
      lambda t: t.float(),
    ):
      bits_agree(function(t), function(values))


def bits_agree(actual, expected):
  assert actual.dtype == expected.dtype
  actual = actual.cpu()
  assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


# Conversions of values ----------------------------------------------------------------

EVERY_BYTE = torch.arange(256, dtype=torch.uint8)
WIDE_RANGE = torch.cat(
  [
    floats(400, low=-1, high=1) * torch.exp2(floats(400, seed=1, low=-14, high=18)),
    torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 448, 464, 465, 480]),
    torch.tensor([240.0, 248, 57344, 61440, 61441, 65536, 2**-9, 2**-10, 1.5, 3]),
  ]
)


@pytest.mark.parametrize("source", [f32, f16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_8_bit_floats_round_and_saturate_like_torch(dtype, source):
  values = WIDE_RANGE.to(source)
  if versions.is_older(torch.__version__, "2.13"):
    # There torch gives NaN for what float8_e4m3fn cannot hold; here it saturates.
    values = values[values.abs() <= torch.finfo(dtype).max]
  expected = values.to(dtype).float()
  assert_close(values.to("jax").to(dtype).float().cpu(), expected)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_every_8_bit_float_keeps_bits_and_value(dtype):
  values = EVERY_BYTE.view(dtype)
  t = values.to("jax")
  assert torch.equal(t.cpu().view(torch.uint8), EVERY_BYTE)
  assert_close(t.float().cpu(), values.float())


CASTS = {
  "float to int": (DATA, torch.int32),
  "float to int8": (torch.tensor([300.0, -129, 127.9]), i8),
  "float to uint8": (torch.tensor([300.0, -1, 255.9]), torch.uint8),
  "float to int16": (torch.tensor([70000.0, -70000]), torch.int16),
  "float to bool": (torch.tensor([0.0, -0.0, torch.nan, 0.1]), torch.bool),
  "float to half": (torch.tensor([65519.0, 65520, 1e-8, 6e-8, torch.nan]), f16),
  "float to bfloat16": (torch.tensor([1.00390625, 1.01171875, 3.4e38]), torch.bfloat16),
  "int to int8": (torch.tensor([300, -129, 2**31 - 1], dtype=torch.int32), i8),
  "int to uint8": (torch.tensor([300, -1], dtype=torch.int32), torch.uint8),
  "int to half": (torch.tensor([70000, 2049, -70000], dtype=torch.int32), f16),
  "int to bool": (torch.tensor([256, 0], dtype=torch.int32), torch.bool),
  "int to complex": (torch.tensor([2, -3], dtype=torch.int32), torch.complex64),
  "complex to bool": (torch.tensor([0j, 1j]), torch.bool),
}


@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@rows(CASTS)
def test_cast_equals_torch(row):
  values, dtype = row
  assert_same(values.to("jax").to(dtype), values.to(dtype))


BIT_CASTS = {
  "float to int32": (f32, torch.int32),
  "float to int16": (f32, torch.int16),
  "float to bytes": (f32, torch.uint8),
  "bytes to int16": (torch.uint8, torch.int16),
  "bytes to float": (torch.uint8, f32),
  "half to uint16": (f16, torch.uint16),
  "bfloat16 to int16": (torch.bfloat16, torch.int16),
  "int16 to bfloat16": (torch.int16, torch.bfloat16),
  "half to bfloat16": (f16, torch.bfloat16),
  "float to complex": (f32, torch.complex64),
  "complex to float": (torch.complex64, f32),
  "float8 to bytes": (torch.float8_e4m3fn, torch.uint8),
  "bytes to float8": (torch.uint8, torch.float8_e5m2),
  "bool to bytes": (torch.bool, torch.uint8),
  "itself": (f32, f32),
}


@rows(BIT_CASTS)
def test_a_view_of_another_dtype_shows_the_same_bits(row):
  source, target = row
  values = torch.tensor([[1.5, 2.0, 0.0, 1.0], [0.0, 1.0, 1.0, 2.0]]).to(source)
  bits_agree(values.to("jax").view(target), values.view(target))


def test_write_to_dtype_view_changes_bits_of_the_base():
  expected, actual = DATA.clone(), x("jax").clone()
  for t in (expected, actual):
    t.view(torch.int32)[0].fill_(0x3F800000)
  assert_same(actual, expected)


# Integers -----------------------------------------------------------------------------


def i(device: str, *values, dtype=torch.int32) -> torch.Tensor:
  return torch.tensor(values, dtype=dtype).to(device)


def u8(device: str, *values) -> torch.Tensor:
  return i(device, *values, dtype=torch.uint8)


SIGNS = (-7, -1, 0, 1, 7, 127, -128), (2, -2, 3, -3, -2, -1, -1)


def divided(function):
  return lambda d: function(i(d, *SIGNS[0], dtype=i8), i(d, *SIGNS[1], dtype=i8))


INTEGERS = {
  "div": divided(torch.div),
  "div floor": divided(lambda a, b: torch.div(a, b, rounding_mode="floor")),
  "div trunc": divided(lambda a, b: torch.div(a, b, rounding_mode="trunc")),
  "remainder": divided(torch.remainder),
  "fmod": divided(torch.fmod),
  "number % tensor": lambda d: 5 % i(d, 3, -3),
  "number // tensor": lambda d: 5 // i(d, 3, -3),
  "float %": lambda d: (
    torch.tensor([-7.5, 7.5, 3, torch.inf]).to(d) % torch.tensor([2.0, -2, 0, 2]).to(d)
  ),
  "float //": lambda d: (
    torch.tensor([-7.5, 7.5, 3, -3, 0]).to(d) // torch.tensor([2.0, -2, 0, 0, 0]).to(d)
  ),
  "<<": lambda d: i(d, 1, 1, -1, 3) << i(d, 1, 31, 4, 2),
  "<< out of range": lambda d: i(d, 1, 1, 1, -1) << i(d, 32, 33, -1, 40),
  ">>": lambda d: i(d, 8, -8, -1) >> i(d, 1, 1, 5),
  ">> out of range": lambda d: i(d, 8, 8, -8, -8) >> i(d, 32, -1, 40, -1),
  "uint8 <<": lambda d: u8(d, 255, 1, 1) << u8(d, 1, 7, 8),
  "uint8 >>": lambda d: u8(d, 255, 128, 1) >> u8(d, 1, 7, 8),
  "overflow": lambda d: i(d, 2**31 - 1, 2**30) * i(d, 2, 4),
  "int8 overflow": lambda d: i(d, 127, dtype=i8) + i(d, 1, dtype=i8),
  "uint8 below zero": lambda d: u8(d, 0, 1) - 2,
  "-uint8": lambda d: -u8(d, 1, 0),
  "uint8 with a large number": lambda d: u8(d, 1) + 300,
  "int8 with a large number": lambda d: i(d, 3, dtype=i8) * 200,
  "abs of the smallest": lambda d: i(d, -128, dtype=i8).abs(),
  "uint8 with -1": lambda d: u8(d, 255, 1) > -1,
  "uint8 == -1": lambda d: u8(d, 255) == -1,
  "uint8 < 300": lambda d: u8(d, 44) < 300,
  "uint8 against int8": lambda d: u8(d, 255) > i(d, -1, dtype=i8),
  "clamp of uint8": lambda d: u8(d, 200).clamp(-5, 100),
  "bool + bool": lambda d: i(d, 1, 0).bool() + i(d, 1, 1).bool(),
  "~bool": lambda d: ~i(d, 1, 0).bool(),
  "sum of int8": lambda d: i(d, 100, 100, dtype=i8).sum(),
  "sum as int8": lambda d: i(d, 100, 100, dtype=i8).sum(dtype=i8),
  "mean as float": lambda d: i(d, 1, 2).mean(dtype=f32),
  "pow": lambda d: u8(d, 3) ** 7,
  "pow of -1 to negative": lambda d: i(d, 2, 1, -1, -1) ** i(d, -1, -1, -1, -2),
  "0 ** 0": lambda d: i(d, 0) ** 0,
  "pow of a float": lambda d: i(d, 4) ** 0.5,
}


@rows(INTEGERS)
def test_integers_divide_shift_and_overflow_like_torch(row):
  assert_same(row("jax"), row("cpu"))


OUT_OF_RANGE = {
  "full": lambda d: torch.full((1,), 300, dtype=torch.uint8, device=d),
  "full_like": lambda d: torch.full_like(u8(d, 1), 300),
  "new_full": lambda d: u8(d, 1).new_full((1,), 300),
  "fill_": lambda d: i(d, 1, dtype=i8).fill_(300),
  "masked_fill": lambda d: i(d, 1, dtype=i8).masked_fill(i(d, 1).bool(), 300),
  "item assignment": lambda d: u8(d, 1).__setitem__(0, 300),
  "tensor": lambda d: torch.tensor([300], dtype=torch.uint8, device=d),
  "pad": lambda d: F.pad(i(d, 1, dtype=i8), (0, 1), value=300),
  "index_fill": lambda d: i(d, 1, dtype=i8).index_fill(0, i(d, 0).long(), 300),
  "scatter": lambda d: i(d, 1, dtype=i8).scatter(0, i(d, 0), 300),
  "clamp": lambda d: i(d, 1, dtype=i8).clamp(min=300),
  "no number": lambda d: torch.full((1,), math.nan, dtype=i8, device=d),
  "an infinity": lambda d: i(d, 1, dtype=i8).fill_(math.inf),
  "float16": lambda d: torch.full((2,), 65519.0, dtype=torch.float16, device=d),
  "float16 and an integer": lambda d: i(d, 1, 2, dtype=torch.float16).fill_(10**6),
  "float16, clamp": lambda d: i(d, 1, dtype=torch.float16).clamp(max=1e6),
  "float16, pad": lambda d: F.pad(i(d, 1, dtype=torch.float16), (0, 1), value=1e6),
  "bfloat16, masked_fill": lambda d: i(d, 1, dtype=torch.bfloat16).masked_fill(
    i(d, 1).bool(), torch.finfo(torch.float32).min
  ),
  "float32": lambda d: i(d, 1, dtype=torch.float32).fill_(1e300),
  "float8": lambda d: torch.full((2,), 449.0, dtype=torch.float8_e4m3fn, device=d),
  "float8 without infinity": lambda d: torch.full(
    (2,), math.inf, dtype=torch.float8_e4m3fn, device=d
  ),
  "complex": lambda d: torch.full((1,), 1e300, dtype=torch.complex64, device=d),
}


IN_RANGE = {
  "-1 in unsigned integers": lambda d: u8(d, 1).fill_(-1),
  "any number in bools": lambda d: torch.full((1,), 5, dtype=torch.bool, device=d),
  "an infinity": lambda d: i(d, 1, dtype=torch.float16).fill_(-math.inf),
  "no number": lambda d: i(d, 1, dtype=torch.bfloat16).fill_(math.nan),
  "a single one": lambda d: i(d, 1, dtype=torch.float16).fill_(10**6),
  "the largest": lambda d: i(d, 1, dtype=torch.float16).fill_(65504.0),
  "a bound between integers": lambda d: i(d, 1, dtype=i8).clamp(max=300.5),
  "an infinite bound": lambda d: i(d, 1, dtype=torch.float16).clamp(max=math.inf),
}


@rows(IN_RANGE)
def test_value_in_range_of_dtype_is_accepted(row):
  torch.testing.assert_close(row("jax").cpu(), row("cpu"), equal_nan=True)


@rows(OUT_OF_RANGE)
def test_value_out_of_range_of_dtype_raises(row):
  for device in ("cpu", "jax"):
    # The latter are torch's words for bounds of clamp, from 2.15 on.
    words = "without overflow|outside the representable range"
    with pytest.raises(RuntimeError, match=words):
      row(device)


# What jax tensors cannot be -----------------------------------------------------------


@pytest.mark.parametrize(
  "dtype",
  [torch.complex32, torch.float4_e2m1fn_x2, torch.quint8, torch.uint4, torch.bits8],
  ids=str,
)
def test_error_names_a_dtype_that_jax_lacks(dtype):
  for make in (
    lambda: x("jax").to(dtype),
    lambda: torch.zeros(2, dtype=dtype, device="jax"),
  ):
    with pytest.raises(UnsupportedDtypeError, match=f"{dtype}|quantised"):
      make()


def quantised() -> torch.Tensor:
  return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)


def nested(layout=torch.strided) -> torch.Tensor:
  return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def coordinates(device: str) -> tuple:
  return torch.tensor([[0], [1]]).to(device), torch.ones(1).to(device), (2, 2)


SQUARE = torch.eye(2)
NOT_DENSE = {
  "coo": (lambda: SQUARE.to_sparse().to("jax"), "to_dense"),
  "csr": (lambda: SQUARE.to_sparse_csr().to("jax"), "to_dense"),
  "csc": (lambda: SQUARE.to_sparse_csc().to("jax"), "to_dense"),
  "bsr": (lambda: SQUARE.to_sparse_bsr((1, 1)).to("jax"), "to_dense"),
  "nested": (lambda: nested().to("jax"), "to_padded_tensor"),
  "quantised": (lambda: quantised().to("jax"), "dequantize"),
  "copy_ of sparse": (lambda: SQUARE.to("jax").copy_(SQUARE.to_sparse()), "to_dense"),
  "copy_ of quantised": (lambda: torch.ones(2).to("jax").copy_(quantised()), "dequant"),
  "to_sparse": (lambda: SQUARE.to("jax").to_sparse(), "cpu"),
  "to_sparse_csr": (lambda: SQUARE.to("jax").to_sparse_csr(), "cpu"),
  "to_sparse_bsr": (lambda: SQUARE.to("jax").to_sparse_bsr((1, 1)), "cpu"),
  "to_mkldnn": (lambda: SQUARE.to("jax").to_mkldnn(), "cpu"),
  "quantize": (
    lambda: torch.quantize_per_tensor(SQUARE.to("jax"), 0.1, 0, torch.quint8),
    "cpu",
  ),
  "quantize_dynamic": (
    lambda: torch.quantize_per_tensor_dynamic(SQUARE.to("jax"), torch.quint8, False),
    "cpu",
  ),
  "dequantize": (lambda: SQUARE.to("jax").dequantize(), "cpu"),
  "as_nested": (lambda: torch.nested.as_nested_tensor([SQUARE.to("jax")]), "cpu"),
  "coo of jax tensors": (lambda: torch.sparse_coo_tensor(*coordinates("jax")), "cpu"),
  "coo with device": (
    lambda: torch.sparse_coo_tensor(*coordinates("cpu"), device="jax"),
    "to_dense",
  ),
  "zeros_like": (
    lambda: torch.zeros_like(SQUARE.to("jax"), layout=torch.sparse_coo),
    "to_dense",
  ),
  "sparse matmul": (
    lambda: torch.sparse.mm(SQUARE.to_sparse(), SQUARE.to("jax")),
    "to_dense",
  ),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
@rows(NOT_DENSE)
def test_non_dense_tensor_raises_with_alternative(row):
  make, way_out = row
  with pytest.raises(UnsupportedDtypeError, match=way_out):
    make()


def test_torch_rejects_an_mkldnn_tensor():
  with pytest.raises(NotImplementedError, match="mkldnn layout: jax"):
    SQUARE.to_mkldnn().to("jax")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
def test_jagged_tensor_moves_its_parts():
  moved = nested(torch.jagged).to("jax")
  assert moved.values().device.type == moved.offsets().device.type == "jax"
  assert (moved * 2).values().tolist() == [2.0] * 5


def test_sparse_operand_raises():
  with pytest.raises(MixedDeviceError, match="jax"):
    SQUARE.to("jax") + SQUARE.to_sparse()


def test_pin_memory_supports_cpu_tensors_only():
  assert x("jax").is_pinned() is False
  with pytest.raises(RuntimeError, match="CPU"):
    x("jax").pin_memory()
