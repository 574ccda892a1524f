"""The first call of a compiled function runs its Python once."""

import functools

import pytest
import torch
from torch import nn, optim
from tracing.steps import training_step

import torchax
from torchax.compat import jax_compat
from torchax.errors import TracedStateError
from torchax.interop import jax_jit

pytestmark = pytest.mark.usefixtures("env")


def _counting(function):
  """Return the function, with a list of its runs as `runs`."""

  @functools.wraps(function)
  def counted(*args):
    counted.runs.append(1)
    return function(*args)

  counted.runs = []
  return counted


def _tensor(*values: float) -> torch.Tensor:
  return torch.tensor(values, device="jax")


def _training(make):
  torch.manual_seed(0)
  model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 3)).to("jax")
  return model, make(model.parameters())


@pytest.mark.parametrize(
  "make",
  [
    lambda p: optim.AdamW(p, 0.1),
    lambda p: optim.Adam(p, 0.1, foreach=False, capturable=True),
    lambda p: optim.SGD(p, 0.1, momentum=0.9),
  ],
  ids=["foreach", "one by one", "momentum"],
)
def test_a_training_step_is_traced_once_and_draws_as_eager(make):
  x, results = torch.ones(2, 3, device="jax"), []
  for is_compiled in (False, True):
    model, optimizer = _training(make)
    step = _counting(functools.partial(training_step, model, optimizer))
    run = jax_jit(step) if is_compiled else step
    torch.manual_seed(1)
    results.append([*[run(x) for _ in range(3)], *model.parameters()])
    assert len(step.runs) == (1 if is_compiled else 3)
  for compiled, eager in zip(*results):
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


def test_captured_tensors_stay_operands():
  first, second = _tensor(1.0, 2.0), _tensor(3.0, 4.0)
  function = _counting(lambda x: x * first + second.sum())
  run = jax_jit(function)
  assert run(_tensor(1.0, 1.0)).tolist() == [8.0, 9.0]
  first.add_(1)
  second.data = _tensor(0.0, 1.0)
  assert run(_tensor(1.0, 1.0)).tolist() == [3.0, 4.0]
  assert len(function.runs) == 1


def test_tensors_with_the_same_array_are_two_operands():
  first = _tensor(1.0, 2.0)
  second = torchax.default_env().j2t_iso(first.jax())
  run = jax_jit(lambda x: x + first - second)
  assert run(_tensor(0.0, 0.0)).tolist() == [0.0, 0.0]
  second.zero_()
  assert run(_tensor(0.0, 0.0)).tolist() == [1.0, 2.0]


def test_the_first_call_writes_captured_tensors():
  total, unread = _tensor(1.0), _tensor(0.0)

  @jax_jit
  def run(x):
    total.add_(x)
    unread.fill_(7)
    return total * 2

  assert [run(_tensor(1.0)).item() for _ in range(2)] == [4.0, 6.0]
  assert total.item() == 3.0 and unread.item() == 7.0


def test_a_captured_tensor_is_no_number_in_the_first_trace():
  limit = _tensor(1.0)
  function = _counting(lambda x: x if limit > 0 else -x)
  with pytest.raises(TracedStateError, match="there are none yet"):
    jax_jit(function)(_tensor(1.0))
  assert len(function.runs) == 1


def test_a_new_generator_is_met_in_a_second_trace():
  generator = torch.Generator().manual_seed(3)
  function = _counting(lambda x: x + torch.rand(2, device="jax", generator=generator))
  found = jax_jit(function)(_tensor(0.0, 0.0))
  expected = torch.rand(2, device="jax", generator=torch.Generator().manual_seed(3))
  assert torch.equal(found, expected) and len(function.runs) == 2


def test_a_nested_function_is_traced_once():
  weight = _tensor(2.0)
  inner = _counting(lambda x: x * weight)
  compiled = jax_jit(inner)
  outer = _counting(lambda x: compiled(x) + weight)
  run = jax_jit(outer)
  assert run(_tensor(3.0)).item() == 8.0
  weight.add_(1)
  assert run(_tensor(3.0)).item() == 12.0
  assert len(outer.runs) == len(inner.runs) == 1


def test_the_gradient_of_a_captured_tensor_is_recorded():
  model = nn.Linear(2, 1, device="jax")
  function = _counting(lambda x: model(x).sum())
  jax_jit(function)(_tensor(1.0, 2.0)).backward()
  assert model.weight.grad.tolist() == [[1.0, 2.0]] and len(function.runs) == 1


def test_an_attribute_that_the_function_counts_is_traced_again():
  module = nn.Linear(2, 2, device="jax")
  module.calls, weight = 0, _tensor(1.0, 1.0)

  @jax_jit
  def run(x):
    module.calls += 1
    return module(x) * 0 + weight * module.calls

  counts = [run(_tensor(1.0, 1.0))[0].item() for _ in range(3)]
  assert counts == sorted(counts) and len(set(counts)) == 3


def test_without_stand_ins_the_function_is_traced_twice(monkeypatch):
  monkeypatch.setattr(jax_compat, "_set_current_trace", None)
  weight = _tensor(2.0)
  function = _counting(lambda x: x * weight)
  assert jax_jit(function)(_tensor(3.0)).item() == 6.0
  assert len(function.runs) == 2
