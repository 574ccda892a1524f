"""Compiled functions follow their modules: members that are replaced by others.

Each row replaces something between two calls and compares with the module itself.
"""

import pytest
import torch
from torch import nn

import torchax
from torchax.interop import JittableModule, gradient_checkpoint, jax_jit

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
  "compile, export": _mode("export"),
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
def test_a_member_that_is_replaced_is_followed(form, change):
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
  """Counts how often Python runs its forward."""

  def __init__(self):
    super().__init__()
    self.linear, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)
    self.norm = nn.BatchNorm1d(3)

  def forward(self, x):
    runs[0] += 1
    return self.drop(self.norm(self.linear(x)))


TRACED = ("jax_jit of a module", "jax_jit of a function", "JittableModule")


@pytest.mark.parametrize("form", [*TRACED, "compile, jax", "compile, export"])
def test_the_python_of_a_module_runs_once_for_its_first_call_and_not_again(form):
  model, x = Counted().to("jax"), X.to("jax")
  compiled = FORMS[form](model)
  runs[0] = 0
  compiled(x)
  assert runs[0] == 1
  compiled(x)
  assert runs[0] == 1


def test_a_function_does_not_keep_tensors_of_a_module_that_it_only_names():
  model, x = _model(), X.to("jax")
  compiled = jax_jit(lambda x: x + len(list(model.modules())))
  compiled(x)
  assert compiled.traced.captured == []
  del model[0].weight  # nobody reads it
  assert torch.equal(compiled(x), x + 3)
