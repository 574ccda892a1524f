"""torchao's weights of 8 and 4 bits on jax give the CPU's results."""

import copy
import functools

import pytest
import torch
from torch import nn

import torchax

quantization = pytest.importorskip(
  "torchao.quantization", reason="the extra `ecosystem` is not installed"
)

quant_api = pytest.importorskip(
  "torchao.quantization.quant_api", reason="the ecosystem extra is not installed"
)

torchao_optim = pytest.importorskip(
  "torchao.optim", reason="the extra `ecosystem` is not installed"
)

LIBRARY, DISTRIBUTION = "torchao", "torchao"
LINES = '`torchax.enable_globally()`; `model.to("jax")`'

CONFIGS = {
  "weights": quantization.Int8WeightOnlyConfig,
  "weights and activations": quantization.Int8DynamicActivationInt8WeightConfig,
  "float8 weights": quantization.Float8WeightOnlyConfig,
}
FOUR_BITS = {
  "4-bit weights": functools.partial(
    quantization.IntxWeightOnlyConfig,
    weight_dtype=torch.int4,
    granularity=quantization.PerGroup(16),
  ),
  "4-bit weights, 8-bit activations": functools.partial(
    quantization.Int8DynamicActivationIntxWeightConfig,
    weight_dtype=torch.int4,
    weight_granularity=quantization.PerGroup(16),
  ),
}
POINTS = torch.linspace(-1, 1, 64).reshape(2, 32)


def _model() -> nn.Module:
  torch.manual_seed(0)
  return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).eval()


def _quantized(config: str) -> nn.Module:
  model = _model()
  quantization.quantize_(model, {**CONFIGS, **FOUR_BITS}[config]())
  return model


def _inside(is_on: bool):
  return torchax.default_env() if is_on else torchax.disable_temporarily()


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("config", {**CONFIGS, **FOUR_BITS})
def test_a_quantized_model_keeps_its_results_when_moved(config, is_on):
  model = _quantized(config)
  expected = model(POINTS)
  with _inside(is_on), torch.no_grad():
    model.to("jax")
    actual = model(POINTS.to("jax"))
  assert model[0].weight.qdata.device.type == "jax"
  assert model[0].weight.qdata.dtype in (torch.int8, torch.float8_e4m3fn)
  torch.testing.assert_close(actual.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_model_is_quantized_on_jax(config, is_on):
  expected = _quantized(config)(POINTS)
  with _inside(is_on), torch.no_grad():
    model = _model().to("jax")
    quantization.quantize_(model, CONFIGS[config]())
    actual = model(POINTS.to("jax"))
  assert model[0].weight.qdata.device.type == "jax"
  # A quotient halfway between two integers is rounded to either.
  torch.testing.assert_close(actual.cpu(), expected, atol=5e-3, rtol=1e-2)


@pytest.mark.parametrize("config", FOUR_BITS)
def test_4_bit_weights_of_jax_differ_by_one_level_at_most(config):
  """The extreme weight of a group is halfway between two levels."""
  expected = _quantized(config)[0].weight
  model = _model().to("jax")
  quantization.quantize_(model, FOUR_BITS[config]())
  found = model[0].weight
  assert (found.qdata.cpu() - expected.qdata).abs().max() <= 1
  torch.testing.assert_close(found.scale.cpu(), expected.scale)


COMPILED = {"jax_jit": torchax.interop.jax_jit, "compile": torch.compile}


@pytest.mark.parametrize("way", COMPILED)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_quantized_model_of_jax_compiles(config, way):
  model = _quantized(config)
  expected = model(POINTS)
  options = {"backend": "jax"} if way == "compile" else {}
  with torch.no_grad():
    actual = COMPILED[way](model.to("jax"), **options)(POINTS.to("jax"))
  torch.testing.assert_close(actual.cpu(), expected, atol=1e-4, rtol=1e-4)


def test_a_quantized_model_of_the_cpu_compiles_for_jax():
  model = _quantized("weights")
  expected = model(POINTS)
  compiled = torch.compile(copy.deepcopy(model), backend="jax")
  torch.testing.assert_close(compiled(POINTS), expected)


# torchao asks for a CUDA device before it makes the weights below, wherever they are.


@pytest.mark.parametrize(
  "granularity",
  [quantization.PerRow(), quantization.PerTensor()],
  ids=["row", "tensor"],
)
def test_float8_activations_use_a_scaled_product(granularity, monkeypatch):
  monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
  model = _model().to(torch.bfloat16)
  config = quantization.Float8DynamicActivationFloat8WeightConfig(
    granularity=granularity
  )
  quantization.quantize_(model, config)
  points = POINTS.to(torch.bfloat16)
  with torch.no_grad():
    expected = model(points)
    model.to("jax")
    actual = model(points.to("jax"))
  torch.testing.assert_close(actual.cpu(), expected)


def test_4_bit_weights_in_the_layout_of_cuda(monkeypatch):
  monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
  model, points = _model().to(torch.bfloat16), POINTS.to(torch.bfloat16)
  config = quantization.Int4WeightOnlyConfig(
    group_size=32, int4_packing_format="tile_packed_to_4d"
  )
  with torch.no_grad():
    expected = model(points)
    model.to("jax")
    quantization.quantize_(model, config)
    actual = model(points.to("jax"))
  assert model[0].weight.qdata.dtype == torch.int32
  # A weight of at most 0.18 has 16 levels.
  torch.testing.assert_close(actual.cpu(), expected, atol=0.05, rtol=0)


def _train(device: str) -> list[float]:
  torch.manual_seed(0)
  model = nn.Linear(64, 64).to(device)  # smaller ones keep their state in 32 bits
  optimizer = torchao_optim.AdamW8bit(model.parameters(), lr=0.01, block_size=32)
  points, losses = POINTS.reshape(1, 64).to(device), []
  for _ in range(3):
    optimizer.zero_grad()
    loss = (model(points) - points).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
  assert optimizer.state[model.weight]["exp_avg"].codes.dtype == torch.uint8
  return losses


def test_an_optimizer_with_8_bit_state_trains():
  """torchao compiles its steps with torch's default backend."""
  with torch.compiler.set_stance("force_eager"):
    expected = _train("cpu")
  actual = _train("jax")
  torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
  assert actual[2] < actual[0]
