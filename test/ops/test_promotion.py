"""Type promotion is torch's, for tensors, 0-d tensors and Python numbers.

Dtypes are compared without computing: `result_dtype` for every pair, the lowerings by
`jax.eval_shape`. Where torch has no kernel (`NotImplementedError`), JAX may have one.
"""

import contextlib
import itertools
import operator

import jax
import pytest
import torch
from compare import assert_same
from ops.harness import HALF_COMPLEX

import torchax
from torchax.interop import jax_view
from torchax.ops import mappings, op_base

STORED = (
  torch.bool,
  torch.uint8,
  torch.int8,
  torch.int16,
  torch.int32,
  torch.int64,
  torch.uint16,
  torch.uint32,
  torch.uint64,
  torch.float16,
  torch.bfloat16,
  torch.float32,
  torch.float64,
  torch.complex64,
  torch.complex128,
  torch.float8_e4m3fn,
  torch.float8_e5m2,
)
COMPUTED = (
  torch.bool,
  torch.uint8,
  torch.int16,
  torch.int64,
  torch.float16,
  torch.bfloat16,
  torch.float32,
  torch.complex64,
)
NUMBERS = (True, 2, 2.5, 1 + 2j)
# Dimensions of the two operands.
FORMS = ((1, 1), (1, 0), (0, 1))
REFUSED = "refused"

both_widths = pytest.mark.parametrize("x64", [False, True], ids=["32_bit", "64_bit"])


@contextlib.contextmanager
def width(x64: bool):
  with jax.enable_x64(x64), torchax.default_env():
    yield


def tensor(dtype: torch.dtype, dims: int = 1) -> torch.Tensor:
  return torch.ones((2,) * dims).to(dtype)


def spec(value):
  """Return the shape and dtype of a CPU tensor on jax; return a number unchanged."""
  if not isinstance(value, torch.Tensor):
    return value
  return jax.ShapeDtypeStruct(tuple(value.shape), mappings.t2j_dtype(value.dtype))


def stored(dtype: torch.dtype):
  """Return the dtype that JAX stores; it has no 32-bit complex numbers."""
  return mappings.t2j_dtype(torch.complex64 if dtype in HALF_COMPLEX else dtype)


def operands(dtypes, left: torch.dtype) -> list[tuple]:
  """Pair the tensor `left` with tensors of all dtypes, and with numbers."""
  pairs = [
    (tensor(left, a), tensor(right, b))
    for right, (a, b) in itertools.product(dtypes, FORMS)
  ]
  return pairs + [(tensor(left, dims), n) for dims in (0, 1) for n in NUMBERS]


def described(pair) -> str:
  return " with ".join(
    f"{value.dim()}-d {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
    for value in pair
  )


@both_widths
@pytest.mark.parametrize("left", STORED, ids=str)
def test_promoted_dtype_of_every_pair_equals_torch(left, x64):
  wrong = []
  with width(x64):
    for pair in operands(STORED, left):
      try:
        expected = stored(torch.result_type(*pair))
      except RuntimeError:
        expected = REFUSED
      try:
        actual = op_base.result_dtype(*map(spec, pair))
      except RuntimeError:
        actual = REFUSED
      if actual != expected:
        wrong.append(f"{described(pair)}: {actual}, not {expected}")
  assert not wrong


OPERATIONS = {
  "add": operator.add,
  "sub": operator.sub,
  "rsub": lambda a, b: b - a,
  "mul": operator.mul,
  "div": operator.truediv,
  "floor_divide": operator.floordiv,
  "pow": operator.pow,
  "rpow": lambda a, b: b**a,
  "eq": operator.eq,
  "lt": operator.lt,
  "maximum": torch.maximum,
  "clamp": lambda a, b: torch.clamp(a, min=b),
  "where": lambda a, b: torch.where(a == a, a, b),
  "cat": lambda a, b: torch.cat([a, b]),
  "stack": lambda a, b: torch.stack([a, b]),
}


def outcome(call, *args):
  """Return the dtype of a result, or the type of the error."""
  try:
    return call(*args)
  except (RuntimeError, TypeError) as error:
    return type(error)


def abstract(call, pair):
  """Return the dtype on jax, without computing."""
  arrays = [spec(value) for value in pair if isinstance(value, torch.Tensor)]
  numbers = [value for value in pair if not isinstance(value, torch.Tensor)]
  function = jax_view(lambda *tensors: call(*tensors, *numbers))
  return jax.eval_shape(function, *arrays).dtype


def agree(actual, expected) -> bool:
  """Return True for the same dtype, or for an error that is a subclass of torch's."""
  if isinstance(actual, type) and isinstance(expected, type):
    return issubclass(actual, expected)
  return actual == expected


# `torch.where` with a number creates a tensor of a dtype that JAX lacks.
NO_COMPLEX_HALF = {
  ("where", dtype, complex)
  for dtype in (torch.float16, torch.bfloat16)
  if torch.result_type(torch.ones(1, dtype=dtype), 1j) in HALF_COMPLEX
}


@both_widths
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize("name", OPERATIONS)
def test_result_dtypes_of_operations_equal_torch(name, x64):
  call, wrong = OPERATIONS[name], []
  with width(x64):
    for left in COMPUTED:
      for pair in operands(COMPUTED, left):
        if (name, left, type(pair[1])) in NO_COMPLEX_HALF:
          continue
        expected = outcome(lambda *pair: stored(call(*pair).dtype), *pair)
        if isinstance(expected, type) and issubclass(expected, NotImplementedError):
          continue
        actual = outcome(abstract, call, pair)
        if not agree(actual, expected):
          wrong.append(f"{described(pair)}: {actual}, not {expected}")
  assert not wrong


VALUES = {
  "uint8 with int8": lambda d: (
    on(d, [200, 1], torch.uint8) + on(d, [-1, 1], torch.int8)
  ),
  "bool with int": lambda d: on(d, [True, False], torch.bool) + 2,
  "int with float": lambda d: on(d, [3, 4], torch.int32) * 0.5,
  "int by int": lambda d: on(d, [3, 4], torch.int32) / on(d, [2, 8], torch.int64),
  "half with float": lambda d: on(d, [1, 2], torch.bfloat16) + 1.01,
  "half with 0-d": lambda d: on(d, [1, 2], torch.float16) * on(d, 3.1, torch.float32),
  "float with complex": lambda d: on(d, [1, 2], torch.float32) + 1j,
  "cat": lambda d: torch.cat([on(d, [1, 2], torch.int8), on(d, [0.5], torch.float16)]),
  "where": lambda d: torch.where(on(d, [True, False], torch.bool), on(d, 1), 0.5),
  "uint8 above int8": lambda d: on(d, [255], torch.uint8) > on(d, [-1], torch.int8),
}


def on(device: str, values, dtype=torch.int64) -> torch.Tensor:
  return torch.tensor(values, dtype=dtype).to(device)


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
def test_values_of_promoted_operands_equal_torch(make):
  with torchax.default_env():
    assert_same(make("jax"), make("cpu"))


REFUSED_IN_PLACE = {
  "int += float": lambda d: on(d, [1]).add_(1.5),
  "int /= int": lambda d: on(d, [1]).div_(2),
  "int *= float tensor": lambda d: on(d, [1]).mul_(on(d, [1.5], torch.float32)),
  "bool += int": lambda d: on(d, [True], torch.bool).add_(1),
  "float += complex": lambda d: on(d, [1.0], torch.float32).add_(1j),
  "int sqrt": lambda d: on(d, [4]).sqrt_(),
  "int clamp": lambda d: on(d, [4]).clamp_(0.5, 2.5),
  "out= of int": lambda d: torch.add(on(d, [1.0], torch.float32), 1, out=on(d, [0])),
  "alpha": lambda d: on(d, [5]).sub(on(d, [2]), alpha=1.5),
  "bool - bool": lambda d: on(d, [True], torch.bool) - on(d, [True], torch.bool),
  "-bool": lambda d: -on(d, [True], torch.bool),
  "mean of int": lambda d: on(d, [1, 2]).mean(),
  "int ** -1": lambda d: on(d, [2]) ** -1,
  "matmul of two dtypes": lambda d: (
    torch.ones(2, 2).to(d) @ torch.ones(2, 2).to(d, torch.float16)
  ),
  "int that requires grad": lambda d: on(d, [1]).requires_grad_(),
  "uint16 with int": lambda d: on(d, [1], torch.uint16) * on(d, [1]),
  "float8 with float": lambda d: on(d, [1.0], torch.float8_e5m2) * torch.ones(1).to(d),
  "lerp of int": lambda d: torch.lerp(on(d, [1]), on(d, [2]), 0.5),
  "clamp of complex": lambda d: on(d, [1j], torch.complex64).clamp(min=0),
  "lt of complex": lambda d: on(d, [1j], torch.complex64) < 1,
  "bool // bool": lambda d: on(d, [True], torch.bool) // on(d, [True], torch.bool),
  "float & int": lambda d: on(d, [1.0], torch.float32) & 1,
  "gcd of floats": lambda d: torch.gcd(*[on(d, [1.0], torch.float32)] * 2),
  "lcm of bools": lambda d: torch.lcm(*[on(d, [True], torch.bool)] * 2),
  "complex of int": lambda d: torch.complex(on(d, [1]), on(d, [1])),
  "where of int": lambda d: torch.where(on(d, [1]), 1.0, 2.0),
}


@pytest.mark.parametrize("call", REFUSED_IN_PLACE.values(), ids=REFUSED_IN_PLACE)
def test_invalid_promotions_raise_the_error_type_of_torch(call):
  with pytest.raises((RuntimeError, TypeError)) as expected:
    call("cpu")
  with torchax.default_env(), pytest.raises(expected.type):
    call("jax")


def test_a_failed_in_place_operation_changes_nothing():
  x = on("jax", [1, 2])
  with pytest.raises(RuntimeError, match="can't be cast"):
    x.add_(1.5)
  assert x.tolist() == [1, 2]


ANSWERS = {
  "result_type": lambda d: torch.result_type(on(d, [1], torch.int16), 2.5),
  "result_type_0d": lambda d: torch.result_type(
    on(d, 1.0, torch.float32), on(d, [1], torch.float16)
  ),
  "result_type_number_first": lambda d: torch.result_type(2.5, on(d, [1], torch.int8)),
  "promote_types": lambda d: torch.promote_types(
    on(d, 1, torch.uint8).dtype, on(d, 1, torch.int8).dtype
  ),
  "can_cast": lambda d: torch.can_cast(on(d, 1.0, torch.float32).dtype, torch.int8),
}


@pytest.mark.parametrize("ask", ANSWERS.values(), ids=ANSWERS)
def test_promotion_queries_equal_torch(ask):
  with torchax.default_env():
    assert ask("jax") == ask("cpu")
