"""`torchax.explain`: operands, guards, effects and draws of a compiled function."""

import pytest
import torch

import torchax
from torchax.interop import JittableModule, jax_jit

X = torch.ones(4, 3)
SCALE = 3.0


def _model():
  return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.1)).to("jax")


def _training_step():
  model = _model()
  optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
  k = torch.tensor(2.0)

  @jax_jit
  def step(x, reduce="sum"):
    optimizer.zero_grad()
    loss = getattr(model(x), reduce)() * float(k) * SCALE
    loss.backward()
    optimizer.step()
    return loss

  return step, model


def test_explain_a_training_step():
  step, model = _training_step()
  before = model[0].weight.detach().clone()
  state = torchax.default_env().rng.state
  found = torchax.explain(step, X.to("jax"), reduce="mean")
  assert found.function == "step"
  assert found.operands["x"] == "float32[4, 3]"
  assert found.operands["Sequential.0.weight"] == "float32[3, 3]"
  assert found.operands["AdamW.state[0]['exp_avg']"] == "float32[3, 3]"
  assert found.operands["AdamW.param_groups[0]['lr']"] == "0.25"
  assert found.operands["random stream"] == "key and count"
  assert found.guards["reduce"] == "'mean'"
  assert found.guards["Sequential.1.p"] == "0.1"
  assert found.guards["Sequential.1.training"] == "True"
  assert found.guards["torch.get_default_dtype()"] == "torch.float32"
  assert any("CPU tensor" in name and v == "2.0" for name, v in found.guards.items())
  assert found.constants == {"SCALE": "3.0"}
  assert found.effects["Sequential.0.weight"] == "changed in place"
  assert found.effects["Sequential.0.bias.grad"] == "set"
  assert (found.draws, found.compilations, found.reasons) == (1, 1, ())
  # The function has not run.
  assert torch.equal(model[0].weight, before)
  assert model[0].weight.grad is None
  assert torchax.default_env().rng.state == state


def test_the_call_after_explain_does_not_recompile():
  step, _ = _training_step()
  x = X.to("jax")
  torchax.explain(step, x)
  step(x)
  assert step.traced.history.count == 1


def test_reasons_of_the_last_recompilation():
  model, x = _model(), X.to("jax")
  f = jax_jit(lambda x: model(x))
  f(x)
  model[1].p = 0.5
  f(x)
  found = torchax.explain(f, x)
  assert found.compilations == 2
  assert found.reasons == ("Sequential.1.p: 0.5, before 0.1",)


def test_explain_compiles_an_uncompiled_module():
  model = _model()
  found = torchax.explain(model, X.to("jax"))
  assert found.function == "Sequential"
  assert list(found.operands) == [
    *("input", "Sequential.0.weight", "Sequential.0.bias", "random stream")
  ]


def test_explain_a_compiled_module():
  compiled = JittableModule(_model().eval())
  found = torchax.explain(compiled, X.to("jax"))
  assert found.guards["Sequential.training"] == "False"
  assert found.draws == 0


def test_explain_a_compiled_method():
  class Scaled:
    scale = torch.full((3,), 2.0, device="jax")

    @jax_jit(static_argnums=0)
    def run(self, x):
      return self.scale * x

  found = torchax.explain(Scaled().run, X.to("jax"))
  assert found.operands["x"] == "float32[4, 3]"
  assert "Scaled object" in found.guards["self"]


def test_an_explanation_prints_as_a_table():
  shown = str(torchax.explain(lambda x, n: x * n, X.to("jax"), 2.0))
  assert shown.splitlines()[:4] == [
    *("<lambda>", "operands:", "  x  float32[4, 3]", "  n  float number")
  ]
  assert shown.endswith("effects: none\ndraws: 0\ncompiled: 1 times")


def test_generators_are_operands():
  generator = torch.Generator()
  found = torchax.explain(
    lambda x: x + torch.rand(3, device="jax", generator=generator), X.to("jax")
  )
  assert found.operands["generator 0"] == "1 draws"
  assert found.draws == 1


def test_results_of_torch_compile_raise():
  compiled = torchax.compile(_model(), torchax.CompileOptions(mode="dynamo"))
  with pytest.raises(TypeError, match="TORCH_LOGS=guards"):
    torchax.explain(compiled, X.to("jax"))


def test_a_non_callable_raises():
  with pytest.raises(TypeError, match="expects a function or a module, but got int"):
    torchax.explain(3)


def test_assigned_attributes_are_effects():
  class Keeping(torch.nn.Linear):
    def forward(self, x):
      self.hidden = super().forward(x)
      return self.hidden.sum()

  model = torch.nn.Sequential(Keeping(3, 3)).to("jax")
  found = torchax.explain(jax_jit(model), X.to("jax"))
  assert found.effects == {"Sequential.0.hidden": "assigned"}
  assert not hasattr(model[0], "hidden")
