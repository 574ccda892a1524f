"""torchao's 8-bit weights on jax give the CPU's results."""

import copy

import pytest
import torch
from torch import nn

import torchax

quantization = pytest.importorskip(
  "torchao.quantization", reason="the extra `ecosystem` is not installed"
)

LIBRARY, DISTRIBUTION = "torchao", "torchao"
LINES = '`torchax.enable_globally()`; `model.to("jax")`'

CONFIGS = {
  "weights": quantization.Int8WeightOnlyConfig,
  "weights and activations": quantization.Int8DynamicActivationInt8WeightConfig,
}
each_config = pytest.mark.parametrize("config", CONFIGS)
POINTS = torch.linspace(-1, 1, 64).reshape(2, 32)


def _model() -> nn.Module:
  torch.manual_seed(0)
  return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).eval()


def _quantized(config: str) -> nn.Module:
  model = _model()
  quantization.quantize_(model, CONFIGS[config]())
  return model


def _inside(is_on: bool):
  return torchax.default_env() if is_on else torchax.disable_temporarily()


@pytest.mark.parametrize("is_on", [True, False])
@each_config
def test_a_quantized_model_keeps_its_results_when_moved(config, is_on):
  model = _quantized(config)
  expected = model(POINTS)
  with _inside(is_on), torch.no_grad():
    model.to("jax")
    actual = model(POINTS.to("jax"))
  assert model[0].weight.qdata.device.type == "jax"
  assert model[0].weight.qdata.dtype == torch.int8
  torch.testing.assert_close(actual.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_on", [True, False])
@each_config
def test_a_model_is_quantized_on_jax(config, is_on):
  expected = _quantized(config)(POINTS)
  with _inside(is_on), torch.no_grad():
    model = _model().to("jax")
    quantization.quantize_(model, CONFIGS[config]())
    actual = model(POINTS.to("jax"))
  assert model[0].weight.qdata.device.type == "jax"
  # A quotient halfway between two integers is rounded to either.
  torch.testing.assert_close(actual.cpu(), expected, atol=5e-3, rtol=1e-2)


def test_a_quantized_model_of_the_cpu_compiles_for_jax():
  model = _quantized("weights")
  expected = model(POINTS)
  compiled = torch.compile(copy.deepcopy(model), backend="jax")
  torch.testing.assert_close(compiled(POINTS), expected)
