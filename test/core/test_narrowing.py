"""64-bit types without x64: no silent truncation, and one warning per loss."""

import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
import torch
from compare import assert_same

import torchax
from torchax.core import narrowing
from torchax.errors import NarrowingWarning, UnsupportedDtypeError
from torchax.ops import mappings

pytestmark = [
  pytest.mark.filterwarnings("ignore:.*32 bits wide"),
  pytest.mark.usefixtures("env"),
]

LARGE = 2**40


def ints(*values) -> torch.Tensor:
  return torch.tensor(values).to("jax")


TOO_LARGE = {
  "add": lambda: ints(1) + LARGE,
  "add of 2**31": lambda: ints(1) + 2**31,
  "mul": lambda: ints(1) * LARGE,
  "mul_": lambda: ints(1).mul_(LARGE),
  "rsub": lambda: LARGE - ints(1),
  "div": lambda: ints(1) / LARGE,
  "remainder": lambda: ints(5) % LARGE,
  "and": lambda: ints(1) & 0xFFFFFFFF,
  "clamp": lambda: ints(1).clamp(max=LARGE),
  "where": lambda: torch.where(ints(1) > 0, ints(1), LARGE),
  "alpha": lambda: torch.add(ints(1), ints(1), alpha=LARGE),
  "addcmul": lambda: torch.addcmul(ints(1), ints(1), ints(1), value=LARGE),
  "full": lambda: torch.full((), LARGE, device="jax"),
  "scalar_tensor": lambda: torch.scalar_tensor(LARGE, dtype=torch.int64, device="jax"),
  "arange": lambda: torch.arange(LARGE, LARGE + 3, device="jax"),
  "end of arange": lambda: torch.arange(2**31 - 2, 2**31 + 1, device="jax"),
  "linspace": lambda: torch.linspace(0, LARGE, 3, dtype=torch.int64, device="jax"),
  "tensor": lambda: torch.tensor(LARGE, device="jax"),
  "to": lambda: torch.tensor([0, LARGE]).to("jax"),
  "below": lambda: torch.tensor([0, -(2**31) - 1]).to("jax"),
  "copy_": lambda: ints(1).copy_(torch.tensor([LARGE])),
  "0-d CPU tensor": lambda: ints(1) + torch.tensor(LARGE),
  "scatter": lambda: ints(1).scatter(0, ints(0), LARGE),
}


@pytest.mark.parametrize("call", TOO_LARGE.values(), ids=TOO_LARGE)
def test_an_integer_that_needs_64_bits_is_never_cut(call):
  with pytest.raises(OverflowError, match="jax_enable_x64"):
    call()


FITTING = {
  "less than": lambda d: torch.tensor([1, -1]).to(d) < LARGE,
  "at least": lambda d: torch.tensor([1, -1]).to(d) >= -LARGE,
  "equal": lambda d: torch.tensor([1, -1]).to(d) == LARGE,
  "bounds": lambda d: torch.tensor([1, -1]).to(d) * (2**31 - 1) - 1,
  "beside floats": lambda d: torch.ones(2).to(d) * LARGE,
  "in place beside floats": lambda d: torch.ones(2).to(d).add_(LARGE),
  "alpha beside floats": lambda d: (
    torch.ones(2).to(d).sub(torch.ones(2).to(d), alpha=LARGE)
  ),
  "where beside floats": lambda d: torch.where(
    torch.ones(2).to(d) > 0, torch.ones(2).to(d), LARGE
  ),
  "fill of floats": lambda d: torch.ones(2).to(d).fill_(LARGE),
  "floats of full": lambda d: torch.full((2,), LARGE, dtype=torch.float32, device=d),
  "floats of arange": lambda d: torch.arange(
    LARGE, LARGE + 2, dtype=torch.float32, device=d
  ),
  "linspace": lambda d: torch.linspace(0, LARGE, 3, device=d),
  "scalar_tensor": lambda d: torch.scalar_tensor(LARGE, device=d),
  "uint32": lambda d: torch.zeros(2, dtype=torch.uint32).to(d).fill_(0xFFFFFFFF),
  "end of a slice": lambda d: torch.arange(3).to(d)[:LARGE],
}


@pytest.mark.parametrize("call", FITTING.values(), ids=FITTING)
def test_a_number_that_fits_or_becomes_a_float_is_taken(call):
  assert_same(call("jax"), call("cpu"))


def wide_words(device):
  return torch.tensor([[2**64 - 1, 2**40 + 3], [5, 0]], dtype=torch.uint64).to(device)


UINT64 = {
  "tensor": lambda d: torch.tensor([LARGE], dtype=torch.uint64, device=d),
  "full": lambda d: torch.full((2,), LARGE, dtype=torch.uint64, device=d),
  "zeros": lambda d: torch.zeros(2, dtype=torch.uint64, device=d),
  "fill_": lambda d: torch.empty(2, dtype=torch.uint64, device=d).fill_(LARGE),
  "copy_": lambda d: torch.empty(2, 2, dtype=torch.uint64, device=d).copy_(
    wide_words("cpu")
  ),
  "from floats": lambda d: torch.ones(2, device=d).to(torch.uint64),
  "to floats": lambda d: wide_words(d).float(),
  "view": lambda d: wide_words(d).view(torch.uint32),
  "view back": lambda d: wide_words(d).view(torch.uint32).view(torch.uint64),
  "view of words": lambda d: (
    torch.arange(4, dtype=torch.int32).to(d).view(torch.uint64) == wide_words(d)[0]
  ),
  "write to a view of words": lambda d: (
    torch.zeros(2, 4, dtype=torch.int32).to(d).view(torch.uint64).copy_(wide_words(d))
  ),
  "row": lambda d: wide_words(d)[0],
  "index": lambda d: wide_words(d)[torch.tensor([1, 0], device=d)],
  "stack": lambda d: torch.stack([*wide_words(d)]),
  "equal": lambda d: wide_words(d) == wide_words(d)[0],
  "write": lambda d: torch.zeros_like(wide_words(d)).copy_(wide_words(d)),
  "repeat": lambda d: wide_words(d).repeat(2, 1).T,
}


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("call", UINT64.values(), ids=UINT64)
def test_uint64_has_64_bits_without_x64(call):
  assert_same(call("jax"), call("cpu"))


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
  "transform",
  (
    torchax.interop.jax_jit,
    lambda f: torch.compile(f, backend="jax"),
    lambda f: lambda x: torch.compile(f, backend="jax")(x.cpu()),
    torch.func.vmap,
  ),
  ids=("jax_jit", "compile", "compile on the CPU", "vmap"),
)
def test_uint64_keeps_its_bits_in_programs(transform):
  result = transform(lambda x: torch.stack([x, x.flip(0)]))(wide_words("jax"))
  assert result.dtype == torch.uint64
  assert result.flatten().tolist().count(2**64 - 1) == 2


def test_with_x64_large_integers_are_kept():
  with jax.enable_x64(True):
    assert (ints(1) + LARGE).tolist() == [LARGE + 1]
    assert torch.tensor([LARGE]).to("jax").tolist() == [LARGE]
    assert torch.arange(LARGE, LARGE + 2, device="jax").tolist() == [LARGE, LARGE + 1]


def test_a_refused_number_changes_nothing():
  x = ints(1, 2)
  with pytest.raises(OverflowError):
    x.add_(LARGE)
  assert x.tolist() == [1, 2]


def test_the_refusal_holds_inside_a_compiled_function():
  with pytest.raises(OverflowError, match="jax_enable_x64"):
    torchax.interop.jax_jit(lambda x: x + LARGE)(ints(1))


# Floats -------------------------------------------------------------------------------


@pytest.fixture(name="unsaid")
def _unsaid(monkeypatch):
  """Reset the warnings, as in a process that has warned of nothing yet."""
  monkeypatch.setattr(narrowing, "_warned", set())


ASKED_FOR = {
  "tensor": lambda: torch.ones(2, dtype=torch.float64).to("jax"),
  "to": lambda: torch.ones(2, device="jax").to(torch.float64),
  "double": lambda: torch.ones(2, device="jax").double(),
  # A shape of its own: a factory that is compiled already has warned already.
  "factory": lambda: torch.zeros(1, 7, 1, dtype=torch.float64, device="jax"),
  "numpy": lambda: torch.tensor(
    jnp.ones(2).tolist(), dtype=torch.float64, device="jax"
  ),
  "complex": lambda: torch.ones(2, device="jax").to(torch.complex128),
}


# Before Python 3.12, the caller of code that is being compiled is unknown.
UNKNOWN_LINE = {"double", "factory"} if sys.version_info < (3, 12) else set()


@pytest.mark.parametrize("name", ASKED_FOR)
def test_a_64_bit_float_is_warned_of_once(name, unsaid):
  ask = ASKED_FOR[name]
  with pytest.warns(NarrowingWarning, match="jax_enable_x64") as caught:
    ask()
    ask()
  assert len(caught) == 1
  if name not in UNKNOWN_LINE:
    assert caught[0].filename == __file__


QUIET = {
  "int64": lambda: torch.arange(3).to("jax"),
  "float32": lambda: torch.ones(2, device="jax") / 3,
  "to the CPU": lambda: torch.ones(2, device="jax").to("cpu", torch.float64),
  "converted before": lambda: torch.ones(2, dtype=torch.float64).to(
    "jax", torch.float32
  ),
  "indices": lambda: torch.ones(3, device="jax").argmax(),
  "training": lambda: train(torch.nn.Linear(2, 2).to("jax")),
}


def train(model):
  optimizer = torch.optim.Adam(model.parameters())
  model(torch.ones(1, 2, device="jax")).sum().backward()
  optimizer.step()


@pytest.mark.parametrize("run", QUIET.values(), ids=QUIET)
def test_code_of_32_bits_hears_nothing(run, unsaid):
  with warnings.catch_warnings():
    warnings.simplefilter("error", NarrowingWarning)
    run()


def test_with_x64_nothing_is_narrowed(unsaid):
  with jax.enable_x64(True), warnings.catch_warnings():
    warnings.simplefilter("error", NarrowingWarning)
    assert mappings.t2j(torch.tensor([1e300], dtype=torch.float64)).tolist() == [1e300]


def test_a_number_that_becomes_infinite_is_warned_of():
  with pytest.warns(NarrowingWarning, match="infinite"):
    array = mappings.t2j(torch.tensor([1e300, 1.0], dtype=torch.float64))
  assert array.tolist() == [float("inf"), 1.0]


BYTES = {
  "int64 as int32": (torch.arange(4), torch.int32),
  "int64 as float64": (torch.arange(4), torch.float64),
  "int32 as int64": (torch.arange(4, dtype=torch.int32), torch.int64),
  "uint8 as int64": (torch.zeros(8, dtype=torch.uint8), torch.int64),
}


@pytest.mark.parametrize("source, dtype", BYTES.values(), ids=BYTES)
def test_bytes_of_64_bit_numbers_are_refused_in_graphs(source, dtype):
  run = torch.compile(lambda t: t.view(dtype) + 1, backend="jax")
  with pytest.raises(UnsupportedDtypeError, match="bytes of 64-bit numbers"):
    run(source)
  with jax.enable_x64(True):
    assert torch.equal(run(source), source.view(dtype) + 1)


@pytest.mark.parametrize("source", [torch.float32, torch.uint8])
def test_bytes_are_not_viewed_as_64_bit_numbers(source):
  with pytest.raises(UnsupportedDtypeError, match="bytes of 64-bit numbers"):
    torch.zeros(8, dtype=source, device="jax").view(torch.int64)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_view_as_its_own_64_bit_dtype_is_the_tensor(dtype, shape):
  tensor = torch.ones(shape, dtype=dtype, device="jax")
  view = tensor.view(dtype)
  assert view.dtype is tensor.dtype
  assert_same(view.add_(1), torch.full(shape, 2, dtype=view.dtype))
  assert_same(tensor, view.cpu())


WARNS_ONCE = """
import warnings, torch
from torchax.ops import mappings
with warnings.catch_warnings(record=True) as caught:
  warnings.simplefilter("always")
  mappings.t2j(torch.ones(2, dtype=torch.int64))
  assert not caught, caught
  for dtype in (torch.float64, torch.float64, torch.complex128, torch.complex128):
    mappings.t2j(torch.ones(2, dtype=dtype))
assert [w.category.__name__ for w in caught] == ["NarrowingWarning"] * 2, caught
assert "enable_accuracy_mode" in str(caught[0].message)
"""


def test_loss_of_precision_is_said_once_a_process_and_dtype():
  result = subprocess.run(
    [sys.executable, "-c", WARNS_ONCE], capture_output=True, text=True, check=False
  )
  assert result.returncode == 0, result.stderr
