"""Options of the backend, and its log messages."""

import logging
import os
import subprocess
import sys

import jax
import pytest
import torch

import torchax
import torchax.dynamo
from torchax.dynamo import Options, set_logs

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)


def compiled(function, **options):
  return torch.compile(function, backend="jax", fullgraph=True, **options)


def test_x64_keeps_64_bits():
  run = compiled(lambda x: x / 3, options={"x64": True})
  result = run(torch.ones(3, dtype=torch.float64))
  assert result[0].item() == 1 / 3
  assert not jax.config.jax_enable_x64


def test_precision_reaches_the_products(monkeypatch):
  lowered = []
  original = jax.jit

  def spying(function, **options):
    jitted = original(function, **options)

    def call(*args):
      lowered.append(jitted.lower(*args).as_text())
      return jitted(*args)

    return call

  monkeypatch.setattr("torchax.dynamo.program.jax.jit", spying)
  compiled(lambda x: x @ x.t(), options={"precision": "highest"})(X)
  assert "HIGHEST" in lowered[0]


def test_device_option_selects_the_device():
  device = jax.devices("cpu")[0]
  run = compiled(lambda x: x * 2, options={"device": device})
  torch.testing.assert_close(run(X), X * 2)


def test_donated_memory_is_deleted():
  def step(parameters, gradients):
    torch._foreach_add_(parameters, gradients, alpha=-1.0)
    parameters[0].mul_(2)

  run = compiled(step, options={"donate": True})
  parameters = [torch.full((3,), 4.0).to("jax"), torch.full((3,), 6.0).to("jax")]
  gradients = [torch.ones(3).to("jax"), torch.ones(3).to("jax")]
  before = [tensor.jax() for tensor in (*parameters, *gradients)]
  with torchax.default_env():
    run(parameters, gradients)
  assert [p[0].item() for p in parameters] == [6.0, 5.0]
  assert [array.is_deleted() for array in before] == [True, True, False, False]


@pytest.mark.parametrize(
  ("given", "error", "message"),
  [
    ({"options": {"foo": 1}}, ValueError, "no option foo"),
    ({"options": {"x64": "yes"}}, TypeError, "True, False or None"),
    ({"options": {"precision": "low"}}, ValueError, "highest"),
    ({"options": {"device": "cpu"}}, TypeError, "jax.Device"),
    ({"options": {"compiler_options": 3}}, TypeError, "dict of XLA's flags"),
    ({"mode": "max-autotune"}, ValueError, "leave `mode` out"),
  ],
)
def test_bad_options_name_the_expected_ones(given, error, message):
  with pytest.raises(error, match=message):
    Options.of(**given)
  with pytest.raises(Exception, match=message):
    compiled(lambda x: x * 2, **given)(X)


@pytest.fixture
def logs(caplog):
  caplog.set_level(logging.INFO, "torchax.dynamo")
  yield lambda: "\n".join(
    record.getMessage() for record in caplog.records if record.name == "torchax.dynamo"
  )
  set_logs(graphs=False, operands=False, draws=False)


def noisy(x):
  return torch.rand_like(x) + x


def test_logs_show_graphs_operands_and_draws(logs):
  set_logs(graphs=True, operands=True, draws=True)
  compiled(noisy)(X)
  text = logs()
  assert "aten.rand_like" in text
  assert "(key and count)" in text
  assert "float32[4, 8]" in text
  assert "test_options.py" in text


def test_logs_are_off(logs):
  compiled(noisy)(X)
  assert logs() == ""


def test_unknown_logs_are_refused():
  with pytest.raises(ValueError, match="graphs, operands, draws"):
    set_logs(keys=True)


def test_the_environment_variable_turns_logs_on():
  program = (
    "import torch, torchax\n"
    "torch.compile(lambda x: torch.rand_like(x), backend='jax')(torch.ones(3))"
  )
  found = subprocess.run(
    [sys.executable, "-c", program],
    env={**os.environ, "TORCHAX_LOGS": "draws", "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    check=True,
  )
  assert "aten.rand_like" in found.stderr
  assert torchax.dynamo.Options.of() == Options()
