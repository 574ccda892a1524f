"""Lightning's Trainer on jax equals the CPU's, with bf16 and checkpoints."""

import importlib
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchax

pytorch = pytest.importorskip(
  "lightning.pytorch", reason="the extra `ecosystem` is not installed"
)
fabric = importlib.import_module("lightning.fabric")

LIBRARY, DISTRIBUTION = "Lightning", "lightning"
LINES = (
  "`import torchax.integrations.lightning`; "
  '`Trainer(accelerator="jax", strategy="jax")`'
)

integration = importlib.import_module("torchax.integrations.lightning")
JAX = {"accelerator": "jax", "strategy": "jax"}
Misconfiguration = integration.MisconfigurationException

pytestmark = [
  pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
  pytest.mark.filterwarnings("ignore:The number of training batches"),
]


class Network(pytorch.LightningModule):
  """Small network that records its losses."""

  def __init__(self, dropout=0.0):
    super().__init__()
    self.layers = nn.Sequential(
      nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1)
    )
    self.losses, self.devices = [], set()

  def _loss(self, batch):
    points, targets = batch
    return nn.functional.mse_loss(self.layers(points), targets)

  def training_step(self, batch, index):
    loss = self._loss(batch)
    self.log("loss", loss)
    self.losses.append(loss.item())
    self.devices |= {loss.device.type, batch[0].device.type, self.device.type}
    return loss

  def validation_step(self, batch, index):
    self.log("validation", self._loss(batch))

  def configure_optimizers(self):
    optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def _fit(folder, epochs=2, dropout=0.0, resume=None, **options):
  """Return a fitted network and its Trainer."""
  pytorch.seed_everything(0, verbose=False)
  network = Network(dropout)
  points = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
  data = DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), batch_size=8)
  trainer = pytorch.Trainer(
    max_epochs=epochs,
    gradient_clip_val=0.5,
    default_root_dir=str(folder),
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
    **options,
  )
  trainer.fit(network, data, data, ckpt_path=resume)
  return network, trainer


def test_losses_and_validation_equal_the_cpu(tmp_path):
  expected, on_cpu = _fit(tmp_path, accelerator="cpu")
  actual, trainer = _fit(tmp_path, **JAX)
  assert actual.devices == {"jax"}
  assert actual.losses == pytest.approx(expected.losses, rel=1e-5)
  figures, wanted = trainer.callback_metrics, on_cpu.callback_metrics
  assert figures["validation"].item() == pytest.approx(wanted["validation"].item())
  assert not torchax.default_env().enabled


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_losses_in_bf16_equal_the_cpu(tmp_path, precision):
  expected, _ = _fit(tmp_path, accelerator="cpu", precision=precision)
  actual, _ = _fit(tmp_path, precision=precision, **JAX)
  # bfloat16 has 8 bits.
  assert actual.losses == pytest.approx(expected.losses, rel=2e-2)


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
  keeping = {"callbacks": [integration.RandomStateCallback()], **JAX}
  whole, _ = _fit(tmp_path, 4, 0.5, **keeping)
  half, trainer = _fit(tmp_path, 2, 0.5, **keeping)
  checkpoint = tmp_path / "half.ckpt"
  trainer.save_checkpoint(checkpoint)
  rest, _ = _fit(tmp_path, 4, 0.5, resume=str(checkpoint), **keeping)
  assert half.losses + rest.losses == whole.losses


def test_a_checkpoint_opens_on_the_cpu(tmp_path):
  network, trainer = _fit(tmp_path, 1, **JAX)
  trainer.save_checkpoint(tmp_path / "model.ckpt")
  loaded = Network.load_from_checkpoint(tmp_path / "model.ckpt", map_location="cpu")
  for name, value in network.state_dict().items():
    assert torch.equal(loaded.state_dict()[name], value.cpu()), name


def test_the_accelerator_alone_does_not_train_on_the_cpu(tmp_path):
  with pytest.raises(Misconfiguration, match='strategy="jax"'):
    _fit(tmp_path, accelerator="jax")
  assert not torchax.default_env().enabled


@pytest.mark.parametrize("devices", [1, "1", -1, "auto"])
def test_all_options_for_one_process_are_accepted(devices):
  trainer = pytorch.Trainer(devices=devices, logger=False, **JAX)
  assert trainer.num_devices == 1
  assert trainer.strategy.root_device == torch.device("jax:0")


@pytest.mark.parametrize("devices", [2, [1], "0,1"])
def test_several_processes_and_other_devices_are_refused(devices):
  with pytest.raises(Misconfiguration, match="one process drives all.*jax:1"):
    pytorch.Trainer(devices=devices, logger=False, **JAX)


def test_a_strategy_chooses_the_device():
  trainer = pytorch.Trainer(strategy=integration.JaxStrategy("jax:0"), logger=False)
  assert isinstance(trainer.accelerator, integration.JaxAccelerator)
  assert isinstance(trainer.accelerator.get_device_stats("jax:0"), dict)


@pytest.mark.parametrize("options", [JAX, {"accelerator": "jax"}, {"strategy": "jax"}])
def test_fabric_is_refused(options):
  with pytest.raises(Misconfiguration, match=r"Fabric does not know jax.*model\.to"):
    fabric.Fabric(**options)


OTHER_PACKAGE = """
import pytorch_lightning
import torchax.integrations.lightning
try:
  pytorch_lightning.Trainer(accelerator="jax", strategy="jax")
except Exception as error:
  print(f"{type(error).__name__}: {error}")
"""


def test_the_other_package_of_lightning_is_refused():
  pytest.importorskip("pytorch_lightning", reason="its package is not installed")
  said = subprocess.run(
    [sys.executable, "-c", OTHER_PACKAGE], capture_output=True, text=True, check=True
  ).stdout
  assert said.startswith("MisconfigurationException")
  assert "Write `import lightning.pytorch as pl`" in said


def test_float16_is_refused_in_favour_of_bfloat16(tmp_path):
  with pytest.raises(Misconfiguration, match="bf16-mixed"):
    _fit(tmp_path, precision="16-mixed", **JAX)
