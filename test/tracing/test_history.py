"""Reasons of recompilation in `TORCHAX_LOGS=recompiles`."""

import logging
import os
import subprocess
import sys

import pytest
import torch

import torchax
from torchax.interop import JittableModule, jax_jit

X = torch.ones(4, 3)


@pytest.fixture
def told(caplog):
  """Return the messages about recompilation so far."""
  torchax.set_logs(recompiles=True)
  caplog.set_level(logging.INFO, "torchax.recompiles")
  yield lambda: [
    record.getMessage()
    for record in caplog.records
    if record.name == "torchax.recompiles"
  ]
  torchax.set_logs(recompiles=False)


def _model():
  return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.1)).to("jax")


def _another_shape(f, model, x):
  f(x[:2])


def _another_dtype(f, model, x):
  f(x.to(torch.bfloat16))


def _another_flag(f, model, x):
  f(x, True)


def _another_number_of_a_module(f, model, x):
  model[1].p = 0.3
  f(x)


def _another_mode(f, model, x):
  model.eval()
  f(x)


def _without_gradients(f, model, x):
  with torch.no_grad():
    f(x)


def _another_parameter(f, model, x):
  model[0].bias = torch.nn.Parameter(torch.zeros(3, device="jax"))
  f(x)


def _in_autocast(f, model, x):
  with torch.autocast("jax", torch.bfloat16):
    f(x)


def _a_hook(f, model, x):
  model[0].register_forward_hook(_hook)
  f(x)


def _hook(module, args, out):
  return out


CHANGES = {
  _another_shape: "x: float32[2, 3], before float32[4, 3]",
  _another_dtype: "x: bfloat16[4, 3], before float32[4, 3]",
  _another_flag: "flag: True, before not there",
  _another_number_of_a_module: "Sequential.1.p: 0.3, before 0.1",
  _another_mode: "Sequential.training: False, before True",
  _without_gradients: "torch.is_grad_enabled(): False, before True",
  _another_parameter: "tensors and modules replaced: 1 times, before not there",
  _in_autocast: "autocast: torch.bfloat16, before not there",
  _a_hook: "Sequential.0._forward_hooks: [_hook], before not there",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_the_changed_value_is_named(told, change):
  model, x = _model(), X.to("jax")

  @jax_jit
  def step(x, flag=False):
    out = model(x.to(torch.float32))
    return -out if flag else out

  step(x)
  step(x)
  assert told() == []
  change(step, model, x)
  (message,) = told()
  assert message.startswith("step is compiled for the 2nd time:\n")
  assert f"  {CHANGES[change]}" in message.splitlines()


def test_a_tensor_on_the_cpu_is_named_with_its_numbers(told):
  k, x = torch.tensor([2.0, 3.0]), X.to("jax")
  step = jax_jit(lambda x: x * float(k[0]))
  step(x)
  k[0] = 5.0
  step(x)
  (message,) = told()
  assert "a CPU tensor of shape [2]" in message
  assert "[5.0, 3.0], before [2.0, 3.0]" in message


def test_the_most_similar_program_is_compared(told):
  model, x = JittableModule(_model()), X.to("jax")
  model(x)
  model(x[:2])
  model.eval()
  model(x)
  _, second = told()
  assert "input" not in second  # the first program had `x` as well
  assert "Sequential.training: False, before True" in second


def test_returning_to_an_earlier_program_logs_nothing(told):
  model, x = _model(), X.to("jax")
  step = jax_jit(lambda x: model(x))
  for _ in range(3):
    step(x)
    step(x[:2])
    model.train(not model.training)
  assert len(told()) == 3  # four programs


def test_torchax_logs_turns_the_log_on():
  program = (
    "import torch, torchax\n"
    "f = torchax.interop.jax_jit(lambda x: x)\n"
    "f(torch.ones(2, device='jax')); f(torch.ones(3, device='jax'))"
  )
  environment = {**os.environ, "TORCHAX_LOGS": "recompiles", "JAX_PLATFORMS": "cpu"}
  ran = subprocess.run(
    [sys.executable, "-c", program],
    env=environment,
    capture_output=True,
    text=True,
    check=True,
  )
  assert "<lambda> is compiled for the 2nd time:" in ran.stderr
  assert "x: float32[3], before float32[2]" in ran.stderr


def test_an_unknown_log_kind_raises():
  with pytest.raises(ValueError, match="keys cannot be logged; TORCHAX_LOGS and"):
    torchax.set_logs(keys=True)
