"""Wrapper subclasses: metadata, dispatch, autograd, autocast and transforms."""

import threading

import pytest
import torch

from torchax.compat import torch_compat


class Wrapper(torch.Tensor):
  """A tensor without memory that counts its operations."""

  calls = 0
  __torch_function__ = torch_compat.disabled_torch_function

  @classmethod
  def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
    cls.calls += 1
    return torch.ones(3)


def wrapper(**options) -> Wrapper:
  return torch_compat.make_wrapper(Wrapper, (3,), **options)


def test_a_wrapper_has_the_metadata_it_was_given():
  made = wrapper(
    strides=(2,), storage_offset=1, dtype=torch.float16, requires_grad=True
  )
  assert made.shape == (3,) and made.stride() == (2,) and made.storage_offset() == 1
  assert made.dtype == torch.float16 and made.requires_grad and made.is_leaf
  assert type(made) is Wrapper


def test_operations_on_a_wrapper_go_to_its_class():
  before = Wrapper.calls
  assert type(wrapper() + 1) is torch.Tensor
  assert Wrapper.calls == before + 1


def test_without_dispatch_operations_treat_wrappers_as_plain():
  before = Wrapper.calls
  with torch_compat.without_dispatch():
    result = torch.ops.aten.expand.default(wrapper(), (2, 3))
  assert Wrapper.calls == before
  assert result.shape == (2, 3) and result.stride() == (0, 1)


def test_backward_of_a_wrapper_runs_on_the_calling_thread():
  threads = []

  class Notes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
      return x * 2

    @staticmethod
    def backward(ctx, grad):
      threads.append(threading.get_ident())
      return grad * 2

  x = torch.ones(3, device="jax", requires_grad=True)
  Notes.apply(x).sum().backward()
  assert threads == [threading.get_ident()]


def test_set_metadata_copies_metadata_and_keeps_identity():
  tensor = torch.zeros(2, 3, device="jax")
  source = torch.zeros(4, dtype=torch.int32, device="jax")
  identity = id(tensor)
  torch_compat.set_metadata(tensor, source)
  assert id(tensor) == identity
  assert tensor.shape == (4,) and tensor.dtype == torch.int32


def test_metadata_can_be_set_inside_an_operation():
  tensor = torch.arange(6.0, device="jax").view(2, 3).clone()
  assert tensor.t_() is tensor
  assert tensor.shape == (3, 2) and tensor.stride() == (1, 3)


def test_a_tensor_becomes_a_parameter():
  tensor = torch.ones(2, device="jax")
  assert not torch_compat.is_parameter(tensor)
  assert torch_compat.mark_as_parameter(tensor) is tensor
  assert torch_compat.is_parameter(tensor)
  assert torch_compat.is_parameter(torch.nn.Parameter(torch.ones(2)))
  assert not torch_compat.is_parameter(torch.ones(2))


def test_a_wrapper_can_be_marked_as_conjugate_and_negative():
  wrapper = torch_compat.make_wrapper(
    Wrapper, (2,), dtype=torch.complex64, device="meta"
  )
  torch_compat.set_conj(wrapper, True)
  torch_compat.set_neg(wrapper, True)
  assert torch.Tensor.is_conj(wrapper) and torch.Tensor.is_neg(wrapper)
  torch_compat.set_conj(wrapper, False)
  assert not torch.Tensor.is_conj(wrapper)


def test_in_place_results_are_their_arguments():
  class Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
      plain = [x.inner if type(x) is cls else x for x in args]
      result = make(func(*plain, **(kwargs or {})))
      return torch_compat.correct_aliasing(func, args, kwargs or {}, result)

  def make(inner):
    made = torch_compat.make_wrapper(Wrapper, inner.shape, dtype=inner.dtype)
    made.inner = inner
    return made

  tensor = make(torch.ones(3))
  assert tensor.add_(1) is tensor
  assert tensor.inner.tolist() == [2.0] * 3
  assert tensor.add(1) is not tensor


def test_innermost_unwraps_transforms():
  x, found = torch.ones(2, 3), []

  def note(row):
    found.append((row, torch_compat.innermost(row)))
    return row.sum()

  torch.func.vmap(torch.func.grad(note))(x)
  ((wrapped, inner),) = found
  assert wrapped.shape == (3,) and inner is not wrapped and inner.shape == (2, 3)
  assert torch_compat.innermost(x) is x


# The arguments of to ------------------------------------------------------------------

PARSED = {
  "device": (("cpu",), {}, (torch.device("cpu"), None)),
  "index": (("jax:0",), {}, (torch.device("jax:0"), None)),
  "dtype": ((torch.float16,), {}, (None, torch.float16)),
  "both": (("cpu", torch.int8), {}, (torch.device("cpu"), torch.int8)),
  "keywords": (
    (),
    {"device": "cpu", "dtype": torch.int8},
    (torch.device("cpu"), torch.int8),
  ),
  "non_blocking": (("cpu", None, True), {}, (torch.device("cpu"), None)),
}


@pytest.mark.parametrize("row", PARSED.values(), ids=PARSED)
def test_the_arguments_of_to_are_parsed(row):
  args, kwargs, expected = row
  assert torch_compat.parse_to(*args, **kwargs)[:2] == expected


# Autocast -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cast_operation():
  """An operation with a kernel for autocast that notes its calls."""
  library = torch.library.Library("torchax_autocast_test", "DEF")
  library.define("twice(Tensor x) -> Tensor")
  op, calls = torch.ops.torchax_autocast_test.twice.default, []

  def kernel(x):
    calls.append(torch.is_autocast_enabled("jax"))
    with torch_compat.without_autocast():
      calls.append(torch.is_autocast_enabled("jax"))
      return op(x)

  torch_compat.register_autocast_kernel(op, kernel)
  yield op, calls
  # Its own kernels alone: torch drops those of a library with the library.
  del library


@pytest.mark.parametrize(("enabled", "expected"), [(True, [True, False]), (False, [])])
def test_autocast_sees_wrappers(cast_operation, enabled, expected):
  op, calls = cast_operation
  calls.clear()
  made = wrapper()
  with torch.autocast("jax", dtype=torch.bfloat16, enabled=enabled):
    assert torch.equal(op(made), torch.ones(3))
  assert calls == expected


def test_operations_without_autocast_kernel_run_unchanged():
  made = wrapper()
  with torch.autocast("jax", dtype=torch.bfloat16):
    assert torch.equal(torch.abs(made), torch.ones(3))
