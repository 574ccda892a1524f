"""Weights of 8-bit and 4-bit integers: torch's layouts, and products within a bound."""

import re

import numpy as np
import pytest
import torch
from ops.harness import Case, check, floats, ints

import torchax
from torchax.interop import jax_jit

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
X = floats(5, 64)
WHOLE = ints(5, 64, low=-9, high=10).float()  # its sums are exact
INT8 = ints(7, 64, low=-128, high=128, dtype=torch.int8)
SCALES = 2.0 ** ints(7, low=-3, high=4).float()
PAIRS = floats(2, 80, 2, seed=1)
int8_mm, cpu_mm = torch._weight_int8pack_mm, aten._weight_int4pack_mm_for_cpu
pack_for_cpu = aten._convert_weight_to_int4pack_for_cpu


def weight_of(outputs, inputs=64):
  return ints(outputs, inputs, high=16, dtype=torch.int32)


def pairs_of_columns(weight):
  return (weight[:, ::2] << 4 | weight[:, 1::2]).to(torch.uint8)


CASES = (
  *(
    Case(int8_mm, WHOLE.to(dtype), INT8, SCALES.to(dtype), name=f"int8 {dtype}")
    for dtype in (torch.float32, *HALF)
  ),
  # Rows that fill blocks of 64, blocks of 32, neither, and not one block.
  *(Case(pack_for_cpu, weight_of(outputs), 2) for outputs in (64, 96, 80, 16)),
  Case(cpu_mm, X, pack_for_cpu(weight_of(80), 2), 32, PAIRS),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_equal_torch_on_the_cpu(case):
  check(case)


def test_the_layout_of_cuda_has_the_numbers_of_each_lane():
  """A lane has 8 numbers of one row, from two tiles of 16 columns."""
  weight = weight_of(16, 128)
  packed = aten._convert_weight_to_int4pack(pairs_of_columns(weight).to("jax"), 4).cpu()
  assert packed.shape == (2, 2, 32, 2) and packed.dtype == torch.int32
  for (row_tile, tiles, lane, pair), word in np.ndenumerate(packed.numpy()):
    row = weight[8 * row_tile + lane // 4]
    first = 16 * (4 * tiles + 2 * pair) + 2 * (lane % 4)
    columns = [first + offset + odd for odd in (0, 1) for offset in (0, 8, 16, 24)]
    assert [int(word) >> shift & 15 for shift in range(0, 32, 4)] == row[
      columns
    ].tolist()


MULTIPLIED = {
  "cpu": (cpu_mm, lambda weight: pack_for_cpu(weight.to("jax"), 2)),
  "cuda": (
    aten._weight_int4pack_mm,
    lambda weight: aten._convert_weight_to_int4pack(
      pairs_of_columns(weight).to("jax"), 4
    ),
  ),
}


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("layout", MULTIPLIED)
def test_products_with_4_bit_weights_are_within_a_bound(layout, dtype):
  """Weight and result are rounded once to the dtype of the input, sums to float32."""
  multiply, pack = MULTIPLIED[layout]
  weight, x, pairs = weight_of(80), X.to(dtype), PAIRS.to(dtype)
  scale, zero = pairs.double().repeat_interleave(32, 0).unbind(-1)
  exact = (weight.double() - 8) * scale.T + zero.T
  expected = x.double() @ exact.T
  rounding = torch.finfo(dtype).eps / 2 + 64 * torch.finfo(torch.float32).eps
  bound = rounding * (x.double().abs() @ exact.T.abs() + expected.abs())

  def product(x, packed, pairs):
    return multiply(x, packed, 32, pairs)

  args = (x.to("jax"), pack(weight), pairs.to("jax"))
  with torchax.default_env():
    for run in (product, jax_jit(product)):
      found = run(*args).cpu()
      assert found.dtype == dtype
      assert ((found.double() - expected).abs() <= bound).all()


BYTES = pack_for_cpu(weight_of(80), 2)
# Each raises the error that torch has on the CPU.
REFUSED_ON_CPU = {
  "int8 weight": (int8_mm, (X, INT8.int(), SCALES)),
  "int8 inputs": (int8_mm, (X[:, :32].contiguous(), INT8, SCALES)),
  "int8 scales": (int8_mm, (X, INT8, SCALES[:2])),
  "packed dtype": (cpu_mm, (X, BYTES.int(), 32, PAIRS)),
  "size of groups": (cpu_mm, (X, BYTES, 16, PAIRS)),
  "rows to pack": (pack_for_cpu, (weight_of(60), 2)),
  "dimensions to pack": (pack_for_cpu, (weight_of(16)[0], 2)),
}


@pytest.mark.parametrize("name", REFUSED_ON_CPU)
def test_wrong_operands_raise_the_error_of_torch(name):
  function, args = REFUSED_ON_CPU[name]
  with pytest.raises(RuntimeError) as of_torch:
    function(*args)
  moved = [arg.to("jax") if isinstance(arg, torch.Tensor) else arg for arg in args]
  message = re.escape(str(of_torch.value).splitlines()[0])
  with torchax.default_env(), pytest.raises(RuntimeError, match=message):
    function(*moved)


WORDS = torch.zeros(10, 1, 32, 2, dtype=torch.int32)
REFUSED = {
  "scales and zeros": (cpu_mm, (X, BYTES, 32, PAIRS[:1]), r"sizes \[2, 80, 2\]"),
  "inputs": (cpu_mm, (X[:, :32], BYTES, 32, PAIRS), "weight of 32 inputs"),
  "dtype of scales": (cpu_mm, (X, BYTES, 32, PAIRS.to(HALF[0])), "same dtype"),
  "words": (aten._weight_int4pack_mm, (X, BYTES, 32, PAIRS), r"uint8\[80, 32\]"),
  "size of groups": (aten._weight_int4pack_mm, (X, WORDS, 48, PAIRS), "got 48"),
  "tiles": (
    aten._convert_weight_to_int4pack,
    (pairs_of_columns(weight_of(8)), 8),
    "innerKTiles=8",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_packed_operands_that_do_not_fit_raise(name):
  function, args, message = REFUSED[name]
  moved = [arg.to("jax") if isinstance(arg, torch.Tensor) else arg for arg in args]
  with torchax.default_env(), pytest.raises(RuntimeError, match=message):
    function(*moved)
