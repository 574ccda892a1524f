"""Compiled functions follow changes of the program between two calls.

A row is a kind of change, a column a way to compile.
"""

import functools
import gc
import importlib
import random
import sys

import numpy as np
import pytest
import torch

import torchax
from torchax import CompileOptions
from torchax.errors import TracedDrawError
from torchax.interop import (
  JittableModule,
  gradient_checkpoint,
  jax_jit,
  jax_value_and_grad,
  jax_vmap,
  scan,
)

ONES = torch.ones(16)


@pytest.fixture(autouse=True)
def env():
  torch.compiler.reset()
  with torchax.default_env() as env:
    yield env
  torch.compiler.reset()


# Ways to compile ----------------------------------------------------------------------


def nested(f):
  inner = jax_jit(f)
  return jax_jit(lambda x: inner(x))


def nested_in_a_compiled_one(f):
  """Call a function that is compiled already, so its Python does not run again."""
  inner = jax_jit(f)
  inner(ONES.to("jax"))
  return jax_jit(lambda x: inner(x))


def value_and_grad(f):
  def loss(x):
    y = f(x)
    return y.sum(), y

  both = jax_value_and_grad(loss, has_aux=True)
  return jax_jit(lambda x: both(x)[0][1])


def checkpointed(f):
  rematerialised = gradient_checkpoint(lambda x: f(x))
  return jax_jit(lambda x: rematerialised(x))


def looped(f):
  body = lambda carry, x: (carry, f(x))  # noqa: E731
  return lambda x: scan(body, x, x[None])[1][0]


def mapped(f):
  rows = jax_vmap(lambda x: f(x), randomness="same")
  return jax_jit(lambda x: rows(x[None])[0])


def dynamo(f):
  return torch.compile(lambda x: f(x), backend="jax", fullgraph=False)


def jit(f):
  return jax_jit(lambda x: f(x))


FUNCTIONS = {
  "jit": jit,
  "nested": nested,
  "nested, compiled before": nested_in_a_compiled_one,
  "value and grad": value_and_grad,
  "checkpoint": checkpointed,
  "scan": looped,
  "vmap": mapped,
  "torch.compile": dynamo,
}


def in_mode(mode, module):
  return torchax.compile(module, CompileOptions(mode=mode))


MODULES = {
  "jit of the module": jax_jit,
  "JittableModule": JittableModule,
  "mode jax": functools.partial(in_mode, "jax"),
  "mode dynamo": functools.partial(in_mode, "dynamo"),
}
each_form = pytest.mark.parametrize(
  "way", [*FUNCTIONS.values(), *MODULES.values()], ids=[*FUNCTIONS, *MODULES]
)


def both(run, f, x):
  """Return the results of the compiled function and of the function itself."""
  torch.manual_seed(0)
  actual = run(x)
  torch.manual_seed(0)
  return actual.tolist(), f(x).tolist()


# Modules ------------------------------------------------------------------------------


class Part(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.scale = 2.0
    self.count = 1
    self.negative = False
    self.kind = "sum"
    self.factors = [1.0, 2.0]
    self.table = {"shift": 1.0}
    self.drop = torch.nn.Dropout(0.5)

  def forward(self, x):
    x = self.drop(x) * self.scale
    for _ in range(self.count):
      x = x + self.table["shift"]
    x = -x if self.negative else x
    x = x * self.factors[1]
    return x + 1 if self.kind == "sum" else x * 3


class Whole(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.part = Part()

  def forward(self, x):
    return self.part(x)


CHANGES = {
  "number": lambda m: setattr(m, "scale", 5.0),
  "count": lambda m: setattr(m, "count", 3),
  "flag": lambda m: setattr(m, "negative", True),
  "string": lambda m: setattr(m, "kind", "product"),
  "list": lambda m: m.factors.__setitem__(1, 7.0),
  "dict": lambda m: m.table.update(shift=4.0),
  "another list": lambda m: setattr(m, "factors", [0.0, 9.0]),
  "probability": lambda m: setattr(m.drop, "p", 0.75),
  "mode": lambda m: m.eval(),
}


@each_form
def test_changed_module_attributes_take_effect(way):
  module = Whole()
  run, x = way(module), ONES.to("jax")
  before, expected = both(run, module, x)
  assert before == expected
  for name, change in CHANGES.items():
    change(module.part)
    after, expected = both(run, module, x)
    assert after == expected != before, name
    before = after


def test_an_attribute_of_an_uncalled_module_takes_effect():
  module = Part()
  run = jax_jit(lambda x: x * module.scale)
  x = ONES.to("jax")
  assert run(x).tolist() == [2.0] * 16
  module.scale = 3.0
  assert run(x).tolist() == [3.0] * 16


def test_earlier_programs_are_used_again():
  module, traces = Part(), []

  def counted(x):
    traces.append(1)
    return module(x)

  run, x = jax_jit(counted), ONES.to("jax")
  for mode in (True, False, True, False):
    run(module.train(mode) and x)
  for scale in (2.0, 3.0, 2.0, 3.0):
    module.scale = scale
    run(x)
  assert len(traces) == 3


class Warm(torch.nn.Module):
  """Module that decides by the result of its first call."""

  def __init__(self):
    super().__init__()
    self.is_warm = False
    self.calls = 0

  def forward(self, x):
    x = x if self.is_warm else x * 0
    self.is_warm = True
    self.calls += 1
    return x


def test_a_flag_that_the_function_sets_takes_effect():
  module = Warm()
  run, x = jax_jit(module), ONES.to("jax")
  assert [run(x).tolist() for _ in range(3)] == [[0.0] * 16, [1.0] * 16, [1.0] * 16]


def test_a_call_counter_stops_triggering_recompilation():
  module, traces = Warm(), []

  def counted(x):
    traces.append(1)
    return module(x)

  run, x = jax_jit(counted), ONES.to("jax")
  with pytest.warns(UserWarning, match="Warm.calls"):
    for _ in range(20):
      run(x)
  assert len(traces) < 12


# Tensors on the CPU, numpy ------------------------------------------------------------

USES = {
  "product": lambda x, k: x * k,
  "negated": lambda x, k: x * -k,
  "alpha": lambda x, k: x.add(x, alpha=k),
  "item": lambda x, k: x * k.item(),
  "float": lambda x, k: x * float(k),
  "if": lambda x, k: x if k > 3 else -x,
  "computed": lambda x, k: x * (k * 2 + 1),
  "list": lambda x, k: x * k.tolist(),
  "numpy": lambda x, k: x * k.numpy().item(),
  "moved": lambda x, k: x * k.to("jax"),
  "copied": lambda x, k: x * k.clone().to("jax"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_scalar_cpu_tensor_takes_effect(use):
  assert_followed(jit, use)


@pytest.mark.parametrize("use", ["product", "item"])
@pytest.mark.parametrize("way", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_scalar_cpu_tensor_takes_effect_in_each_wrapper(way, use):
  assert_followed(way, USES[use])


def assert_followed(way, use):
  number = torch.tensor(2.0)
  f = functools.partial(_apply, use, number)
  run, x = way(f), ONES.to("jax")
  for value in (2.0, 5.0, -0.0, 2.0):
    number.fill_(value)
    assert run(x).tolist() == f(x).tolist()


def _apply(use, k, x):
  return use(x, k)


ARRAYS = {
  "moved": lambda x, k: x * k.to("jax"),
  "element": lambda x, k: x * k[1],
  "index": lambda x, k: x[k.long()],
  "computed": lambda x, k: x * (k * 2).to("jax"),
  "list": lambda x, k: x * k.tolist()[1],
}


@pytest.mark.parametrize("size", [2, 5000])
@pytest.mark.parametrize("use", ARRAYS.values(), ids=ARRAYS)
def test_a_cpu_tensor_takes_effect(use, size):
  held = torch.zeros(size)
  f = functools.partial(_apply, use, held)
  run, x = jax_jit(f), torch.arange(float(size)).to("jax")
  for value in (0.0, 1.0, 0.0):
    held.fill_(value)
    assert run(x).tolist() == f(x).tolist()


NUMPY = {
  "tensor": lambda x, k: x * torch.tensor(k).to("jax"),
  "from_numpy": lambda x, k: x * torch.from_numpy(k).to("jax"),
  "as_tensor": lambda x, k: x * torch.as_tensor(k, device="jax"),
}


@pytest.mark.parametrize("use", NUMPY.values(), ids=NUMPY)
def test_a_numpy_array_takes_effect(use):
  held = np.ones(16, np.float32)
  run, x = jax_jit(lambda x: use(x, held)), ONES.to("jax")
  for value in (1.0, 4.0, 1.0):
    held[:] = value
    assert run(x).tolist() == [value] * 16


TEMPORARIES = {
  "tensor": lambda x: x * torch.tensor([2.0], device="jax"),
  "scalar": lambda x: torch.where(x > 0, x, torch.tensor(0.0, device="jax")),
  "as_tensor": lambda x: x * torch.as_tensor([2.0], device="jax"),
  "index": lambda x: x[torch.tensor([0, 1], device="jax")],
  "to": lambda x: x * torch.tensor([2.0]).to("jax"),
  "numpy": lambda x: x * torch.tensor(np.arange(16.0), device="jax"),
  "from_numpy": lambda x: x * torch.from_numpy(np.ones(16, np.float32)).to("jax"),
  "frombuffer": lambda x: x * torch.frombuffer(bytearray(64), dtype=x.dtype).to("jax"),
}


@pytest.mark.parametrize("use", TEMPORARIES.values(), ids=TEMPORARIES)
def test_cpu_values_made_in_a_function_are_constants(use):
  traces = []

  def function(x):
    traces.append(x)
    return use(x)

  run, x = jax_jit(function), ONES.to("jax")
  for _ in range(3):
    assert run(x).tolist() == use(x).tolist()
  assert len(traces) == 1


def test_a_numpy_array_that_is_replaced_takes_effect():
  arrays = [np.ones(16, np.float32)]
  run = jax_jit(lambda x: x * torch.tensor(arrays[0], device="jax"))
  for value in (1.0, 4.0, 2.0):
    arrays[0] = np.full(16, value, np.float32)
    gc.collect()
    assert run(ONES.to("jax")).tolist() == [value] * 16


# Random numbers of the host -----------------------------------------------------------

DRAWS = {
  "torch.rand": lambda x: x * torch.rand(16).to("jax"),
  "torch.randperm": lambda x: x[torch.randperm(16)],
  "uniform_": lambda x: x * torch.empty(16).uniform_().to("jax"),
  "generator": lambda x: x * torch.rand(16, generator=torch.Generator()).to("jax"),
  "np.random": lambda x: x * np.random.rand(),
  "random": lambda x: x * random.random(),
}
WAYS_THAT_TRACE = {k: v for k, v in FUNCTIONS.items() if k != "torch.compile"}


@pytest.mark.parametrize("way", WAYS_THAT_TRACE.values(), ids=WAYS_THAT_TRACE)
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_on_the_host_raises(way, draw):
  before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
  with pytest.raises(TracedDrawError, match="for ever.*test_follows.py") as caught:
    way(draw)(ONES.to("jax"))
  assert "jax" in str(caught.value)
  after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
  assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


@pytest.mark.parametrize("draws", [False, True])
def test_an_import_in_a_trace_may_draw_and_the_function_not(
  draws, tmp_path, monkeypatch
):
  name = f"drawn_while_imported_{draws}"
  (tmp_path / f"{name}.py").write_text("import random\nSCALE = random.random()\n")
  monkeypatch.syspath_prepend(tmp_path)

  @jax_jit
  def run(x):
    module = importlib.import_module(name)
    return x * module.SCALE + (random.random() if draws else 0)

  state = random.getstate()
  if draws:
    with pytest.raises(TracedDrawError, match="Python's `random`"):
      run(ONES.to("jax"))
  else:
    assert run(ONES.to("jax")).tolist() == run(ONES.to("jax")).tolist()
  assert random.getstate() == state


def test_a_draw_in_a_trace_that_always_imports_raises(monkeypatch):
  @jax_jit
  def run(x):
    monkeypatch.setitem(sys.modules, f"imported_{len(sys.modules)}", random)
    return x * random.random()

  with pytest.raises(TracedDrawError, match="Python's `random`"):
    run(ONES.to("jax"))


# Optimizers ---------------------------------------------------------------------------

OPTIMIZERS = {
  "sgd": lambda p: torch.optim.SGD(p, 0.1),
  "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
  "rate in a tensor": lambda p: torch.optim.SGD(p, torch.tensor(0.1)),
  "adamw": lambda p: torch.optim.AdamW(p, 0.1),
  "adam, one by one": lambda p: torch.optim.Adam(p, 0.1, foreach=False),
  "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
}


class Step(torch.nn.Module):
  """Module whose forward pass is a function of a model's tensors."""

  def __init__(self, model, function):
    super().__init__()
    self.model, self.function = model, function

  def forward(self, x):
    return self.function(x)


STEPS = {
  "jax_jit": lambda step, model: jax_jit(step),
  "jax_jit in jax_jit": lambda step, model: nested(jax_jit(step)),
  "JittableModule": lambda step, model: JittableModule(Step(model, step)),
  "compile": lambda step, model: torchax.compile(step),
  "compile, dynamo": lambda step, model: torchax.compile(
    step, torchax.CompileOptions(mode="dynamo")
  ),
  "torch.compile": lambda step, model: torch.compile(step, backend="jax"),
}


def trained(make, form, schedule, steps=4):
  torch.manual_seed(0)
  model, x = torch.nn.Linear(3, 1), torch.linspace(-1.0, 1.0, 12).reshape(4, 3)
  if form:
    model, x = model.to("jax"), x.to("jax")
  optimizer = make(model.parameters())
  traces = []

  def step(x):
    traces.append(1)
    optimizer.zero_grad()
    (model(x) - 1).square().mean().backward()
    optimizer.step()
    return x.sum()

  run = STEPS[form](step, model) if form else step
  for number in range(steps):
    run(x)
    schedule(optimizer, number)
  return [p.detach().cpu() for p in model.parameters()], traces, optimizer


def every_number(optimizer, number):
  for name, value in optimizer.param_groups[0].items():
    if isinstance(value, float) and value:
      optimizer.param_groups[0][name] = value * 0.75
    elif isinstance(value, torch.Tensor):
      value.mul_(0.75)
    elif name == "betas":
      optimizer.param_groups[0][name] = (value[0] * 0.75, value[1] * 0.99)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_settings_are_operands(make):
  expected, _, _ = trained(make, None, every_number)
  actual, traces, optimizer = trained(make, "jax_jit", every_number)
  torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
  assert len(traces) <= 3, "none of them for another number"
  assert all(type(v) is not torch.SymFloat for v in optimizer.param_groups[0].values())
  assert optimizer.param_groups[0].get("capturable", False) is False


@pytest.mark.parametrize("form", [form for form in STEPS if form != "jax_jit"])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_optimizer_settings_take_effect_in_each_wrapper(name, form):
  make = OPTIMIZERS[name]
  expected, _, _ = trained(make, None, every_number)
  actual, _, _ = trained(make, form, every_number)
  torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_an_lr_schedule_takes_effect():
  def decayed(optimizer, number):
    if number == 0:
      optimizer.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.schedule.step()

  make = OPTIMIZERS["sgd"]
  expected, actual = (
    trained(make, None, decayed)[0],
    trained(make, "jax_jit", decayed)[0],
  )
  torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "fused"])
def test_loaded_learning_rates_take_effect(name):
  def loaded(optimizer, number):
    for group in optimizer.param_groups:
      group["lr"] *= 0.5
    if number in (1, 2, 4):  # each load replaces the groups, and may keep the tensors
      state = optimizer.state_dict()
      state["param_groups"][0]["lr"] = (0.03, 0.002, 0.01)[number // 2]
      optimizer.load_state_dict(state)

  make = OPTIMIZERS[name]
  expected, actual = trained(make, None, loaded)[0], trained(make, "jax_jit", loaded)[0]
  torch.testing.assert_close(actual, expected)


def test_a_loaded_state_takes_effect():
  def loaded(optimizer, number):
    if number == 1:
      state = optimizer.state_dict()
      for table in state["state"].values():
        table["momentum_buffer"] = table["momentum_buffer"] * 0
      optimizer.load_state_dict(state)

  make = OPTIMIZERS["momentum"]
  expected, actual = trained(make, None, loaded)[0], trained(make, "jax_jit", loaded)[0]
  torch.testing.assert_close(actual, expected)
