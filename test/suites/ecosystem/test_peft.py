"""peft's adapters are trained, saved, loaded and merged on jax as on the CPU."""

import importlib

import pytest
import torch

peft = pytest.importorskip("peft", reason="the extra `ecosystem` is not installed")
huggingface = importlib.import_module("models.huggingface")

LIBRARY, DISTRIBUTION = "peft", "peft"
LINES = '`torchax.enable_globally()`; `model.to("jax")`'

pytestmark = pytest.mark.usefixtures("env")


def _base():
  torch.manual_seed(0)
  return huggingface.gpt2("sdpa", 0.0)


def _adapted(device: str, order: str = "adapt, move"):
  config = peft.LoraConfig(
    r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
  )
  if order == "adapt, move":
    return peft.get_peft_model(_base(), config).to(device)
  return peft.get_peft_model(_base().to(device), config)


def _loss(model) -> torch.Tensor:
  words = huggingface.words().to(next(model.parameters()).device)
  return model(words, labels=words).loss


def _trained(*where):
  model = _adapted(*where)
  trainable = [p for p in model.parameters() if p.requires_grad]
  optimizer = torch.optim.AdamW(trainable, lr=0.01)
  for _ in range(2):
    _loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()
  return model.eval()


@pytest.mark.parametrize("order", ["adapt, move", "move, adapt"])
def test_a_trained_adapter_is_that_of_the_cpu(order):
  actual, expected = _trained("jax", order), _trained("cpu")
  assert {p.device.type for p in actual.parameters()} == {"jax"}
  for (name, value), (_, want) in zip(
    actual.named_parameters(), expected.named_parameters(), strict=True
  ):
    torch.testing.assert_close(value.cpu(), want, atol=1e-4, rtol=1e-3, msg=name)


def test_an_adapter_is_saved_loaded_and_merged(tmp_path):
  model = _trained("jax")
  expected = _loss(model).item()
  model.save_pretrained(tmp_path)
  on_jax = peft.PeftModel.from_pretrained(_base().to("jax"), tmp_path)
  on_cpu = peft.PeftModel.from_pretrained(_base(), tmp_path)
  assert {p.device.type for p in on_jax.parameters()} == {"jax"}
  for loaded in (on_jax, on_cpu, model.merge_and_unload()):
    assert _loss(loaded.eval()).item() == pytest.approx(expected, rel=1e-5)


def test_an_adapter_is_turned_off_and_on():
  model = _trained("jax")
  with model.disable_adapter():
    without = _loss(model).item()
  assert without == pytest.approx(_loss(_base().eval().to("jax")).item(), rel=1e-5)
  assert _loss(model).item() != without
