"""Gradients at the start of a compiled step: dropped ones are not in the cache key.

Each step runs four times on jax eagerly and compiled: parameters, gradients and losses
are equal after every call, and the number of programs is the expected one.
"""

import functools

import pytest
import torch
from torch import nn, optim

import torchax
from torchax.errors import MutationError
from torchax.interop import jax_jit

X = torch.linspace(-1, 1, 6).reshape(2, 3)

pytestmark = pytest.mark.usefixtures("env")


class Model(nn.Module):
  """Two layers; `unused` and `frozen` receive no gradient."""

  def __init__(self):
    super().__init__()
    torch.manual_seed(0)
    self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
    self.unused = nn.Parameter(torch.ones(3))
    self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

  def forward(self, x):
    return self.second(self.first(x).tanh()) * self.frozen


class Training:
  """A model with one optimizer for each layer."""

  def __init__(self):
    self.model = Model().to("jax")
    first, second = self.model.first.parameters(), self.model.second.parameters()
    rest = [self.model.unused, self.model.frozen]
    self.optimizer = optim.AdamW([*first, *rest], 0.1)
    self.other = optim.SGD(second, 0.1, momentum=0.9)

  def backward(self, x):
    loss = self.model(x).square().sum()
    loss.backward()
    return loss.detach()

  def step(self):
    self.optimizer.step()
    self.other.step()

  def zero_grad(self, set_to_none=True):
    self.optimizer.zero_grad(set_to_none)
    self.other.zero_grad(set_to_none)

  def gradients(self):
    return [p.grad for p in self.model.parameters()]


def optimizers_drop(training, x):
  training.zero_grad()
  loss = training.backward(x)
  training.step()
  return loss


def module_drops(training, x):
  training.model.zero_grad()
  loss = training.backward(x)
  nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
  training.step()
  return loss


def assignments_drop(training, x):
  for parameter in training.model.parameters():
    parameter.grad = None
  loss = training.backward(x)
  training.step()
  return loss


def deletions_drop(training, x):
  for parameter in training.model.parameters():
    del parameter.grad
  return training.backward(x)


def drops_at_the_end(training, x):
  loss = training.backward(x)
  training.step()
  training.zero_grad()
  return loss


def accumulates(training, x):
  loss = training.backward(x)
  training.step()
  return loss


def accumulates_two_parts(training, x):
  training.zero_grad()
  training.backward(x)
  loss = training.backward(x + 1)
  training.step()
  return loss


def one_of_two_drops(training, x):
  training.optimizer.zero_grad()
  loss = training.backward(x)
  training.step()
  return loss


def reads_presence(training, x):
  is_there = training.model.first.weight.grad is not None
  training.zero_grad()
  return training.backward(x) + is_there


def writes_zeros(training, x):
  training.zero_grad(set_to_none=False)
  loss = training.backward(x)
  training.step()
  return loss


PROGRAMS = {
  optimizers_drop: 1,
  module_drops: 1,
  assignments_drop: 1,
  deletions_drop: 1,
  drops_at_the_end: 1,
  accumulates_two_parts: 1,
  accumulates: 2,
  one_of_two_drops: 2,
  reads_presence: 2,
  writes_zeros: 2,
}


def assert_same_state(ours: Training, theirs: Training):
  # Roundings of the gradients, divided by small second moments, for four steps.
  close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
  close(ours.model.state_dict(), theirs.model.state_dict())
  for found, expected in zip(ours.gradients(), theirs.gradients()):
    assert (found is None) == (expected is None)
    if expected is not None:
      close(found, expected)


@pytest.mark.parametrize("step", PROGRAMS, ids=lambda step: step.__name__)
def test_steps_equal_eager_with_the_fewest_programs(step):
  eager, compiled, x = Training(), Training(), X.to("jax")
  run = jax_jit(functools.partial(step, compiled))
  for _ in range(4):
    torch.testing.assert_close(run(x), step(eager, x), rtol=1e-4, atol=1e-4)
    assert_same_state(compiled, eager)
  assert torchax.explain(run, x).compilations == PROGRAMS[step]


@pytest.mark.parametrize("step", PROGRAMS, ids=lambda step: step.__name__)
def test_gradients_from_before_the_first_call_count(step):
  eager, compiled, x = Training(), Training(), X.to("jax")
  for training in (eager, compiled):
    training.backward(x)
    training.model.unused.grad = torch.ones(3, device="jax")
    training.model.frozen.grad = torch.ones(3, device="jax")
  run = jax_jit(functools.partial(step, compiled))
  for _ in range(2):
    torch.testing.assert_close(run(x), step(eager, x), rtol=1e-4, atol=1e-4)
    assert_same_state(compiled, eager)


def test_the_caller_may_change_gradients_between_calls():
  eager, compiled, x = Training(), Training(), X.to("jax")
  run = jax_jit(functools.partial(accumulates, compiled))
  for call in range(4):
    torch.testing.assert_close(run(x), accumulates(eager, x))
    for training in (eager, compiled):
      if call == 1:
        training.model.first.weight.grad = None
      if call == 2:
        training.model.zero_grad()
    assert_same_state(compiled, eager)


def test_an_error_in_the_trace_keeps_the_gradients():
  training, x = Training(), X.to("jax")
  training.backward(x)
  before = training.gradients()

  @jax_jit
  def step(x):
    optimizers_drop(training, x)
    raise KeyError("after the step")

  with pytest.raises(KeyError):
    step(x)
  assert all(map(lambda new, old: new is old, training.gradients(), before))


def test_a_step_in_a_compiled_function_drops_gradients():
  eager, compiled, x = Training(), Training(), X.to("jax")
  inner = jax_jit(functools.partial(optimizers_drop, compiled))
  run = jax_jit(lambda x: inner(x) * 2)
  for _ in range(3):
    torch.testing.assert_close(run(x), optimizers_drop(eager, x) * 2)
    assert_same_state(compiled, eager)
  assert torchax.explain(run, x).compilations == 1


def _backward(x):
  (x * x).sum().backward()


def _backward_of_cleared(x):
  x.grad = None
  _backward(x)


def _clear(x):
  x.grad = None


def _update(x):
  _backward(x)
  with torch.no_grad():
    x -= 0.25 * x.grad
  x.grad = None


@pytest.mark.parametrize("wrap", [jax_jit, lambda f: jax_jit(jax_jit(f))])
@pytest.mark.parametrize("function", [_backward, _backward_of_cleared, _clear, _update])
def test_gradients_of_arguments_reach_the_caller(wrap, function):
  leaf, expected = [torch.ones(2, device=d, requires_grad=True) for d in ("jax", "cpu")]
  compiled = wrap(function)
  (leaf * 2).sum().backward()
  (expected * 2).sum().backward()
  if function is _update:  # which reads the gradient
    leaf.grad = expected.grad = None
  for _ in range(3):
    compiled(leaf)
    function(expected)
    assert leaf.tolist() == expected.tolist()
    assert (leaf.grad is None) == (expected.grad is None)
    assert leaf.grad is None or leaf.grad.tolist() == expected.grad.tolist()


def test_gradients_of_arguments_reach_leaves_of_the_caller():
  leaf = torch.ones(2, device="jax", requires_grad=True)
  leaf.register_hook(lambda gradient: gradient * 2)
  jax_jit(_backward)(leaf * 3)
  assert leaf.grad.tolist() == [36.0, 36.0]
  jax_jit(lambda x, y: (x * y).sum().backward())(leaf, leaf)
  assert leaf.grad.tolist() == [40.0, 40.0]
  padded = jax_jit(_backward, buckets={"x": {0: [4]}})
  leaf.grad = None
  padded(leaf)
  assert leaf.grad.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("is_first", [False, True])
def test_reading_an_earlier_gradient_of_an_argument_raises(is_first):
  """The error comes before the call has drawn or changed anything."""
  state = torch.zeros(2, device="jax")

  def run(x):
    state.add_(torch.rand(2, device="jax"))
    return x.grad

  compiled = jax_jit(run)
  leaf = torch.ones(2, device="jax", requires_grad=True)
  if not is_first:
    assert compiled(leaf) is None
  leaf.grad = torch.ones(2, device="jax")
  before, draws = state.tolist(), torchax.device_module.get_rng_state()
  with pytest.raises(MutationError, match="reads the `.grad` of an argument"):
    compiled(leaf)
  assert state.tolist() == before
  assert torchax.device_module.get_rng_state().equal(draws)


def test_a_hook_reads_the_new_gradient():
  training, x, seen = Training(), X.to("jax"), torch.zeros(3, 3, device="jax")
  weight = training.model.first.weight

  def add(parameter):
    seen.add_(parameter.grad)

  weight.register_post_accumulate_grad_hook(add)
  run = jax_jit(functools.partial(optimizers_drop, training))
  expected = torch.zeros(3, 3, device="jax")
  for _ in range(3):
    run(x)
    expected += weight.grad
  torch.testing.assert_close(seen, expected)
  assert torchax.explain(run, x).compilations == 1


def test_accesses_are_recorded_only_during_a_trace():
  training = Training()
  assert "grad" not in vars(torchax.tensor.Tensor)
  jax_jit(functools.partial(optimizers_drop, training))(X.to("jax"))
  assert "grad" not in vars(torchax.tensor.Tensor)
