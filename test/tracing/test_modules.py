"""Compiled functions follow their modules when members are replaced."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import prune

import torchax
from torchax.errors import MutationError
from torchax.interop import JittableModule, gradient_checkpoint, jax_jit
from torchax.tracing.modules import writes

X = torch.ones(4, 3)


def _model() -> nn.Sequential:
  torch.manual_seed(0)
  return nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU()).to("jax")


def _weight() -> torch.Tensor:
  return torch.full((3, 3), 2.0, device="jax")


def _jit_around_checkpoint(model):
  inner = gradient_checkpoint(model)
  return jax_jit(lambda x: inner(x))


def _jit_around_jit(model):
  inner = jax_jit(lambda x: model(x))
  return jax_jit(lambda x: inner(x))


def _mode(mode: str):
  return lambda model: torchax.compile(model, torchax.CompileOptions(mode=mode))


FORMS = {
  "jax_jit of a module": jax_jit,
  "jax_jit of a function": lambda model: jax_jit(lambda x: model(x)),
  "JittableModule": JittableModule,
  "compile, jax": _mode("jax"),
  "compile, dynamo": _mode("dynamo"),
  "checkpoint": gradient_checkpoint,
  "checkpoint in jax_jit": _jit_around_checkpoint,
  "jax_jit in jax_jit": _jit_around_jit,
}


def _replace_parameter(model):
  model[0].weight = nn.Parameter(_weight())


def _replace_in_its_table(model):
  model[0]._parameters["weight"] = nn.Parameter(_weight())


def _replace_module(model):
  torch.manual_seed(1)
  model[0] = nn.Linear(3, 3, bias=False).to("jax")


def _replace_module_without_parameters(model):
  model[1] = nn.Sigmoid()


def _append_module(model):
  model.append(nn.Sigmoid())


def _assign_state(model):
  model.load_state_dict({"0.weight": _weight()}, assign=True)


def _parametrize(model):
  nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Tanh())


CHANGES = [
  _replace_parameter,
  _replace_in_its_table,
  _replace_module,
  _replace_module_without_parameters,
  _append_module,
  _assign_state,
  _parametrize,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("form", FORMS)
def test_a_replaced_member_takes_effect(form, change):
  model, x = _model(), X.to("jax")
  compiled = FORMS[form](model)
  before = compiled(x)
  assert torch.allclose(before, model(x))
  change(model)
  after = compiled(x)
  assert torch.allclose(after, model(x))
  assert not torch.allclose(after, before)


runs = [0]


class Counted(nn.Module):
  """Module that counts how often Python runs its forward pass."""

  def __init__(self):
    super().__init__()
    self.linear, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)
    self.norm = nn.BatchNorm1d(3)

  def forward(self, x):
    runs[0] += 1
    return self.drop(self.norm(self.linear(x)))


TRACED = ("jax_jit of a module", "jax_jit of a function", "JittableModule")


@pytest.mark.parametrize("form", [*TRACED, "compile, jax"])
def test_python_of_a_module_runs_in_the_first_call_only(form):
  model, x = Counted().to("jax"), X.to("jax")
  compiled = FORMS[form](model)
  runs[0] = 0
  compiled(x)
  assert runs[0] == 1
  compiled(x)
  assert runs[0] == 1


def test_unread_tensors_of_a_module_are_not_captured():
  model, x = _model(), X.to("jax")
  compiled = jax_jit(lambda x: x + len(list(model.modules())))
  compiled(x)
  assert compiled.traced.captures.tensors == []
  del model[0].weight  # no function reads it
  assert torch.equal(compiled(x), x + 3)


# Plain attributes ---------------------------------------------------------------------


class Remembering(nn.Module):
  """Module that reads tensors in plain attributes and keeps its hidden values."""

  def __init__(self):
    super().__init__()
    self.weight = nn.Parameter(torch.ones(3))
    self.hidden, self.shares = None, []

  def forward(self, x):
    hidden = x * self.weight * self.scale
    for share in self.shares:
      hidden = hidden * share
    self.hidden = hidden
    self.doubled = hidden.detach() * 2
    return hidden.sum()


def _remembering(shares: int = 0) -> Remembering:
  model = Remembering().to("jax")
  model.scale = torch.full((), 2.0, device="jax")
  model.shares = [torch.ones((), device="jax") for _ in range(shares)]
  return model


@pytest.mark.parametrize("form", FORMS)
def test_each_call_assigns_new_tensors_to_plain_attributes(form):
  models = [_remembering(), _remembering()]
  run, x = FORMS[form](models[0]), X.to("jax")
  kept: list = [[], []]
  for factor in (1, 2, 3):
    assert torch.equal(run(x * factor), models[1](x * factor))
    for model, found in zip(models, kept):
      found.append((model.hidden, model.doubled))
  for (hidden, doubled), expected in zip(*kept):
    assert torch.equal(hidden, expected[0]) and torch.equal(doubled, expected[1])
    assert hidden.requires_grad and not doubled.requires_grad
  for model in models:
    (model.hidden * 3).sum().backward()
  assert torch.equal(models[0].weight.grad, models[1].weight.grad)


@pytest.mark.parametrize("form", FORMS)
def test_plain_attributes_have_no_gradient_under_no_grad(form):
  model, x = _remembering(), X.to("jax")
  run = FORMS[form](model)
  run(x)
  with torch.no_grad():
    run(x * 2)
  assert not model.hidden.requires_grad
  assert torch.equal(model.hidden, x * 4)
  run(x * 3)
  assert model.hidden.requires_grad


@pytest.mark.parametrize("form", FORMS)
def test_a_replaced_plain_tensor_takes_effect(form):
  model, x = _remembering(), X.to("jax")
  run = FORMS[form](model)
  assert run(x).item() == 24.0
  model.scale = torch.full((), 3.0, device="jax")
  assert run(x).item() == 36.0
  vars(model)["scale"] = torch.full((3,), 4.0, device="jax")
  assert run(x).item() == 48.0


@pytest.mark.parametrize("form", FORMS)
def test_replaced_tensors_in_a_list_take_effect(form):
  model, x = _remembering(shares=2), X.to("jax")
  run = FORMS[form](model)
  assert run(x).item() == 24.0
  model.shares[0] = torch.full((), 2.0, device="jax")
  assert run(x).item() == 48.0
  model.shares.append(torch.full((), 2.0, device="jax"))
  assert run(x).item() == 96.0


def _prune(model):
  prune.l1_unstructured(model[0], "weight", 2)


def _normalize_by_hook(model):
  nn.utils.spectral_norm(model[0])


def _weight_norm_by_hook(model):
  with pytest.warns(FutureWarning, match="weight_norm"):
    nn.utils.weight_norm(model[0])


HOOKS = [_prune, _normalize_by_hook, _weight_norm_by_hook]


@pytest.mark.parametrize("change", HOOKS, ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("form", ["jax_jit of a module", "checkpoint in jax_jit"])
def test_weights_that_a_hook_computes_are_trained(form, change):
  models, x = [_model(), _model()], X.to("jax")
  run = FORMS[form](models[0])
  run(x)
  for model in models:
    torch.manual_seed(0)
    change(model)
  for call in (run, models[1]):
    for _ in range(3):
      call(x).square().sum().backward()
  for own, expected in zip(models[0].parameters(), models[1].parameters()):
    torch.testing.assert_close(own.grad, expected.grad)
  torch.testing.assert_close(models[0][0].weight, models[1][0].weight)
  assert not models[0][0].weight.is_leaf


def test_a_second_derivative_goes_through_a_plain_attribute():
  model, x = _remembering(), X.to("jax")
  jax_jit(model)(x)
  (first,) = torch.autograd.grad(
    model.hidden.square().sum(), model.weight, create_graph=True
  )
  (second,) = torch.autograd.grad(first.sum(), model.weight)
  assert torch.equal(second, torch.full((3,), 32.0, device="jax"))


def test_assignment_after_a_read_rejects_gradients():
  class Accumulating(nn.Module):
    def forward(self, x):
      self.total = self.total + x * self.weight
      return self.total.sum()

  model = Accumulating()
  model.weight = nn.Parameter(torch.ones(3, device="jax"))
  model.total = total = torch.zeros(4, 3, device="jax")
  with pytest.raises(MutationError, match="Accumulating.total that needs a gradient"):
    jax_jit(model)(X.to("jax"))
  assert model.total is total and not total.any()


def test_a_function_reads_an_attribute_that_another_assigns():
  model, x = _remembering(), X.to("jax")
  run, read = jax_jit(model), jax_jit(lambda: model.hidden.sum())
  for factor in (1, 2, 3):
    run(x * factor)
    assert read().item() == 24.0 * factor


@pytest.mark.parametrize("form", ["jax_jit of a module", "checkpoint in jax_jit"])
def test_a_parameter_that_is_a_view_is_trained(form):
  both = torch.ones(2, 3, device="jax")
  model = nn.Module()
  model.first, model.second = nn.Parameter(both[0]), nn.Parameter(both[1])
  model.forward = lambda x: (x * model.first + model.second * 2).sum()
  FORMS[form](model)(X.to("jax")).backward()
  assert torch.equal(model.first.grad.cpu(), torch.full((3,), 4.0))
  assert torch.equal(model.second.grad.cpu(), torch.full((3,), 8.0))


class _Assigning(nn.Module):
  def forward(self, x):
    self.seen = x
    return x * 2


def test_dynamo_does_not_guard_on_the_watched_modules():
  jax_jit(nn.Linear(2, 2, device="jax"))(torch.ones(2, device="jax"))
  module, counter = _Assigning(), CompileCounter()
  compiled = torch.compile(module, backend=counter, fullgraph=True)
  for _ in range(2):
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert module.seen.tolist() == [1, 1]
    writes.watch(module)
  assert counter.frame_count == 1
