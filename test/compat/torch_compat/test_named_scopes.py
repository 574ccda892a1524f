"""Names of modules in compiled programs, in each way to compile one."""

import contextlib
import re

import jax
import pytest
import torch

from torchax.compat.torch_compat import named_scopes
from torchax.export import exported_program_to_jax
from torchax.interop import JittableModule, jax_jit, jax_value_and_grad


class Block(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.linear = torch.nn.Linear(3, 3)

  def forward(self, x):
    return x + self.linear(x).tanh()


class Net(torch.nn.Module):
  """Network whose list of layers is never called."""

  def __init__(self):
    super().__init__()
    self.layers = torch.nn.ModuleList([Block(), Block()])

  def forward(self, x):
    for layer in self.layers:
      x = layer(x)
    return x


def ones(device="jax"):
  return torch.ones(2, 3, device=device)


@pytest.fixture
def names(tmp_path):
  """Return a function: names of the operations in the programs compiled so far."""
  torch.compiler.reset()  # it would reuse graphs of other tests
  jax.config.update("jax_dump_ir_to", str(tmp_path))

  def read() -> set[str]:
    texts = [path.read_text() for path in tmp_path.iterdir()]
    return {name for text in texts for name in re.findall(r'loc\("(jit\(.*?)"', text)}

  yield read
  jax.config.update("jax_dump_ir_to", "")


def jitted_function():
  model = Net().to("jax")
  jax_jit(lambda x: model(x).sum())(ones())


def jitted_module():
  JittableModule(Net().to("jax"))(ones())


def compiled_plain():
  torch.compile(Net(), backend="jax")(ones("cpu"))


def compiled_on_jax():
  torch.compile(Net().to("jax"), backend="jax")(ones())


def exported():
  program = torch.export.export(Net(), (ones("cpu"),))
  states, function = exported_program_to_jax(program)
  jax.jit(function)(states, (jax.numpy.ones((2, 3)),))


@pytest.mark.parametrize(
  "run", [jitted_function, jitted_module, compiled_plain, compiled_on_jax, exported]
)
def test_operations_have_the_path_of_their_module(run, names):
  run()
  found = names()
  assert any("/layers.0/linear/" in name for name in found), found
  assert any("/layers.1/tanh" in name for name in found), found


def torch_backward():
  model = Net().to("jax")

  def step(x):
    model(x).sum().backward()
    return model.layers[0].linear.weight.grad

  jax_jit(step)(ones())


def torch_grad():
  model = Net().to("jax")

  def step(x):
    return torch.autograd.grad(model(x).sum(), model.parameters())

  jax_jit(step)(ones())


def jax_gradient():
  model = Net().to("jax")
  weights = dict(model.named_parameters())

  def loss(weights, x):
    return torch.func.functional_call(model, weights, (x,)).sum()

  jax_jit(jax_value_and_grad(loss))(weights, ones())


def compiled_plain_backward():
  torch.compile(Net(), backend="jax")(ones("cpu")).sum().backward()


@pytest.mark.parametrize(
  "run", [torch_backward, torch_grad, jax_gradient, compiled_plain_backward]
)
def test_gradients_have_the_path_of_the_forward_pass(run, names):
  run()
  assert any("/transpose(jvp(layers.0))/linear/" in n for n in names()), names()


def test_second_gradients_have_the_path_of_the_first(names):
  model = Net().to("jax")

  def step(x):
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return torch.autograd.grad(grad.sum(), model.layers[0].linear.weight)

  jax_jit(step)(ones().requires_grad_())
  twice = "transpose(jvp(transpose(jvp(layers.0))))"
  assert any(twice in name for name in names()), names()


def test_function_inside_a_compiled_module_is_below_its_caller():
  inner = jax_jit(Block().to("jax"))

  class Outer(torch.nn.Module):
    def forward(self, x):
      return inner(x)

  model = torch.nn.Sequential(Outer()).to("jax")
  text = jax_jit(model).lower(ones()).compile().as_text()
  assert 'op_name="jit(Sequential)/0/jit(Block)/linear/' in text


def test_names_do_not_change_the_program(monkeypatch):
  model = Net().to("jax")

  def text() -> str:
    return jax_jit(lambda x: model(x).sum()).lower(ones()).as_text()

  named = text()
  unnamed = lambda name: contextlib.nullcontext()  # noqa: E731
  monkeypatch.setattr(named_scopes, "entered", unnamed)
  assert text() == named


def test_eager_modules_and_warm_calls_enter_no_scope(monkeypatch):
  model = Net().to("jax")
  jitted = jax_jit(model)
  jitted(ones())
  entered = []
  monkeypatch.setattr(named_scopes, "entered", entered.append)
  jitted(ones())
  model(ones()).sum().backward()
  assert not entered


class Nested(torch.autograd.Function):
  """Function whose backward differentiates the function itself, `depth` times."""

  @staticmethod
  def forward(ctx, x, depth):
    ctx.depth = depth
    ctx.save_for_backward(x)
    return 2 * x

  @staticmethod
  def backward(ctx, gradient):
    if not ctx.depth:
      return 2 * gradient, None
    with torch.enable_grad():
      x = ctx.saved_tensors[0].detach().requires_grad_()
      y = Nested.apply(x, ctx.depth - 1)
    return *torch.autograd.grad(y, x, gradient), None


def test_names_of_nested_backward_passes_stay_short(names):
  class Layer(torch.nn.Module):
    def forward(self, x):
      return Nested.apply(x, 10)

  model = torch.nn.Sequential(Layer())
  x = ones().requires_grad_()
  jax_jit(lambda x: torch.autograd.grad(model(x).sum(), x))(x)
  assert max(map(len, names())) < 200


def test_scope_ends_after_an_exception(names):
  class Fails(torch.nn.Module):
    def forward(self, x):
      raise KeyError("no")

  model = torch.nn.Sequential(Fails()).to("jax")

  def tried(x):
    with contextlib.suppress(KeyError):
      model(x)
    return x + 1

  jax_jit(tried)(ones())
  assert "jit(tried)/add" in names()


def test_recording_is_off_outside_of_traces():
  with named_scopes.recording():
    assert named_scopes.is_recording()
  assert not named_scopes.is_recording()


def step(x):
  return (x * 2).tanh().sum()


COMPILED = {
  "plain": ("cpu", {"jit(step)"}),
  "plain with gradients": ("cpu", {"jit(step_forward)", "jit(step_backward)"}),
  "on jax": ("jax", {"jit(step)"}),
}


@pytest.mark.parametrize("way", COMPILED)
def test_compiled_programs_have_the_name_of_the_function(way, names):
  device, expected = COMPILED[way]
  result = torch.compile(step, backend="jax")(
    ones(device).requires_grad_("gradients" in way)
  )
  if result.requires_grad:
    result.backward()
  programs = {name.partition("/")[0] for name in names()}
  assert expected <= programs
