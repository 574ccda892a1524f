"""Compiled modules: hooks, copies, attributes, and assignments in `forward`."""

import copy
import pickle

import pytest
import torch

import torchax
from torchax import CompileOptions
from torchax.errors import MutationError
from torchax.interop import jax_jit

MODES = ("jax", "dynamo")
each_mode = pytest.mark.parametrize("mode", MODES)
X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)


@pytest.fixture(autouse=True)
def env():
  torch.compiler.reset()
  with torchax.default_env() as env:
    yield env
  torch.compiler.reset()


def compile(fn, mode, **options):
  return torchax.compile(fn, CompileOptions(mode=mode, **options))


def linear(bias=False):
  torch.manual_seed(0)
  return torch.nn.Linear(8, 8, bias=bias).to("jax")


def on_jax(*values):
  return torch.tensor(values, device="jax")


# Guards of a program ------------------------------------------------------------------


@each_mode
def test_a_replaced_parameter_takes_effect(mode):
  model = linear()
  run = compile(model, mode)
  assert run(X.to("jax")).abs().sum() > 0
  model.weight = torch.nn.Parameter(torch.zeros(8, 8, device="jax"))
  assert run(X.to("jax")).abs().sum() == 0


def test_another_dtype_of_the_module_takes_effect():
  model = linear()
  run = compile(model, "jax")
  with torch.no_grad():
    run(X.to("jax"))
  model.to(torch.bfloat16)
  assert run(X.to("jax", torch.bfloat16)).dtype is torch.bfloat16


class Mixed(torch.nn.Module):
  """Module that decides by dtypes, which autocast changes."""

  def __init__(self):
    super().__init__()
    self.linear = torch.nn.Linear(8, 8)
    self.shift = torch.ones(8)

  def forward(self, x):
    y = self.linear(x)
    return y, torch.ones_like(y).to(y.dtype) + x.softmax(-1).to(y.dtype) + self.shift


@each_mode
def test_autocast_is_part_of_the_program(mode):
  torch.manual_seed(0)
  model = Mixed().to("jax")
  model.shift = model.shift.to("jax", torch.bfloat16)
  run = compile(model, mode)
  x = X.to("jax")
  for dtype in (None, torch.bfloat16, torch.float16, None):
    with torch.autocast(
      "jax", dtype=dtype or torch.bfloat16, enabled=dtype is not None
    ):
      actual, expected = run(x), model(x)
    assert [y.dtype for y in actual] == [y.dtype for y in expected]
    # A single program removes a cast that eager mode makes: one step of bfloat16.
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


@each_mode
def test_the_default_dtype_is_part_of_the_program(mode):
  run = compile(lambda x: x * torch.ones(4, device=x.device), mode)
  x = torch.ones(4, device="jax", dtype=torch.bfloat16)
  assert run(x).dtype is torch.float32
  torch.set_default_dtype(torch.bfloat16)
  try:
    assert run(x).dtype is torch.bfloat16
  finally:
    torch.set_default_dtype(torch.float32)


# Hooks --------------------------------------------------------------------------------


def zeros(module, args, out):
  return out * 0


def doubled(module, args):
  return (args[0] * 2,)


@each_mode
def test_hooks_of_the_module_run(mode):
  model = linear()
  pre = model.register_forward_pre_hook(doubled)
  run = compile(model, mode)
  x = X.to("jax")
  torch.testing.assert_close(run(x), (2 * x) @ model.weight.T)
  pre.remove()
  torch.testing.assert_close(run(x), x @ model.weight.T)


@each_mode
@pytest.mark.parametrize("place", ["module", "submodule", "wrapper"])
def test_hooks_registered_after_compilation_run(mode, place):
  model = torch.nn.Sequential(linear())
  run = compile(model, mode)
  x = X.to("jax")
  before = run(x)
  hooked = {"module": model, "submodule": model[0], "wrapper": run}[place]
  hook = hooked.register_forward_hook(zeros)
  assert run(x).abs().sum() == 0
  hook.remove()
  torch.testing.assert_close(run(x), before)


@each_mode
def test_a_hook_sees_the_module_and_keeps_the_site_of_a_draw(mode):
  """A compiled module with a hook draws the same numbers as without compilation."""
  seen = []
  model = torch.nn.Sequential(linear(), torch.nn.Dropout(0.5))

  def keep(module, args):
    seen.append(type(module))

  model.register_forward_pre_hook(keep)
  run = compile(model, mode)
  torch.manual_seed(1)
  actual = run(X.to("jax"))
  torch.manual_seed(1)
  with torchax.default_env().rng.record() as ledger:
    torch.testing.assert_close(actual, model(X.to("jax")))
  assert [draw.site for draw in ledger] == ["1"]
  assert set(seen) == {torch.nn.Sequential}


# Copies and attributes ----------------------------------------------------------------


@each_mode
@pytest.mark.parametrize("ran", [False, True])
def test_a_copy_is_compiled_and_has_parameters_of_its_own(mode, ran):
  model = linear()
  run = compile(model, mode)
  x = X.to("jax")
  if ran:
    run(x)
  copied = copy.deepcopy(run)
  with torch.no_grad():
    copied.weight.zero_()
  assert type(copied) is type(run)
  assert copied(x).abs().sum() == 0
  torch.testing.assert_close(run(x), model(x))


class Named(torch.nn.Module):
  def __init__(self, n=3):
    super().__init__()
    self.n = n
    self.weight = torch.nn.Parameter(torch.ones(1))

  def forward(self, x):
    return x * self.n * self.weight

  def twice(self, x):
    return 2 * self(x)


@each_mode
def test_a_pickle_is_a_compiled_module(mode):
  run = compile(Named().to("jax"), mode, methods_to_compile=["twice"])
  x = on_jax(1.0)
  run(x)
  loaded = pickle.loads(pickle.dumps(run))
  assert type(loaded) is type(run)
  assert loaded(x).item() == 3.0
  assert loaded.twice(x).item() == 6.0


@each_mode
def test_assigned_attributes_reach_the_module(mode):
  model = Named().to("jax")
  run = compile(model, mode)
  x = on_jax(1.0)
  assert run(x).item() == 3.0
  run.n = 7
  assert (model.n, run(x).item()) == (7, 7.0)
  run.weight = torch.nn.Parameter(on_jax(2.0))
  assert (model.weight.item(), run(x).item()) == (2.0, 14.0)
  run.note = "new"
  assert model.note == "new"
  del run.note
  assert not hasattr(model, "note")
  assert set(dict(run.named_parameters())) == {"_model.weight"}


# Assignments in forward ---------------------------------------------------------------


class Counting(torch.nn.Module):
  """Module that assigns to a buffer: a geometric series, or another kind of value."""

  def __init__(self, kind):
    super().__init__()
    self.kind = kind
    self.register_buffer("c", torch.ones(()))
    self.register_buffer("none", None)
    self.w = torch.nn.Parameter(torch.ones(()))

  def forward(self, x):
    old = self.c
    if self.kind == "plain":
      self.plain = self.plain * 2
      return x + self.plain
    if self.kind == "twice":
      self.c = self.c + 1
    if self.kind == "none":
      self.none = x * 2
    if self.kind == "shape":
      self.c = torch.stack([self.c.sum(), x])
    if self.kind == "gradient":
      self.c = self.c * self.w
    if self.kind == "weight":
      self.w = torch.nn.Parameter(x * 1)
    self.c = self.c * 2
    return x + self.c.sum() + 0 * old.sum()


def counting(kind):
  model = Counting(kind).to("jax")
  if kind == "plain":
    model.plain = torch.ones((), device="jax")
  return model


class Outer(torch.nn.Module):
  def __init__(self, inner):
    super().__init__()
    self.inner = inner

  def forward(self, x):
    return self.inner(x)


ASSIGNING = [
  *[(mode, kind, False) for mode in MODES for kind in ("buffer", "plain")],
  *[(mode, "twice", True) for mode in MODES],
]


@pytest.mark.parametrize(("mode", "kind", "is_inner"), ASSIGNING)
def test_a_call_assigns_its_tensor_to_the_module(mode, kind, is_inner):
  models = [counting(kind) for _ in range(2)]
  run = compile(Outer(models[0]) if is_inner else models[0], mode)
  x = torch.zeros((), device="jax")
  actual, expected = [[f(x).item() for _ in range(3)] for f in (run, models[1])]
  assert actual == expected
  states = [model.plain if kind == "plain" else model.c for model in models]
  assert states[0].item() == states[1].item()
  assert not states[0].requires_grad


def test_a_function_assigns_to_a_captured_module():
  model = counting("buffer")
  run = jax_jit(lambda x: model(x))
  x = torch.zeros((), device="jax")
  assert [run(x).item() for _ in range(3)] == [2.0, 4.0, 8.0]
  assert model.c.item() == 8.0


@pytest.mark.parametrize("kind", ["shape", "gradient"])
def test_graphs_assign_tensors_of_any_kind(kind):
  models = [counting(kind) for _ in range(2)]
  run = compile(models[0], "dynamo")
  x = torch.zeros((), device="jax")
  for _ in range(2):
    torch.testing.assert_close(run(x), models[1](x))
  states = [model.c for model in models]
  torch.testing.assert_close(*states)
  assert states[0].requires_grad is states[1].requires_grad


REFUSED = {
  "shape": r"Counting\.c of another shape or dtype \(torch.float32\[2\]",
  "gradient": r"Counting\.c that needs a gradient",
  "none": r"Counting\.none that had no jax tensor before.*self\.none\.copy_",
  "weight": r"Counting\.w that is a parameter",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_rejected_assignment_restores_the_module(kind):
  model = counting(kind)
  before = (model.c, model.none, model.w)
  run = compile(model, "jax")
  for _ in range(2):
    with pytest.raises(MutationError, match=REFUSED[kind]):
      run(torch.zeros((), device="jax"))
    assert all(a is b for a, b in zip((model.c, model.none, model.w), before))
  assert model.c.item() == 1.0


def test_a_failed_trace_restores_the_module():
  class Failing(Counting):
    def forward(self, x):
      super().forward(x)
      raise ArithmeticError("after the assignment")

  model = Failing("buffer").to("jax")
  before = model.c
  with pytest.raises(ArithmeticError):
    compile(model, "jax")(torch.zeros((), device="jax"))
  assert model.c is before and before.item() == 1.0


def test_memory_shared_by_two_buffers_is_not_written():
  model = counting("buffer")
  model.register_buffer("same", model.c)
  with pytest.raises(MutationError, match="whose memory other tensors share"):
    compile(model, "jax")(torch.zeros((), device="jax"))
  assert model.same is model.c


# Arguments and results ----------------------------------------------------------------


def test_one_tensor_given_twice_is_one_tensor():
  def function(x, y):
    x.add_(1)
    return y * 2

  run = compile(function, "jax")
  x, y = on_jax(1.0), on_jax(1.0)
  assert (run(x, x).item(), x.item()) == (4.0, 2.0)
  assert (run(x, y).item(), x.item(), y.item()) == (2.0, 3.0, 1.0)


def test_errors_name_the_users_function():
  def shift(x, y):
    x.add_(1)
    return y * 2

  x = torch.ones(2, 2, device="jax")
  with pytest.raises(MutationError, match="^shift changes an argument"):
    compile(shift, "jax")(x, x[0])


class Scaling(torch.nn.Module):
  def forward(self, x, y):
    x.add_(1)
    return y * 2


def test_errors_name_the_users_module():
  x = torch.ones(2, 2, device="jax")
  with pytest.raises(MutationError, match="^Scaling changes an argument"):
    compile(Scaling(), "jax")(x, x[0])


def test_different_constants_give_different_results():
  run = compile(lambda x, factor: 1 / (x * factor), "jax")
  x = on_jax(1.0)
  assert [run(x, factor).item() for factor in (0.0, -0.0)] == [
    float("inf"),
    float("-inf"),
  ]
  typed = compile(lambda x, factor: x * factor, "jax")
  x = on_jax(1)
  for factor, dtype in ((1, torch.int32), (1.0, torch.float32), (True, torch.int32)):
    assert typed(x, factor).dtype is dtype


@each_mode
def test_a_dtype_is_a_constant(mode):
  run = compile(lambda x, dtype: x.to(dtype), mode)
  for dtype in (torch.float16, torch.int32, torch.float16):
    assert run(on_jax(1.0), dtype).dtype is dtype


@each_mode
def test_constants_are_returned_unchanged(mode):
  constants = {"s": "text", "n": None, "d": torch.float16, "where": (torch.Size([2]),)}
  run = compile(lambda x: {"x": x * 2, **constants}, mode)
  for _ in range(2):
    out = run(on_jax(1.0))
    assert out.pop("x").item() == 2.0
    assert out == constants


class Unregistered:
  def __init__(self, x):
    self.x = x


def test_a_result_of_an_unknown_class_is_refused():
  with pytest.raises(TypeError, match="returns a .*Unregistered.*register_dataclass"):
    compile(lambda x: [Unregistered(x)], "jax")(on_jax(1.0))
