"""Bitwise operators and hashes against CPU torch."""

import operator

import jax
import pytest
import torch
from ops.harness import Case, check, floats, ints

import torchax

NUMBERS = floats(3, 4)
INTS = ints(3, 4, low=-100, high=100)
OTHER = ints(3, 4, low=-100, high=100, seed=1)
BYTES = ints(3, 4, low=0, high=256, dtype=torch.uint8)
BOOLS = ints(3, 4, low=0, high=2, dtype=torch.bool)
FLAGS = ints(3, 4, low=0, high=2, dtype=torch.bool, seed=1)
INT8 = ints(3, 4, low=-128, high=128, dtype=torch.int8)
COUNTS = ints(3, 4, low=0, high=7, dtype=torch.int8)
OUT_OF_RANGE = torch.tensor([-1, 8, 40, 3], dtype=torch.int8)

CASES = (
  *(
    Case(function, *operands)
    for function in (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor)
    for operands in (
      (INTS, OTHER),
      (INTS, 12),
      (7, INTS),
      (BYTES, INTS),
      (BOOLS, FLAGS),
      (BOOLS, BYTES),
      (INTS, True),
    )
  ),
  *(
    Case(function, *operands)
    for function in (operator.and_, operator.or_, operator.xor)
    for operands in ((INTS, OTHER), (BOOLS, FLAGS), (INTS, 3))
  ),
  *(Case(torch.bitwise_not, values) for values in (INTS, BYTES, BOOLS)),
  *(
    Case(function, *operands)
    for function in (torch.bitwise_left_shift, torch.bitwise_right_shift)
    for operands in (
      (INT8, COUNTS),
      (BYTES, 3),
      (INTS, 2),
      (3, COUNTS),
      (INT8, OUT_OF_RANGE),
    )
  ),
  *(Case(function, INTS, 2) for function in (operator.lshift, operator.rshift)),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_equal_cpu_torch(case):
  check(case)


@pytest.mark.parametrize("function", (torch.bitwise_and, torch.bitwise_left_shift))
def test_bitwise_operations_of_floats_raise(function):
  with torchax.default_env(), pytest.raises(RuntimeError):
    function(floats(3).to("jax"), floats(3).to("jax"))


@pytest.mark.parametrize(
  "values", [NUMBERS, NUMBERS.bfloat16(), NUMBERS.double(), INTS]
)
@pytest.mark.parametrize("dims", [{}, {"dim": 1}, {"dim": (-1,), "keepdim": True}])
@pytest.mark.parametrize("x64", [True, False])
def test_hash_equals_cpu_torch(values, dims, x64):
  values = values.float() if values.dtype is torch.double and not x64 else values
  with jax.enable_x64(x64), torchax.default_env():
    actual = torch.hash_tensor(values.to("jax"), **dims).cpu()
  expected = torch.hash_tensor(values, **dims)
  assert actual.dtype == expected.dtype == torch.uint64
  assert actual.shape == expected.shape
  assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize(
  "error, values, dims",
  [(RuntimeError, INTS[:0], {}), (IndexError, INTS[:0], {"dim": 0})],
)
def test_hash_of_an_empty_tensor_raises(error, values, dims):
  with torchax.default_env(), pytest.raises(error):
    torch.hash_tensor(values.to("jax"), **dims)
