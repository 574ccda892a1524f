"""`torchax.compile`: its three modes agree with each other and with eager mode."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import torchax
from torchax import CompileOptions

each_mode = pytest.mark.parametrize("mode", ["jax", "dynamo"])
X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)


@pytest.fixture(autouse=True)
def nothing_compiled():
  torch.compiler.reset()
  yield
  torch.compiler.reset()


pytestmark = pytest.mark.usefixtures("env")


def compile(fn, mode, **options):
  return torchax.compile(fn, CompileOptions(mode=mode, **options))


class Model(torch.nn.Module):
  """Parameters in lists, in dicts, alone and tied; buffers; a plain tensor."""

  def __init__(self):
    super().__init__()
    self.layers = torch.nn.ParameterList([torch.randn(8, 8) / 3 for _ in range(2)])
    self.scales = torch.nn.ParameterDict({"low": torch.ones(8), "high": torch.ones(8)})
    self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    self.last.weight = self.first.weight
    self.norm = torch.nn.BatchNorm1d(8)
    self.dropout = torch.nn.Dropout(0.5)
    self.register_buffer("calls", torch.zeros(()))
    self.shift = torch.full((8,), 0.25)

  def forward(self, x):
    self.calls.add_(1)
    x = x * self.scales["low"]
    for weight in self.layers:
      x = torch.tanh(x @ weight)
    x = self.norm(self.first(x)) + self.shift
    return self.last(self.dropout(x)) * self.scales["high"]

  def energy(self, x, power=2):
    return self.first(x).pow(power).mean()


def make_model():
  torch.manual_seed(0)
  with torchax.disable_temporarily():
    model = Model()
  model.shift = model.shift.to("jax")
  return model.to("jax")


def gradients(model):
  return {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}


def state(model):
  return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


@each_mode
def test_each_mode_compiles_a_function(mode):
  def function(x, y, power):
    return {"sum": (x + y) ** power, "rest": [x.exp(), None]}

  run = compile(function, mode)
  x, y = X.to("jax"), X.to("jax") + 1
  actual, expected = run(x, y, power=2), function(x, y, 2)
  torch.testing.assert_close(actual["sum"], expected["sum"])
  torch.testing.assert_close(actual["rest"][0], expected["rest"][0])
  assert actual["rest"][1] is None


@each_mode
def test_training_equals_eager_training(mode):
  """Losses, gradients, buffers and dropout masks are compared."""

  def train(model, run):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)
    losses = []
    for _ in range(3):
      optimizer.zero_grad()
      loss = run(X.to("jax")).square().mean()
      loss.backward()
      optimizer.step()
      losses.append(loss.detach().cpu())
    return losses, gradients(model), state(model), torchax.default_env().rng.state.count

  first, second = make_model(), make_model()
  actual, expected = train(first, compile(first, mode)), train(second, second)
  torch.testing.assert_close(actual[:3], expected[:3], rtol=1e-4, atol=1e-5)
  assert actual[3] == expected[3] == 3
  assert first.calls.item() == 3


@each_mode
def test_switching_to_eval_mode_takes_effect(mode):
  model = make_model()
  run = compile(model, mode)
  x = X.to("jax")
  torch.manual_seed(1)
  assert not torch.equal(run(x), run(x))
  run.eval()
  assert not model.training
  assert torch.equal(run(x), run(x))
  torch.testing.assert_close(run(x), model(x))
  run.train()
  assert not torch.equal(run(x), run(x))


@each_mode
def test_changed_parameters_take_effect(mode):
  model = make_model().eval()
  run = compile(model, mode)
  x = X.to("jax")
  run(x)
  changed = {name: tensor * 0.5 for name, tensor in model.state_dict().items()}
  model.load_state_dict(changed)
  torch.testing.assert_close(run(x), model(x))
  with torch.no_grad():
    model.layers[0].zero_()
    model.shift.fill_(3.0)
  torch.testing.assert_close(run(x), model(x))


@each_mode
def test_several_methods_run_compiled(mode):
  model = make_model()
  run = compile(model, mode, methods_to_compile=["energy"])
  x = X.to("jax")
  for power in (2, 3):
    expected = model.energy(x, power=power)
    torch.testing.assert_close(run.energy(x, power=power), expected)
  assert run.calls is model.calls


@each_mode
def test_state_dict_round_trip(mode):
  first, second = make_model(), make_model()
  with torch.no_grad():
    second.layers[0].zero_()
  runs = [compile(model.eval(), mode) for model in (first, second)]
  runs[1].load_state_dict(runs[0].state_dict())
  x = X.to("jax")
  torch.testing.assert_close(runs[1](x), runs[0](x))


@each_mode
def test_other_shapes_recompile(mode):
  run = compile(lambda x: x.sum(0) * x.shape[0], mode)
  for rows in (2, 3, 2):
    x = torch.ones(rows, 4, device="jax")
    torch.testing.assert_close(run(x), x.sum(0) * rows)


@each_mode
def test_arguments_changed_in_place(mode):
  def function(x, total):
    total.add_(x.sum())
    return total * 2

  run = compile(function, mode)
  total = torch.zeros((), device="jax")
  for turn in (1, 2):
    assert run(torch.ones(4, device="jax"), total).item() == 8 * turn
    assert total.item() == 4 * turn


@each_mode
def test_draws_equal_eager_draws_and_differ_per_call(mode):
  def function(x):
    return F.dropout(x, 0.5) + torch.rand_like(x)

  run = compile(function, mode)
  x = X.to("jax")
  torch.manual_seed(4)
  expected = [function(x) for _ in range(3)]
  torch.manual_seed(4)
  actual = [run(x) for _ in range(3)]
  torch.testing.assert_close(actual, expected)


@each_mode
def test_tied_parameters_have_one_gradient(mode):
  model = make_model().eval()
  compile(model, mode)(X.to("jax")).sum().backward()
  actual = gradients(model)
  model.zero_grad()
  model(X.to("jax")).sum().backward()
  torch.testing.assert_close(actual, gradients(model), rtol=1e-4, atol=1e-5)


# The mode "jax" -----------------------------------------------------------------------


def test_a_module_is_lowered_and_traced_without_a_draw():
  run = compile(make_model(), "jax")
  x = X.to("jax")
  torch.manual_seed(0)
  lowered = run.lower(x)
  assert "stablehlo" in lowered.as_text()
  assert lowered.compile().cost_analysis() is not None
  assert "tanh" in str(run.trace(x).jaxpr)
  assert torchax.default_env().rng.state.count == 0
  assert run.calls.item() == 0


def test_arguments_of_jax_jit_are_passed_on():
  run = compile(
    lambda x, power: x**power, "jax", jax_jit_kwargs={"static_argnums": (1,)}
  )
  assert run(torch.full((2,), 3.0, device="jax"), 2).tolist() == [9.0, 9.0]


PROGRAM = """
import torch, torchax
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5)).to("jax")
run = torchax.compile(model)
print(run(torch.ones(4, 64, device="jax")).sum().item())
"""


def test_the_persistent_cache_is_used(tmp_path):
  """A second process compiles nothing, and draws the same numbers."""
  settings = {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }

  def run():
    found = subprocess.run(
      [sys.executable, "-c", PROGRAM],
      env={**os.environ, **settings},
      capture_output=True,
      text=True,
      check=True,
    )
    return found.stdout, {
      path.name for path in tmp_path.iterdir() if "cache" in path.name
    }

  first, second = run(), run()
  assert first[1]
  assert second == first


# Refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("fn", "options", "error", "message"),
  [
    (torch.sin, {"mode": "fast"}, ValueError, "expects a mode of"),
    (3, {}, TypeError, "expects a function or a module"),
    (torch.sin, {"methods_to_compile": ["f"]}, ValueError, "expects a module"),
    (
      torch.nn.ReLU(),
      {"methods_to_compile": ["go"]},
      AttributeError,
      "ReLU has no method 'go'",
    ),
    (
      torch.sin,
      {"mode": "dynamo", "jax_jit_kwargs": {"donate_argnums": 0}},
      ValueError,
      "donate_argnums cannot be used",
    ),
    (
      torch.sin,
      {"mode": "export"},
      ValueError,
      "exported_program_to_jax",
    ),
  ],
)
def test_invalid_options_raise(fn, options, error, message):
  with pytest.raises(error, match=message):
    torchax.compile(fn, CompileOptions(**options))


class _Decoder(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.layer = torch.nn.Linear(8, 8)

  def forward(self, x, return_dict=True):
    return {"out": self.layer(x)} if return_dict else self.layer(x)

  def decode(self, x, steps=1):
    return self.layer(x) * len(range(steps))


@pytest.mark.parametrize("methods", [["decode"], ["forward", "decode"]], ids=str)
@pytest.mark.parametrize("names", ["return_dict", ("return_dict", "steps")], ids=str)
def test_argument_names_are_for_methods_that_take_them(methods, names):
  model = _Decoder().to("jax")
  kwargs = {"static_argnames": names}
  compiled = compile(model, "jax", methods_to_compile=methods, jax_jit_kwargs=kwargs)
  x = X.to("jax")
  expected = model(x)["out"]
  torch.testing.assert_close(compiled(x, return_dict=False), expected)
  torch.testing.assert_close(compiled(x, return_dict=True)["out"], expected)
  torch.testing.assert_close(compiled.decode(x), expected)
  if "steps" in names:
    torch.testing.assert_close(compiled.decode(x, steps=2), 2 * expected)


def test_argument_name_that_no_method_takes_is_refused():
  kwargs = {"static_argnames": ("return_dict", "wrong")}
  options = {"methods_to_compile": ["decode"], "jax_jit_kwargs": kwargs}
  with pytest.raises(ValueError, match="no argument 'wrong'"):
    compile(_Decoder().to("jax"), "jax", **options)
