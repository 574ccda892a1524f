"""accelerate's training loop on jax equals the CPU's, with bf16 and saved states."""

import importlib

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchax

accelerate = pytest.importorskip(
  "accelerate", reason="the extra `ecosystem` is not installed"
)

LIBRARY, DISTRIBUTION = "accelerate", "accelerate"
LINES = "`torchax.integrations.accelerate.use_jax()`"

integration = importlib.import_module("torchax.integrations.accelerate")
STEPS = 4


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
  """Clear accelerate's state before and after a test."""
  accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
  monkeypatch.delenv(integration.VARIABLE, raising=False)
  monkeypatch.setenv(integration.VARIABLE, "cpu")
  was_on = torchax.default_env().enabled
  yield
  if torchax.default_env().enabled and not was_on:
    torchax.disable_globally()
  accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


class Run:
  """Training as accelerate's documentation writes it."""

  def __init__(self, precision="no", dropout=0.0):
    self.accelerator = accelerate.Accelerator(mixed_precision=precision)
    torch.manual_seed(0)
    model = nn.Sequential(
      nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(8 * STEPS, 4, generator=generator)
    data = TensorDataset(points, points.sum(1, keepdim=True))
    self.model, self.optimizer, self.data, self.scheduler = self.accelerator.prepare(
      model, optimizer, DataLoader(data, batch_size=8), scheduler
    )

  def losses(self) -> list[float]:
    """Train one epoch; return the losses."""
    found = []
    for points, targets in self.data:
      with self.accelerator.accumulate(self.model):
        with self.accelerator.autocast():
          loss = nn.functional.mse_loss(self.model(points), targets)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
      found.append(self.accelerator.gather(loss.detach()).item())
    return found


def _on_cpu(**options) -> list[float]:
  losses = Run(**options).losses()
  accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
  return losses


def test_it_finds_the_device():
  integration.use_jax()
  run = Run()
  assert run.accelerator.device.type == "jax"
  assert {p.device.type for p in run.model.parameters()} == {"jax"}
  assert {x.device.type for batch in run.data for x in batch} == {"jax"}


def test_losses_equal_the_cpu():
  expected = _on_cpu()
  integration.use_jax()
  assert Run().losses() == pytest.approx(expected, rel=1e-5)


def test_losses_in_bf16_equal_the_cpu():
  expected = _on_cpu(precision="bf16")
  integration.use_jax()
  run = Run(precision="bf16")
  with run.accelerator.autocast():
    result = run.model[0](torch.ones(8, 4, device="jax"))
  assert result.dtype == torch.bfloat16
  # Tolerance: two roundings to 8 bits, at other operations.
  assert run.losses() == pytest.approx(expected, rel=1e-2)


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
  integration.use_jax()
  run = Run(dropout=0.5)
  run.accelerator.register_for_checkpointing(integration.RandomState())
  run.losses()
  run.accelerator.save_state(str(tmp_path))
  expected = run.losses()
  # The same objects, and new ones.
  run.accelerator.load_state(str(tmp_path))
  assert run.losses() == expected
  accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
  again = Run(dropout=0.5)
  again.accelerator.register_for_checkpointing(integration.RandomState())
  again.accelerator.load_state(str(tmp_path))
  assert again.losses() == expected


def test_a_saved_model_opens_on_the_cpu(tmp_path):
  integration.use_jax()
  run = Run()
  run.accelerator.save_model(run.model, str(tmp_path))
  safetensors = importlib.import_module("safetensors.torch")
  saved = safetensors.load_file(tmp_path / "model.safetensors")
  for name, value in run.accelerator.unwrap_model(run.model).state_dict().items():
    torch.testing.assert_close(saved[name], value.cpu())


def test_choosing_jax_too_late_is_refused():
  accelerate.Accelerator(cpu=True)
  with pytest.raises(RuntimeError, match="before the first Accelerator"):
    integration.use_jax()
  assert not torchax.default_env().enabled


def test_choosing_jax_twice_turns_the_environment_on_once():
  integration.use_jax()
  integration.use_jax()
  assert torchax.default_env().enabled
  torchax.disable_globally()
  assert not torchax.default_env().enabled


def test_another_random_state_is_refused():
  state = integration.RandomState()
  before = state.state_dict()["jax"]
  with pytest.raises(ValueError, match="under 'jax'"):
    state.load_state_dict({"cuda": before})
  assert torch.equal(state.state_dict()["jax"], before)
