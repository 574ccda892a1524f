"""Compiled training steps of optimizers that count in Python.

A number that a step changes is an operand, and each call computes the new one. Losses
and numbers are compared with torch on the CPU.
"""

import math

import pytest
import torch
from torch import nn, optim
from tracing.steps import training_step

import torchax
from torchax.errors import TracedStateError
from torchax.interop import jax_jit

STEPS = 6
X = torch.linspace(-1, 1, 15).reshape(5, 3)

pytestmark = pytest.mark.usefixtures("env")


class Counting(optim.Optimizer):
  """Adam with a warm-up, that counts its steps where a row says."""

  def __init__(self, params, count):
    settings = {"lr": 0.1, "betas": (0.9, 0.99), "step": 0, "largest": -1.0}
    super().__init__(params, {**settings, "is_warm": False})
    self.count, self.steps = count, 0

  @torch.no_grad()
  def step(self):
    self.steps += 1
    for group in self.param_groups:
      group["step"] += 1
      group["later"] = group["later"] + 1 if "later" in group else 1
      group.setdefault("tensor", torch.tensor(0.0)).add_(1)
      for p in group["params"]:
        self.update(p, group)

  def update(self, p, group):
    state = self.state[p]
    if not state:
      state.update(step=0, mean=torch.zeros_like(p), norm=0.0)
      state["tensor"] = torch.tensor(0.0)
    state["step"] += 1
    state["tensor"] += 1
    count = self.count(self, group, state)
    if count == 3:
      group["is_warm"] = True
    beta1, beta2 = group["betas"]
    rate = group["lr"] * min(count / 3, 1.0)
    group["largest"] = rate = max(rate, group["largest"])
    state["mean"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
    state["norm"] = state["norm"] * beta2 + p.grad.norm()  # a new tensor each time
    size = rate * math.sqrt(1 - math.pow(beta2, count)) / (1 - beta1**count)
    changes = [state["mean"] / (1 + state["norm"]), state["mean"]]
    torch._foreach_mul_(changes, [size, size / 2])
    p.sub_(changes[0] + changes[1])


COUNTS = {
  "an attribute": lambda optimizer, group, state: optimizer.steps,
  "a group": lambda optimizer, group, state: group["step"],
  "a group, from the first step on": lambda optimizer, group, state: group["later"],
  "a parameter": lambda optimizer, group, state: state["step"],
  "a CPU tensor": lambda optimizer, group, state: state["tensor"].item(),
  "a CPU tensor of a group": lambda optimizer, group, state: group["tensor"].item(),
}


def _model() -> nn.Module:
  torch.manual_seed(0)
  return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _numbers(optimizer) -> tuple:
  """Return the numbers of an optimizer."""
  groups = [{**group, "params": None} for group in optimizer.param_groups]
  steps = [(s["step"], s["tensor"].item()) for s in optimizer.state.values()]
  return optimizer.steps, groups, steps


def _pair(count, compile_step=jax_jit) -> tuple:
  """Return torch's step on the CPU, the compiled step, and both optimizers."""
  expected, model = _model(), _model().to("jax")
  plain = Counting(expected.parameters(), count)
  optimizer = Counting(model.parameters(), count)
  step = compile_step(lambda x: training_step(model, optimizer, x))
  return lambda: training_step(expected, plain, X), step, plain, optimizer


def _check(compiled, expected, plain, optimizer) -> None:
  """Take a step of both, and compare losses and numbers."""
  torch.testing.assert_close(compiled.cpu(), expected, rtol=1e-4, atol=1e-5)
  assert _numbers(optimizer) == _numbers(plain)
  values = [v for s in optimizer.state.values() for v in s.values()]
  assert not any(isinstance(value, torch.SymFloat) for value in values)


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_counts_in_python_train_as_torch(count):
  expected, step, plain, optimizer = _pair(count)
  compilations = []
  for _ in range(STEPS):
    _check(step(X.to("jax")), expected(), plain, optimizer)
    compilations.append(torchax.explain(step, X.to("jax")).compilations)
  # The state is made, the warm-up ends: nothing else is compiled.
  assert compilations[-1] == compilations[3] <= 5, compilations


def test_a_saved_count_resumes():
  expected, step, plain, optimizer = _pair(COUNTS["a group"])
  for _ in range(2):
    _check(step(X.to("jax")), expected(), plain, optimizer)
  plain.load_state_dict(plain.state_dict())
  optimizer.load_state_dict(optimizer.state_dict())
  for _ in range(2):
    _check(step(X.to("jax")), expected(), plain, optimizer)
  for each in (plain, optimizer):
    each.param_groups[0]["step"] = 0
  _check(step(X.to("jax")), expected(), plain, optimizer)


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_two_steps_in_one_compiled_function_count_twice(count):
  expected, once, plain, optimizer = _pair(count, lambda step: step)
  twice = jax_jit(lambda x: (once(x), once(x))[1])
  for _ in range(3):
    expected()
    _check(twice(X.to("jax")), expected(), plain, optimizer)


def test_a_cleared_state_starts_again_and_is_only_read():
  expected, step, plain, optimizer = _pair(COUNTS["a parameter"])
  for _ in range(2):
    _check(step(X.to("jax")), expected(), plain, optimizer)
  for each in (plain, optimizer):
    each.state.clear()
  torchax.explain(step, X.to("jax"))
  assert not optimizer.state
  _check(step(X.to("jax")), expected(), plain, optimizer)


def test_a_failed_trace_restores_the_numbers():
  _, once, _, optimizer = _pair(COUNTS["a parameter"], lambda step: step)
  once(X.to("jax"))
  before = _numbers(optimizer)

  @jax_jit
  def fails(x):
    once(x)
    raise KeyError("after the step")

  with pytest.raises(KeyError):
    fails(X.to("jax"))
  assert _numbers(optimizer) == before


def test_a_count_in_a_nested_compiled_function_raises():
  _, inner, _, optimizer = _pair(COUNTS["a group"])
  before = _numbers(optimizer)
  with pytest.raises(TracedStateError, match="Counting changes 'steps'"):
    jax_jit(lambda x: inner(x) * 2)(X.to("jax"))
  assert _numbers(optimizer) == before


def test_explain_names_the_numbers_that_a_call_sets():
  _, step, _, optimizer = _pair(COUNTS["a group"])
  step(X.to("jax"))
  effects = ", ".join(torchax.explain(step, X.to("jax")).effects)
  for name in ("steps", "param_groups[0]['step']", "state[1]['step']"):
    assert f"Counting.{name}" in effects
  assert optimizer.steps == 1


class Dividing(optim.Optimizer):
  """Optimizer that divides by a total, which is zero at first."""

  def __init__(self, params):
    super().__init__(params, {"step": 0, "total": 0})

  @torch.no_grad()
  def step(self):
    group = self.param_groups[0]
    weight = group["step"]
    group["step"] += 1
    group["total"] += weight
    try:
      rate = weight / group["total"]
    except ZeroDivisionError:
      rate = 1
    for p in group["params"]:
      p.sub_(p.grad, alpha=rate)


def test_a_division_by_a_count_of_zero_raises_in_the_trace():
  losses = []
  for device, compile_step in (("cpu", lambda step: step), ("jax", jax_jit)):
    model = _model().to(device)
    optimizer = Dividing(model.parameters())
    step = compile_step(lambda x, m=model, o=optimizer: training_step(m, o, x))
    losses.append([step(X.to(device)).item() for _ in range(4)])
  assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_functions_of_math_are_replaced_only_during_a_step():
  before = math.sqrt
  inside = []
  jax_jit(lambda x: inside.append(math.sqrt) or x)(X.to("jax"))
  assert math.sqrt is before
  assert inside[0] is not before
  assert inside[0](4) == 2.0


class Wrapping(optim.Optimizer):
  """Optimizer that halves the gradients, every other step, for another one."""

  def __init__(self, inner):
    # As of a copy: `__init__` would set the groups.
    state = {"at the start": 0}
    self.__setstate__({"inner": inner, "steps": 0, "defaults": {}, "state": state})

  @property
  def param_groups(self):
    return self.inner.param_groups

  def step(self):
    self.steps += 1
    if self.steps % 2:
      for p in self.param_groups[0]["params"]:
        p.grad.mul_(0.5)
    self.inner.step()

  def zero_grad(self):
    self.inner.zero_grad()


def test_an_optimizer_may_wrap_another():
  losses = []
  for device, compile_step in (("cpu", lambda step: step), ("jax", jax_jit)):
    model = _model().to(device)
    optimizer = Wrapping(optim.AdamW(model.parameters(), 0.1))
    step = compile_step(lambda x, m=model, o=optimizer: training_step(m, o, x))
    losses.append([step(X.to(device)).item() for _ in range(5)])
    assert optimizer.steps == 5
  assert losses[1] == pytest.approx(losses[0], rel=1e-4)


class Collecting(optim.Optimizer):
  """Optimizer with a list and a dict in its state, which a row changes."""

  def __init__(self, params, change):
    super().__init__(params, {"lr": 0.1})
    self.change = change
    self.options: dict = {}
    self.options["options"] = self.options

  @torch.no_grad()
  def step(self):
    for p in self.param_groups[0]["params"]:
      state = self.state[p]
      if not state:
        state.update(sums=[torch.zeros_like(p)], by_name={"count": 0, "sum": p * 0})
      self.change(state, p.grad)
      p.sub_(sum(state["sums"]) + state["by_name"]["sum"], alpha=0.1)


def _add_to_list(state, gradient):
  state["sums"][0] = state["sums"][0] + gradient


def _add_to_dict(state, gradient):
  state["by_name"]["sum"] = state["by_name"]["sum"] + gradient


def _append(state, gradient):
  state["sums"].append(gradient.clone())


def _count(state, gradient):
  state["by_name"]["count"] += 1


def _remove(state, gradient):
  state.pop("unused", None)


def _swap(state, gradient):
  sums = state["by_name"]
  state["sums"][0], sums["sum"] = sums["sum"], state["sums"][0]


@pytest.mark.parametrize("change", [_add_to_list, _add_to_dict])
def test_tensors_in_containers_of_the_state_are_replaced(change):
  losses = []
  for device, compile_step in (("cpu", lambda step: step), ("jax", jax_jit)):
    model = _model().to(device)
    optimizer = Collecting(model.parameters(), change)
    training_step(model, optimizer, X.to(device))
    step = compile_step(lambda x, m=model, o=optimizer: training_step(m, o, x))
    losses.append([step(X.to(device)).item() for _ in range(4)])
  assert losses[1] == pytest.approx(losses[0], rel=1e-4)
  assert torchax.explain(step, X.to("jax")).compilations == 1


def test_a_first_step_that_makes_a_list_raises():
  model = _model().to("jax")
  optimizer = Collecting(model.parameters(), _add_to_list)
  step = jax_jit(lambda x: training_step(model, optimizer, x))
  with pytest.raises(TracedStateError, match="creates 'sums'.*one step eagerly"):
    step(X.to("jax"))
  assert not optimizer.state
  training_step(model, optimizer, X.to("jax"))
  step(X.to("jax"))


@pytest.mark.parametrize("change", [_append, _count, _remove, _swap])
def test_other_changes_of_the_state_raise_and_are_undone(change):
  model = _model().to("jax")
  optimizer = Collecting(model.parameters(), lambda state, gradient: None)
  training_step(model, optimizer, X.to("jax"))
  state = optimizer.state[model[0].weight]
  state["unused"] = 0
  before = {**state, "sums": list(state["sums"]), "by_name": dict(state["by_name"])}
  optimizer.change = change
  with pytest.raises(TracedStateError, match="Collecting keeps '"):
    jax_jit(lambda x: training_step(model, optimizer, x))(X.to("jax"))
  assert state == before
