"""Tensors from sizes, numbers and other tensors; the device follows an operand."""

import contextlib
import re

import pytest
import torch
import torch.nn.functional as F
from compare import assert_same
from ops.harness import Case, check, floats, ints

import torchax
from torchax.interop import jax_jit

MATRIX = floats(2, 3)
COMPLEX = torch.complex(floats(3), floats(3, seed=1))


def made(factory, *sizes, **kwargs):
  """Return a case that calls a factory on the device of a tensor."""
  name = kwargs.pop("name", factory.__name__)

  def on_device_of(tensor):
    return factory(*sizes, device=tensor.device, **kwargs)

  return Case(on_device_of, MATRIX, name=f"{name}-{sizes}-{kwargs}")


CASES = (
  made(torch.zeros, 2, 3),
  made(torch.zeros, (2,), dtype=torch.int64),
  made(torch.ones, 2, 3, dtype=torch.bool),
  made(torch.full, (2,), 2.5),
  made(torch.full, (2,), 3),
  made(torch.full, (2,), True),
  made(torch.full, (2,), 1 + 2j),
  made(torch.full, (2,), 2.5, dtype=torch.int32),
  made(torch.eye, 3),
  made(torch.empty, 0, 3),
  made(torch.empty_permuted, (0, 3), (1, 0)),
  made(torch.eye, 2, 4, dtype=torch.int64),
  made(torch.arange, 5),
  made(torch.arange, 5.0),
  made(torch.arange, 1, 7, 2),
  made(torch.arange, 7, 1, -2),
  made(torch.arange, 0.5, 3, 0.25),
  made(torch.arange, 0, 5, dtype=torch.bfloat16),
  made(torch.linspace, 0.0, 1.0, 7),
  made(torch.linspace, 0, 10, 6, dtype=torch.int64),
  made(torch.linspace, 1, 2, 1),
  made(torch.logspace, -1, 1, 5),
  made(torch.logspace, 0, 3, 4, base=2),
  made(torch.kaiser_window, 0),
  made(torch.kaiser_window, 1),
  made(torch.kaiser_window, 9),
  made(torch.kaiser_window, 9, False, -3.5, dtype=torch.float16),
  made(torch.scalar_tensor, 3),
  made(torch.tril_indices, 3, 4, 1),
  made(torch.triu_indices, 3, 4, -1, dtype=torch.int32),
  Case(torch.zeros_like, MATRIX),
  Case(torch.ones_like, MATRIX, dtype=torch.int64),
  Case(torch.full_like, MATRIX, 3),
  Case(torch.full_like, ints(3), 2.7, name="full_like-truncates"),
  Case(lambda x: x.new_zeros(2), MATRIX, name="new_zeros"),
  Case(lambda x: x.new_ones((2, 1), dtype=torch.bool), MATRIX, name="new_ones"),
  Case(lambda x: x.new_full((2,), 7), MATRIX, name="new_full"),
  Case(lambda x: torch.empty_like(x).fill_(1), MATRIX, name="empty_like"),
  Case(lambda x: x.new_empty_strided((2, 3), (1, 2)).zero_(), MATRIX, name="strided"),
  Case(torch.clone, MATRIX, grad=True),
  Case(torch.tril, MATRIX, -1, grad=True),
  Case(torch.triu, floats(2, 3, 4), 1, grad=True),
  Case(torch.triu, ints(3, 3)),
  Case(torch.vander, ints(4)),
  Case(torch.vander, floats(3), 2, increasing=True),
  Case(lambda x: x.to(torch.bfloat16), MATRIX, grad=True, name="to-bfloat16"),
  Case(lambda x: x.to(torch.int32), floats(4, low=-5, high=5), name="to-int32"),
  Case(lambda x: x.to(torch.bool), ints(4, high=2), name="to-bool"),
  Case(lambda x: x.to(torch.bool), COMPLEX, name="complex-to-bool"),
  Case(lambda x, y: torch.zeros_like(x).copy_(y), MATRIX, ints(3), name="copy_"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_creation(case):
  check(case)


@pytest.mark.parametrize(
  "mode", [contextlib.nullcontext, torchax.default_env, torch.inference_mode]
)
def test_one_hot_accepts_integers_of_jax(mode):
  """torch's C++ requires int64; it runs first outside the environment."""
  words = torch.tensor([[0, 2], [1, 0]])
  with mode():
    for on_jax in (words.to("jax"), words.to("jax", torch.uint8)):
      for classes in ((), (4,)):
        found = F.one_hot(on_jax, *classes)
        assert found.device.type == "jax" and found.dtype == on_jax.dtype
        assert found.tolist() == F.one_hot(words, *classes).tolist()
  assert F.one_hot(words.to("meta"), 3).shape == (2, 2, 3)


@pytest.mark.parametrize(
  "made, message",
  [
    (lambda: torch.zeros(2), "expects integers"),
    (lambda: torch.zeros(2, dtype=torch.bool), "expects integers"),
    (lambda: torch.zeros(0, dtype=torch.int64), "empty tensor"),
  ],
)
def test_one_hot_without_known_classes_raises(made, message):
  with pytest.raises(RuntimeError):
    F.one_hot(made())
  with pytest.raises(RuntimeError, match=message):
    F.one_hot(made().to("jax"))


@pytest.mark.parametrize("options", [{}, {"dtype": torch.int32}])
def test_wrong_arguments_of_a_window_raise(options):
  with (
    torchax.default_env(),
    pytest.raises(RuntimeError, match="kaiser_window expects"),
  ):
    torch.kaiser_window(-1, device="jax", **options)


@pytest.mark.parametrize("step", [0, -1])
def test_arange_with_a_step_away_from_the_end_raises(step):
  with pytest.raises(RuntimeError, match="step"):
    torch.arange(0, 3, step, device="jax")


NUMBERS = (2, True, 2.0, 2 + 0j, 0, False, 0.0, -0.0, 0j)
BY_NUMBER = {
  "pow": lambda x, number: x**number,
  "add": torch.add,
  "mul": torch.mul,
  "where": lambda x, number: torch.where(x > 0, x, number),
  "full": lambda x, number: torch.full((2,), number, device=x.device),
  "tensor": lambda x, number: torch.tensor(number, device=x.device),
  "arange": lambda x, number: torch.arange(number, device=x.device),
  "scalar_tensor": lambda x, number: torch.scalar_tensor(number, device=x.device),
  "pad": lambda x, number: torch.constant_pad_nd(x, (1, 1), number),
}


@pytest.mark.parametrize("function", BY_NUMBER.values(), ids=BY_NUMBER)
@pytest.mark.parametrize("numbers", [NUMBERS, NUMBERS[::-1]], ids=["up", "down"])
def test_equal_numbers_of_other_types_are_distinct_arguments(function, numbers):
  x = torch.tensor([1.0, 2.0])
  for number in numbers:
    expected = function(x, number)
    with torchax.default_env():
      assert_same(function(x.to("jax"), number), expected, repr(number))


def test_arange_of_bools_counts_integers():
  for bounds in ((False, True), (False, False), (0, 1), (True,)):
    assert_same(torch.arange(*bounds, device="jax"), torch.arange(*bounds))


INDEX = torch.tensor([0])
WRITES = {
  "fill_": lambda x, number: x.clone().fill_(number),
  "full_like": torch.full_like,
  "new_full": lambda x, number: x.new_full((2,), number),
  "full": lambda x, number: torch.full((2,), number, dtype=x.dtype, device=x.device),
  "scatter": lambda x, number: x.scatter(0, INDEX.to(x.device), number),
  "scatter_": lambda x, number: x.clone().scatter_(0, INDEX.to(x.device), number),
  "scatter_ add": lambda x, number: x.clone().scatter_(
    0, INDEX.to(x.device), number, reduce="add"
  ),
  "index_fill_": lambda x, number: x.clone().index_fill_(0, INDEX.to(x.device), number),
  "masked_fill": lambda x, number: x.masked_fill(x == 0, number),
  "fill_diagonal_": lambda x, number: x.new_zeros(2, 2).fill_diagonal_(number),
  "pad": lambda x, number: torch.constant_pad_nd(x, (1, 1), number),
  "scalar_tensor": lambda x, number: torch.scalar_tensor(
    number, dtype=x.dtype, device=x.device
  ),
}


ON_CPU = {
  "new_full": lambda x: x.new_full((2,), 3, dtype=torch.int64, device="cpu"),
  "zeros_like": lambda x: torch.zeros_like(x.t(), device="cpu"),
  "empty_like": lambda x: torch.empty_like(x, device="cpu").fill_(2),
}


@pytest.mark.parametrize("make", ON_CPU.values(), ids=ON_CPU)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_tensor_on_the_cpu_is_made_like_one_on_jax(make, is_compiled):
  found = []

  def run(x):
    found.append(make(x))
    return x

  (jax_jit(run) if is_compiled else run)(torch.ones(2, 3, device="jax"))
  expected = make(torch.ones(2, 3))
  torch.testing.assert_close(found[0], expected, check_stride=True)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("number", [1 + 1j, 2 + 0j], ids=str)
def test_complex_number_is_written_or_raises_as_in_torch(write, dtype, number):
  x = torch.zeros(3, dtype=dtype)
  try:
    expected = write(x, number)
  except RuntimeError as error:
    reason = str(error).split(" type ")[0]
    with pytest.raises(RuntimeError, match=re.escape(reason)):
      write(x.to("jax"), number)
  else:
    assert_same(write(x.to("jax"), number), expected)
