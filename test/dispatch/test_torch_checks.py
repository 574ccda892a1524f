"""torch's own checks of arguments, once for each new program."""

import pytest
import torch
from opinfo import database
from torch.utils._python_dispatch import TorchDispatchMode

from torchax.core import program_limit
from torchax.dispatch import torch_checks
from torchax.interop import jax_jit
from torchax.registry.schema import functional_form, is_in_place, schema_of


@pytest.fixture
def asked(monkeypatch):
  """Record the operations for which torch's meta kernels are called."""
  found = []
  refusal = torch_checks.refusal

  def noting(op, *given):
    found.append(str(op))
    return refusal(op, *given)

  monkeypatch.setattr(torch_checks, "refusal", noting)
  return found


def test_torch_checks_once_per_new_shape(asked):
  for size in (31, 31, 32, 31, 32):
    torch.full((size,), 2.0).to("jax").frexp()
  assert asked.count("aten.frexp.Tensor") == 2


def test_refusal_keeps_the_other_programs(asked):
  right, wrong = torch.ones(3, 7).to("jax"), torch.ones(4, 7).to("jax")
  torch.mm(right, right.T)
  before = program_limit.count()
  with pytest.raises(RuntimeError, match="cannot be multiplied"):
    torch.mm(right, wrong)
  assert program_limit.count() == before
  asked.clear()
  torch.mm(right, right.T)
  assert program_limit.count() == before
  assert not asked


def test_later_calls_are_checked_with_their_own_numbers():
  torch.arange(9.0).to("jax").kthvalue(8)
  torch.arange(9.0).to("jax").kthvalue(7)
  assert torch.arange(4.0).to("jax").kthvalue(2).values.item() == 1
  with pytest.raises(RuntimeError, match="out of range"):
    torch.arange(4.0).to("jax").kthvalue(8)


def test_torch_checks_equal_layers_of_a_trace_once(asked):
  x = torch.ones(3, 13).to("jax")
  jax_jit(lambda x: x.kthvalue(2)[0] + x.kthvalue(3)[0] + x.kthvalue(2)[0])(x)
  assert asked.count("aten.kthvalue.default") == 2
  with pytest.raises(RuntimeError, match="out of range"):
    jax_jit(lambda x: x.kthvalue(3)[0] + x.kthvalue(14)[0])(x)


def test_equal_rows_of_foreach_are_checked_once(monkeypatch):
  rows, error_of = [], torch_checks._error_of

  def counting(op, args, *others):
    rows.append(len(args[0]))
    return error_of(op, args, *others)

  monkeypatch.setattr(torch_checks, "_error_of", counting)
  tensors = [torch.ones(size).to("jax") for size in (21, 22, 21, 22, 23)]
  torch._foreach_add(tensors, tensors)
  assert rows == [3]
  with pytest.raises(RuntimeError, match=r"\(23\).*\(24\)"):
    torch._foreach_add(tensors, [*tensors[:4], torch.ones(24).to("jax")])


def test_checks_do_not_draw_from_the_cpu_generator():
  torch.manual_seed(0)
  before = torch.get_rng_state()
  with pytest.raises(RuntimeError):
    torch.rand(-1, device="jax")
  torch.rand(3, 5, device="jax")
  assert torch.equal(torch.get_rng_state(), before)


class _Asking(TorchDispatchMode):
  """Mode that calls torch's meta kernel for each operation that the CPU runs."""

  def __init__(self):
    super().__init__()
    self.count = 0
    self.refused = []

  def __torch_dispatch__(self, func, types, args=(), kwargs=None):
    kwargs = kwargs or {}
    op, schema = func, schema_of(func)
    if schema.written and is_in_place(func):
      op = functional_form(func)
    is_asked = func.namespace == "aten" and op and not schema_of(op).written
    error = None
    if is_asked:
      error = torch_checks.refusal(op, args, kwargs)
    result = func(*args, **kwargs)
    self.count += bool(is_asked)
    if error is not None:
      self.refused.append((str(op), str(error)))
    return result


def test_meta_kernels_accept_the_arguments_of_the_cpu():
  asking = _Asking()
  for op in list(database.operators().values())[::8]:
    is_asked = op.supports_dtype(torch.float32, "cpu")
    if not is_asked or op.name.startswith(("sparse", "jiterator")):
      continue
    for sample in database.samples(op, torch.float32, 1):
      with asking:
        op(sample.input, *sample.args, **sample.kwargs)
  assert asking.count > 100
  assert not asking.refused
