"""Compiled training steps create and count the state of every optimizer of torch.

Each row trains with a compiled step only, from the first step on, under a learning-rate
schedule. Parameters and state are compared with torch on the CPU.
"""

import functools

import pytest
import torch
from compare import assert_same
from torch import nn, optim
from torch.optim.optimizer import _global_optimizer_pre_hooks
from tracing.steps import training_step

import torchax
from torchax.errors import TracedStateError
from torchax.interop import jax_jit

STEPS = 4
X = torch.linspace(-1, 1, 15).reshape(5, 3)

OPTIMIZERS = {
  "Adadelta": optim.Adadelta,
  "Adagrad": lambda p: optim.Adagrad(p, 0.1, lr_decay=0.1, weight_decay=0.01),
  "Adagrad, one by one": lambda p: optim.Adagrad(p, 0.1, foreach=False),
  "Adam": optim.Adam,
  "AdamW": lambda p: optim.AdamW(p, 0.01, amsgrad=True),
  "Adamax": optim.Adamax,
  "ASGD": optim.ASGD,
  "NAdam": optim.NAdam,
  "RAdam": optim.RAdam,
  "RMSprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
  "Rprop": optim.Rprop,
  "SGD": lambda p: optim.SGD(p, 0.1),
  "SGD, momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
  "SGD, dampening": lambda p: optim.SGD(p, 0.1, momentum=0.9, dampening=0.5),
  "SGD, dampening, one by one": lambda p: optim.SGD(
    p, 0.1, momentum=0.9, dampening=0.5, foreach=False
  ),
}
# Rows whose first step has a program of its own: it creates the state from gradients.
MADE_OF_GRADIENTS = {"SGD, dampening", "SGD, dampening, one by one"}

pytestmark = pytest.mark.usefixtures("env")


def _model() -> nn.Module:
  torch.manual_seed(0)
  return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _state(optimizer) -> dict:
  return torch.utils._pytree.tree_map(
    lambda value: value.detach().cpu() if isinstance(value, torch.Tensor) else value,
    optimizer.state_dict()["state"],
  )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiling_the_first_step_trains_as_torch(name):
  make = OPTIMIZERS[name]
  with torchax.disable_temporarily():
    expected = _model()
    expected_optimizer = make(expected.parameters())
    expected_schedule = optim.lr_scheduler.ExponentialLR(expected_optimizer, 0.5)
    for _ in range(STEPS):
      training_step(expected, expected_optimizer, X)
      expected_schedule.step()
    model = _model()
  model = model.to("jax")
  optimizer = make(model.parameters())
  schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
  step = jax_jit(lambda x: training_step(model, optimizer, x))
  counts, x = [], X.to("jax")
  for _ in range(STEPS):
    step(x)
    schedule.step()
    counts.append(torchax.explain(step, x).compilations)
  for ours, theirs in zip(model.parameters(), expected.parameters()):
    torch.testing.assert_close(
      ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5
    )
  torch.testing.assert_close(
    _state(optimizer), _state(expected_optimizer), rtol=1e-4, atol=1e-5
  )
  assert counts[-1] == 1 + (name in MADE_OF_GRADIENTS), counts


class OwnOptimizer(optim.Optimizer):
  """Optimizer that creates its state on first use."""

  def __init__(self, params):
    super().__init__(params, {"lr": 0.1})

  @torch.no_grad()
  def step(self):
    for group in self.param_groups:
      for p in group["params"]:
        if p.grad is None:
          continue
        state = self.state[p]
        if not state:
          state["size"] = torch.zeros_like(p)
          state["count"] = torch.zeros((), device=p.device)
        state["count"] += 1
        state["size"].mul_(0.5).add_(p.grad.abs())
        p.sub_(p.grad / (state["size"] + 1), alpha=group["lr"])


def test_custom_optimizer_creates_state_in_a_compiled_step():
  model = _model().to("jax")
  optimizer = OwnOptimizer(model.parameters())
  eager = _model().to("jax")
  eager_optimizer = OwnOptimizer(eager.parameters())
  step = jax_jit(lambda x: training_step(model, optimizer, x))
  for _ in range(STEPS):
    torch.testing.assert_close(
      step(X.to("jax")), training_step(eager, eager_optimizer, X.to("jax"))
    )
  torch.testing.assert_close(_state(optimizer), _state(eager_optimizer))
  assert all(entry["count"] == STEPS for entry in optimizer.state.values())


def test_a_step_that_reads_a_tensor_raises_and_keeps_the_state():
  model = _model().to("jax")
  optimizer = optim.Adafactor(model.parameters())
  with pytest.raises(TracedStateError, match="needs the numbers of a tensor"):
    jax_jit(lambda x: training_step(model, optimizer, x))(X.to("jax"))
  assert not optimizer.state


def test_a_step_in_nested_compiled_functions_creates_state():
  model = _model().to("jax")
  optimizer = OPTIMIZERS["SGD, dampening"](model.parameters())
  inner = jax_jit(lambda x: training_step(model, optimizer, x))
  outer = jax_jit(lambda x: inner(x) * 2)
  eager = _model().to("jax")
  eager_optimizer = OPTIMIZERS["SGD, dampening"](eager.parameters())
  for _ in range(3):
    expected = training_step(eager, eager_optimizer, X.to("jax")) * 2
    torch.testing.assert_close(outer(X.to("jax")), expected)
  torch.testing.assert_close(_state(optimizer), _state(eager_optimizer))


def test_two_steps_in_one_compiled_function_share_the_state():
  model = _model().to("jax")
  optimizer = OPTIMIZERS["SGD, dampening"](model.parameters())
  eager = _model().to("jax")
  eager_optimizer = OPTIMIZERS["SGD, dampening"](eager.parameters())

  @jax_jit
  def twice(x):
    training_step(model, optimizer, x)
    return training_step(model, optimizer, x)

  for _ in range(2):
    training_step(eager, eager_optimizer, X.to("jax"))
    expected = training_step(eager, eager_optimizer, X.to("jax"))
    torch.testing.assert_close(twice(X.to("jax")), expected)
  torch.testing.assert_close(_state(optimizer), _state(eager_optimizer))


def test_a_failed_trace_restores_the_optimizer():
  model = _model().to("jax")
  optimizer = OPTIMIZERS["SGD, dampening"](model.parameters())

  @jax_jit
  def step(x):
    training_step(model, optimizer, x)
    raise KeyError("after the step")

  with pytest.raises(KeyError):
    step(X.to("jax"))
  assert not optimizer.state


def test_explain_names_the_state_that_a_call_creates():
  model = _model().to("jax")
  optimizer = OPTIMIZERS["SGD, dampening"](model.parameters())
  step = jax_jit(lambda x: training_step(model, optimizer, x))
  effects = torchax.explain(step, X.to("jax")).effects
  assert effects["SGD.state[0]['momentum_buffer']"] == "assigned"
  assert not optimizer.state


class Watching(optim.SGD):
  """Optimizer that records its groups and the caller's optimizer's in a step."""

  def step(self, closure=None):
    seen.append((self.param_groups[0]["lr"], caller[0].param_groups[0]["lr"]))
    self.steps = 1 + getattr(self, "steps", 0)
    return super().step(closure)


seen: list = []
caller: list = []


def test_a_traced_step_does_not_touch_param_groups():
  model = _model().to("jax")
  optimizer = Watching(model.parameters(), 0.5)
  caller[:], seen[:] = [optimizer], []
  jax_jit(lambda x: training_step(model, optimizer, x))(X.to("jax"))
  assert seen
  assert all(type(given) is float for _, given in seen)
  assert not any(type(inside) is float for inside, _ in seen)
  assert optimizer.steps == 1


def test_a_hook_changing_groups_in_a_traced_step_raises():
  model = _model().to("jax")
  optimizer = optim.SGD(model.parameters(), 0.5)

  def halve(optimizer, args, kwargs):
    optimizer.param_groups[0]["lr"] *= 0.5

  optimizer.register_step_pre_hook(halve)
  with pytest.raises(TracedStateError, match="SGD changes 'lr'"):
    jax_jit(lambda x: training_step(model, optimizer, x))(X.to("jax"))
  assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
  "compile_step",
  [jax_jit, torchax.compile, lambda step: functools.partial(torchax.explain, step)],
)
@pytest.mark.parametrize("comes_first", [False, True])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_schedule_in_a_compiled_function_raises(compile_step, comes_first):
  model = _model().to("jax")
  optimizer = optim.SGD(model.parameters(), 1.0)
  schedule = optim.lr_scheduler.StepLR(optimizer, 1)
  before = {name: p.clone() for name, p in model.state_dict().items()}

  def step(x):
    if comes_first:
      schedule.step()
    loss = training_step(model, optimizer, x)
    if not comes_first:
      schedule.step()
    return loss

  with pytest.raises(TracedStateError, match="changes 'lr'.*schedule after the call"):
    compile_step(step)(X.to("jax"))
  assert optimizer.param_groups[0]["lr"] == 1.0
  assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_a_learning_rate_may_be_an_argument_of_a_compiled_step():
  expected, model = _model(), _model().to("jax")
  plain, optimizer = (optim.Adam(m.parameters(), 1.0) for m in (expected, model))

  def step(model, optimizer, x, rate):
    optimizer.param_groups[0]["lr"] = rate
    return training_step(model, optimizer, x)

  compiled = jax_jit(lambda x, rate: step(model, optimizer, x, rate))
  for rate in (0.05, 0.025, 0.05):
    compiled(X.to("jax"), torch.tensor(rate, device="jax"))
    step(expected, plain, X, rate)
  assert optimizer.param_groups[0]["lr"] == 1.0, "no traced value outlives the trace"
  assert_same(dict(model.state_dict()), dict(expected.state_dict()))


def test_equal_numbers_may_be_assigned_to_groups_in_a_trace():
  model = _model().to("jax")
  optimizer = optim.SGD(model.parameters(), 1.0)

  @jax_jit
  def step(x):
    loss = training_step(model, optimizer, x)
    for group in optimizer.param_groups:
      group["lr"] = float("1.0")
    return loss

  losses = [step(X.to("jax")) for _ in range(2)]
  assert losses[0] != losses[1]


def test_step_hooks_are_installed_only_during_a_trace():
  model = _model().to("jax")
  optimizer = optim.SGD(model.parameters(), 0.5)
  hooks = _global_optimizer_pre_hooks
  counts = [len(hooks)]

  def step(x):
    counts.append(len(hooks))
    return training_step(model, optimizer, x)

  jax_jit(step)(X.to("jax"))
  assert len(hooks) == counts[0]
  assert set(counts[1:]) == {counts[0] + 1}
