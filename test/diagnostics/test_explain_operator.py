"""`torchax.explain_operator`: its steps, their order and reasons."""

import re

import pytest
import torch
import torch.nn.functional as F
from source_tree import PACKAGE

import torchax
from torchax.dispatch.dispatcher import Step

aten = torch.ops.aten
STEPS = [step.value for step in Step]
# Operation -> (step, what runs, part of the reason) of the first step with a plan.
FIRST = {
  torch.add: ("function table", "aten.add.Tensor", "no gradient"),
  F.layer_norm: ("function table", "_layer_norm", "compiled: one program"),
  F.dropout: ("function table", "_dropout", "not compiled as a whole"),
  torch.sum: ("torch", "torch's own function", ""),
  F.softsign: ("torch", "torch's own function", "in Python"),
  aten.mul.Tensor: ("lowering", "_aten_mul", "built in; compiled"),
  aten.nonzero.default: ("lowering", "_aten_nonzero", "not compiled"),
  aten.transpose.int: ("special plan", "ViewPlan", "it is a view"),
  aten.q_scale.default: ("special plan", "refusing_plan.refuse", "refused"),
  aten.add_.Tensor: ("variant", "InPlacePlan", "in-place variant of aten.add.Tensor"),
  aten.add.out: ("variant", "OutPlan", "out= variant of aten.add.Tensor"),
  aten.linalg_norm.default: ("torch", "its operations, one by one", "taken apart"),
  aten._aminmax.default: ("error", "OperatorNotFound", "no lowering"),
}


@pytest.mark.parametrize("operation", FIRST, ids=lambda operation: operation.__name__)
def test_first_step_with_an_answer_runs(operation):
  found = torchax.explain_operator(operation).chosen[0]
  step, runs, why = FIRST[operation]
  assert (found.step, found.runs) == (step, runs) and why in found.why


def test_steps_follow_the_dispatcher_in_its_order():
  explanation = torchax.explain_operator(torch.add)
  steps = [decision.step for decision in explanation.decisions]
  assert steps == ["function table", "torch", *STEPS]
  assert [d.step for d in explanation.chosen] == ["function table", "torch", "lowering"]
  lowering = explanation.chosen[-1]
  path, line = lowering.where.split(":")
  text = (PACKAGE.parent / path).read_text().splitlines()
  assert "def _aten_add" in "".join(text[int(line) - 1 : int(line) + 3])


@pytest.mark.parametrize(
  "name", ["relu", "index_put_", "zeros_like", "poisson", "silu"]
)
def test_chosen_step_has_the_plan_that_runs(name):
  env = torchax.default_env()
  for overload in [
    getattr(getattr(aten, name), n) for n in getattr(aten, name).overloads()
  ]:
    choice = env._dispatcher.choose(overload)
    assert type(choice.plan) is type(env.plan_for(overload))
    chosen = torchax.explain_operator(overload).chosen[-1]
    assert chosen.step == choice.step.value


def test_operators_of_an_environment_come_first_there():
  env = torchax.Environment()

  def mine(x, *dims):
    return x

  env.override_op_definition(aten.transpose.int, mine)
  env.override_op_definition(F.softsign, mine, is_jax_function=True)
  special, _, lowering, _ = torchax.explain_operator(aten.transpose.int, env).decisions
  assert special.why == "an operator of yours comes first"
  assert lowering.runs == "mine" and lowering.where.startswith(__file__)
  (function,) = torchax.explain_operator(F.softsign, env).chosen
  assert (function.step, function.runs) == ("function table", "mine")
  assert "with a fallback" in function.why
  assert torchax.explain_operator(F.softsign).chosen[0].step == "torch"


def test_packets_list_their_overloads_that_take_tensors():
  explanation = torchax.explain_operator(aten.add)
  operations = {decision.operation for decision in explanation.decisions}
  assert operations == {"aten.add.Tensor", "aten.add.Scalar"}


@pytest.mark.parametrize("wrong", ["add", print, None])
def test_anything_else_is_refused(wrong):
  with pytest.raises(TypeError, match="function of torch or an operation"):
    torchax.explain_operator(wrong)


def test_page_shows_the_explanation_of_add():
  page = (PACKAGE.parent / "docs" / "how-it-works.md").read_text()
  printed = str(torchax.explain_operator(torch.add))
  without_lines = lambda text: re.sub(r":\d+\)", ")", text)  # noqa: E731
  assert without_lines(printed) in without_lines(page)
