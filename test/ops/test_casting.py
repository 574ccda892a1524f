"""Dtypes: predicates, limits, conversions of values, bits and integer arithmetic."""

import math

import jax
import pytest
import torch
import torch.nn.functional as F
from compare import assert_close, assert_same
from ops.harness import floats
from small_tensors import DATA, in_environment, ints, rows, x  # noqa: F401  a fixture

from torchax.compat import versions
from torchax.ops import mappings

pytestmark = pytest.mark.filterwarnings("ignore:.*32 bits wide")

f16, f32, i8 = torch.float16, torch.float32, torch.int8
FLOAT8 = tuple(dtype for dtype in mappings.TORCH_DTYPE_TO_JAX if "float8" in str(dtype))
NUMBER_DTYPES = tuple(
  dtype
  for dtype in mappings.TORCH_DTYPE_TO_JAX
  if dtype not in (None, torch.float4_e2m1fn_x2, *FLOAT8)
)


def agree(actual, expected):
  """Assert that the tensor or value equals the one of the CPU."""
  if isinstance(expected, torch.Tensor):
    assert_same(actual, expected)
  else:
    assert actual == expected and type(actual) is type(expected)


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

SIGNS = (-7, -1, 0, 1, 7, 127, -128), (2, -2, 3, -3, -2, -1, -1)


def divided(function):
  return lambda d: function(ints(d, *SIGNS[0], dtype=i8), ints(d, *SIGNS[1], dtype=i8))


INTEGERS = {
  "div": divided(torch.div),
  "div floor": divided(lambda a, b: torch.div(a, b, rounding_mode="floor")),
  "div trunc": divided(lambda a, b: torch.div(a, b, rounding_mode="trunc")),
  "remainder": divided(torch.remainder),
  "fmod": divided(torch.fmod),
  "number % tensor": lambda d: 5 % ints(d, 3, -3),
  "number // tensor": lambda d: 5 // ints(d, 3, -3),
  "float %": lambda d: (
    torch.tensor([-7.5, 7.5, 3, torch.inf]).to(d) % torch.tensor([2.0, -2, 0, 2]).to(d)
  ),
  "float //": lambda d: (
    torch.tensor([-7.5, 7.5, 3, -3, 0]).to(d) // torch.tensor([2.0, -2, 0, 0, 0]).to(d)
  ),
  "<<": lambda d: ints(d, 1, 1, -1, 3) << ints(d, 1, 31, 4, 2),
  "<< out of range": lambda d: ints(d, 1, 1, 1, -1) << ints(d, 32, 33, -1, 40),
  ">>": lambda d: ints(d, 8, -8, -1) >> ints(d, 1, 1, 5),
  ">> out of range": lambda d: ints(d, 8, 8, -8, -8) >> ints(d, 32, -1, 40, -1),
  "uint8 <<": lambda d: (
    ints(d, 255, 1, 1, dtype=torch.uint8) << ints(d, 1, 7, 8, dtype=torch.uint8)
  ),
  "uint8 >>": lambda d: (
    ints(d, 255, 128, 1, dtype=torch.uint8) >> ints(d, 1, 7, 8, dtype=torch.uint8)
  ),
  "overflow": lambda d: ints(d, 2**31 - 1, 2**30) * ints(d, 2, 4),
  "int8 overflow": lambda d: ints(d, 127, dtype=i8) + ints(d, 1, dtype=i8),
  "uint8 below zero": lambda d: ints(d, 0, 1, dtype=torch.uint8) - 2,
  "-uint8": lambda d: -ints(d, 1, 0, dtype=torch.uint8),
  "uint8 with a large number": lambda d: ints(d, 1, dtype=torch.uint8) + 300,
  "int8 with a large number": lambda d: ints(d, 3, dtype=i8) * 200,
  "abs of the smallest": lambda d: ints(d, -128, dtype=i8).abs(),
  "uint8 with -1": lambda d: ints(d, 255, 1, dtype=torch.uint8) > -1,
  "uint8 == -1": lambda d: ints(d, 255, dtype=torch.uint8) == -1,
  "uint8 < 300": lambda d: ints(d, 44, dtype=torch.uint8) < 300,
  "uint8 against int8": lambda d: (
    ints(d, 255, dtype=torch.uint8) > ints(d, -1, dtype=i8)
  ),
  "clamp of uint8": lambda d: ints(d, 200, dtype=torch.uint8).clamp(-5, 100),
  "bool + bool": lambda d: ints(d, 1, 0).bool() + ints(d, 1, 1).bool(),
  "~bool": lambda d: ~ints(d, 1, 0).bool(),
  "sum of int8": lambda d: ints(d, 100, 100, dtype=i8).sum(),
  "sum as int8": lambda d: ints(d, 100, 100, dtype=i8).sum(dtype=i8),
  "mean as float": lambda d: ints(d, 1, 2).mean(dtype=f32),
  "pow": lambda d: ints(d, 3, dtype=torch.uint8) ** 7,
  "pow of -1 to negative": lambda d: ints(d, 2, 1, -1, -1) ** ints(d, -1, -1, -1, -2),
  "0 ** 0": lambda d: ints(d, 0) ** 0,
  "pow of a float": lambda d: ints(d, 4) ** 0.5,
}


@rows(INTEGERS)
def test_integers_divide_shift_and_overflow_like_torch(row):
  assert_same(row("jax"), row("cpu"))


OUT_OF_RANGE = {
  "full": lambda d: torch.full((1,), 300, dtype=torch.uint8, device=d),
  "full_like": lambda d: torch.full_like(ints(d, 1, dtype=torch.uint8), 300),
  "new_full": lambda d: ints(d, 1, dtype=torch.uint8).new_full((1,), 300),
  "fill_": lambda d: ints(d, 1, dtype=i8).fill_(300),
  "masked_fill": lambda d: ints(d, 1, dtype=i8).masked_fill(ints(d, 1).bool(), 300),
  "item assignment": lambda d: ints(d, 1, dtype=torch.uint8).__setitem__(0, 300),
  "tensor": lambda d: torch.tensor([300], dtype=torch.uint8, device=d),
  "pad": lambda d: F.pad(ints(d, 1, dtype=i8), (0, 1), value=300),
  "index_fill": lambda d: ints(d, 1, dtype=i8).index_fill(0, ints(d, 0).long(), 300),
  "scatter": lambda d: ints(d, 1, dtype=i8).scatter(0, ints(d, 0), 300),
  "clamp": lambda d: ints(d, 1, dtype=i8).clamp(min=300),
  "no number": lambda d: torch.full((1,), math.nan, dtype=i8, device=d),
  "an infinity": lambda d: ints(d, 1, dtype=i8).fill_(math.inf),
  "float16": lambda d: torch.full((2,), 65519.0, dtype=torch.float16, device=d),
  "float16 and an integer": lambda d: ints(d, 1, 2, dtype=torch.float16).fill_(10**6),
  "float16, clamp": lambda d: ints(d, 1, dtype=torch.float16).clamp(max=1e6),
  "float16, pad": lambda d: F.pad(ints(d, 1, dtype=torch.float16), (0, 1), value=1e6),
  "bfloat16, masked_fill": lambda d: ints(d, 1, dtype=torch.bfloat16).masked_fill(
    ints(d, 1).bool(), torch.finfo(torch.float32).min
  ),
  "float32": lambda d: ints(d, 1, dtype=torch.float32).fill_(1e300),
  "float8": lambda d: torch.full((2,), 449.0, dtype=torch.float8_e4m3fn, device=d),
  "float8 without infinity": lambda d: torch.full(
    (2,), math.inf, dtype=torch.float8_e4m3fn, device=d
  ),
  "complex": lambda d: torch.full((1,), 1e300, dtype=torch.complex64, device=d),
}


IN_RANGE = {
  "-1 in unsigned integers": lambda d: ints(d, 1, dtype=torch.uint8).fill_(-1),
  "any number in bools": lambda d: torch.full((1,), 5, dtype=torch.bool, device=d),
  "an infinity": lambda d: ints(d, 1, dtype=torch.float16).fill_(-math.inf),
  "no number": lambda d: ints(d, 1, dtype=torch.bfloat16).fill_(math.nan),
  "a single one": lambda d: ints(d, 1, dtype=torch.float16).fill_(10**6),
  "a number beside halves": lambda d: torch.where(
    torch.tensor([True, False], device=d), ints(d, 2, dtype=torch.bfloat16), -3.402e38
  ),
  "one of 16 bits": lambda d: torch.scalar_tensor(1e6, dtype=torch.float16, device=d),
  "the largest": lambda d: ints(d, 1, dtype=torch.float16).fill_(65504.0),
  "a bound between integers": lambda d: ints(d, 1, dtype=i8).clamp(max=300.5),
  "an infinite bound": lambda d: ints(d, 1, dtype=torch.float16).clamp(max=math.inf),
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
