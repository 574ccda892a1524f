"""transformers' Trainer on jax equals the CPU's, with bf16 and checkpoints."""

import importlib

import pytest
import torch

import torchax

accelerate = pytest.importorskip(
  "accelerate", reason="the extra `ecosystem` is not installed"
)
transformers = pytest.importorskip("transformers")
huggingface = importlib.import_module("models.huggingface")

LIBRARY, DISTRIBUTION = "transformers `Trainer`", "transformers"
LINES = "`torchax.integrations.transformers.use_jax()`"

integration = importlib.import_module("torchax.integrations.transformers")
STEPS, SAVED = 4, 2


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
  """Restore the state of the library before and after a test."""
  arguments = importlib.import_module("transformers.training_args")
  trainer = importlib.import_module("transformers.trainer")
  monkeypatch.setattr(
    arguments, "is_torch_bf16_gpu_available", arguments.is_torch_bf16_gpu_available
  )
  monkeypatch.setattr(trainer, "DEFAULT_CALLBACKS", [*trainer.DEFAULT_CALLBACKS])
  monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
  accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
  yield
  while torchax.default_env().enabled:
    torchax.disable_globally()
  accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def _use_jax():
  """Choose jax after a training on the CPU; a program does so once, at its start."""
  accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
  integration.use_jax()


class Sentences(torch.utils.data.Dataset):
  """Data set of sentences of eight words, which are their own labels."""

  def __len__(self):
    return 2 * STEPS

  def __getitem__(self, place):
    words = (torch.arange(huggingface.LENGTH) * (place + 1)) % huggingface.VOCABULARY
    return {"input_ids": words, "labels": words}


def _trainer(folder, dropout=0.0, attention="sdpa", **options) -> transformers.Trainer:
  torch.manual_seed(0)
  arguments = transformers.TrainingArguments(
    str(folder),
    per_device_train_batch_size=huggingface.BATCH,
    per_device_eval_batch_size=huggingface.BATCH,
    max_steps=STEPS,
    save_steps=SAVED,
    logging_steps=1,
    learning_rate=0.01,
    report_to=[],
    disable_tqdm=True,
    dataloader_pin_memory=False,
    **options,
  )
  return transformers.Trainer(
    huggingface.gpt2(attention, dropout),
    arguments,
    train_dataset=Sentences(),
    eval_dataset=Sentences(),
  )


def _losses(trainer) -> list[float]:
  return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _trained(folder, resume=None, **options) -> transformers.Trainer:
  trainer = _trainer(folder, **options)
  trainer.train(resume_from_checkpoint=resume)
  return trainer


def test_it_finds_the_device(tmp_path):
  _use_jax()
  trainer = _trainer(tmp_path)
  assert trainer.args.device.type == trainer.accelerator.device.type == "jax"
  assert {p.device.type for p in trainer.model.parameters()} == {"jax"}


def test_losses_and_evaluation_equal_the_cpu(tmp_path):
  expected = _trained(tmp_path / "cpu")
  expected_losses, expected_evaluation = _losses(expected), expected.evaluate()
  answers = expected.predict(Sentences()).predictions
  _use_jax()
  actual = _trained(tmp_path / "jax")
  assert _losses(actual) == pytest.approx(expected_losses, rel=1e-4)
  evaluation = actual.evaluate()["eval_loss"]
  assert evaluation == pytest.approx(expected_evaluation["eval_loss"], rel=1e-4)
  assert actual.predict(Sentences()).predictions == pytest.approx(answers, abs=1e-3)


def test_losses_in_bf16_equal_the_cpu(tmp_path):
  expected = _losses(_trained(tmp_path / "cpu", bf16=True, use_cpu=True))
  _use_jax()
  trainer = _trained(tmp_path / "jax", bf16=True)
  assert trainer.accelerator.mixed_precision == "bf16"
  # bfloat16 has 8 bits.
  assert _losses(trainer) == pytest.approx(expected, rel=1e-2)


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
  _use_jax()
  whole = _trained(tmp_path / "whole", dropout=0.3)
  checkpoint = tmp_path / "whole" / f"checkpoint-{SAVED}"
  torch.manual_seed(1)  # the checkpoint determines the rest of the draws
  rest = _trained(tmp_path / "rest", resume=str(checkpoint), dropout=0.3)
  assert _losses(rest) == _losses(whole)
  for name, value in whole.model.state_dict().items():
    assert torch.equal(rest.model.state_dict()[name].cpu(), value.cpu()), name


def test_a_checkpoint_of_the_cpu_resumes_on_jax(tmp_path):
  whole = _trained(tmp_path / "cpu")
  checkpoint = tmp_path / "cpu" / f"checkpoint-{SAVED}"
  _use_jax()
  rest = _trained(tmp_path / "jax", resume=str(checkpoint))
  assert _losses(rest) == pytest.approx(_losses(whole), rel=1e-4)


def test_a_checkpoint_of_jax_opens_on_the_cpu(tmp_path):
  _use_jax()
  trainer = _trained(tmp_path)
  with torchax.disable_temporarily():
    loaded = transformers.GPT2LMHeadModel.from_pretrained(
      tmp_path / f"checkpoint-{STEPS}"
    )
  assert {p.device.type for p in loaded.parameters()} == {"cpu"}
  for name, value in trainer.model.state_dict().items():
    assert torch.equal(loaded.state_dict()[name], value.cpu()), name


def test_arguments_made_too_early_are_refused(tmp_path):
  _trainer(tmp_path)
  with pytest.raises(RuntimeError, match="before the first Accelerator"):
    integration.use_jax()
