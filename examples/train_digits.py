"""Trains a small vision transformer on the digits images of scikit-learn.

Plain PyTorch code: the model, the loss, the optimizer and its schedule are torch's, on
device="jax"; the training step is compiled by `jax_jit`. The model and the optimizer
are closed over: their tensors are operands of the compiled step, and so is the random
state from which dropout and the noise on the images are drawn.

usage: python examples/train_digits.py [--seed=0] [--epochs=50] [--mode=jit|eager]
"""

import dataclasses
import itertools
import pathlib
import sys
import time

import matplotlib
import torch
import torch.nn.functional as F
from absl import app, flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import torchax
from torchax.interop import JittableModule, jax_jit

matplotlib.use("Agg")
from matplotlib import pyplot

_SEED = flags.DEFINE_integer("seed", 0, "Seeds weights, dropout and batch order.")
_EPOCHS = flags.DEFINE_integer("epochs", 50, "Passes over the training images.", 1)
_MODE = flags.DEFINE_enum("mode", "jit", ["jit", "eager"], "How the steps run.")
_PICTURE = flags.DEFINE_string("picture", "output/train_digits.png", "The curves.")
_REPLAY = flags.DEFINE_integer("replay", 20, "Steps that are repeated to compare.", 1)

BATCH = 96
CLASSES = 10
PEAK_LEARNING_RATE = 3e-3
# Standard deviation of what is added to the pixels, in [0, 1], at each step.
NOISE = 0.2


class VisionTransformer(nn.Module):
  """Patches of 2×2 pixels, a class token, pre-norm transformer blocks."""

  def __init__(self, width=64, blocks=2, heads=4, dropout=0.1):
    super().__init__()
    self.embed = nn.Linear(4, width)
    self.position = nn.Parameter(torch.randn(1, 17, width) * 0.02)
    self.token = nn.Parameter(torch.zeros(1, 1, width))
    block = nn.TransformerEncoderLayer(
      width, heads, 2 * width, dropout, "gelu", batch_first=True, norm_first=True
    )
    self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
    self.norm = nn.LayerNorm(width)
    self.head = nn.Linear(width, CLASSES)

  def forward(self, images):
    """Images (batch, 8, 8) in [0, 1] to logits (batch, 10)."""
    batch = images.shape[0]
    patches = images.reshape(batch, 4, 2, 4, 2).permute(0, 1, 3, 2, 4)
    patches = self.embed(patches.reshape(batch, 16, 4))
    tokens = torch.cat([self.token.expand(batch, -1, -1), patches], dim=1)
    tokens = self.blocks(tokens + self.position)
    return self.head(self.norm(tokens[:, 0]))


@dataclasses.dataclass
class Data:
  """Images (n, 8, 8) in [0, 1] and labels (n,), on jax."""

  train_images: torch.Tensor
  train_labels: torch.Tensor
  test_images: torch.Tensor
  test_labels: torch.Tensor


def load_data() -> Data:
  """The 1,797 digits that scikit-learn ships, a fifth of them for the test."""
  images, labels = load_digits(return_X_y=True)
  images = (images / 16.0).astype("float32").reshape(-1, 8, 8)
  parts = train_test_split(
    images, labels, test_size=0.2, random_state=0, stratify=labels
  )
  train_images, test_images, train_labels, test_labels = (
    torch.from_numpy(part).to("jax") for part in parts
  )
  return Data(train_images, train_labels, test_images, test_labels)


class Trainer:
  """A model, its optimizer and one training step, all from one seed."""

  def __init__(self, data: Data, seed: int, total_steps: int, compiled: bool):
    torch.manual_seed(seed)
    self.data = data
    self.batches = torch.Generator().manual_seed(seed)
    self.model = VisionTransformer().to("jax")
    self.optimizer = torch.optim.AdamW(
      self.model.parameters(),
      # A tensor, so that the schedule reaches the compiled step.
      lr=torch.tensor(PEAK_LEARNING_RATE, device="jax"),
      weight_decay=0.05,
      capturable=True,
    )
    self.schedule = torch.optim.lr_scheduler.OneCycleLR(
      self.optimizer, PEAK_LEARNING_RATE, total_steps=total_steps + 1
    )
    self.predict = JittableModule(self.model)
    self.losses: list[float] = []
    # The first step runs eagerly: AdamW makes its state there.
    self.step = self._step
    self.train_on(next(self.epoch()))
    if compiled:
      self.step = jax_jit(self._step)

  def _step(self, images, labels):
    images = images + NOISE * torch.randn_like(images)
    loss = F.cross_entropy(self.model(images), labels, label_smoothing=0.05)
    loss.backward()
    self.optimizer.step()
    self.optimizer.zero_grad()
    return loss.detach()

  def epoch(self):
    """Rows of the batches of one epoch, in random order."""
    order = torch.randperm(len(self.data.train_labels), generator=self.batches)
    yield from order.split(BATCH)[: len(order) // BATCH]

  def train_on(self, rows: torch.Tensor) -> torch.Tensor:
    """One step; returns the loss."""
    rows = rows.to("jax")
    loss = self.step(self.data.train_images[rows], self.data.train_labels[rows])
    self.schedule.step()
    self.losses.append(loss)
    return loss

  def accuracy(self) -> float:
    """The share of test images that are classified right."""
    self.model.eval()
    with torch.no_grad():
      classes = self.predict(self.data.test_images).argmax(dim=-1)
    self.model.train()
    return (classes == self.data.test_labels).float().mean().item()


def replay_losses(trainer: Trainer, steps: int) -> list[float]:
  """The losses of the first steps of a run, trained here as far as needed."""
  while len(trainer.losses) < steps:
    for rows in itertools.islice(trainer.epoch(), steps - len(trainer.losses)):
      trainer.train_on(rows)
  return [loss.item() for loss in trainer.losses[:steps]]


def _progress(epoch: int, epochs: int, text: str) -> None:
  width = 30
  done = width * (epoch + 1) // epochs
  end = "\n" if epoch + 1 == epochs else ""
  bar = "█" * done + "·" * (width - done)
  sys.stdout.write(f"\r{bar} {epoch + 1}/{epochs} {text}{end}")
  sys.stdout.flush()


def train(trainer: Trainer, epochs: int) -> list[float]:
  """Trains for some epochs; returns the test accuracy after each."""
  accuracies = []
  for epoch in range(epochs):
    for rows in trainer.epoch():
      loss = trainer.train_on(rows)
    accuracies.append(trainer.accuracy())
    _progress(
      epoch, epochs, f"loss {loss.item():.3f}  test accuracy {accuracies[-1]:.3f}"
    )
  return accuracies


def draw_curves(path: str, losses: list[float], accuracies: list[float]) -> None:
  """Saves a picture of the training loss by step and the test accuracy by epoch."""
  figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
  left.plot(losses, linewidth=0.8)
  left.set(title="Training loss", xlabel="step", ylabel="cross entropy", yscale="log")
  right.plot(range(1, len(accuracies) + 1), accuracies)
  right.axhline(0.97, color="gray", linestyle="--", linewidth=0.8)
  right.set(title="Test accuracy", xlabel="epoch", ylabel="accuracy", ylim=(0, 1.02))
  figure.suptitle("Vision transformer on the digits images")
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=120)
  pyplot.close(figure)


def main(_) -> None:
  """Trains, reports, compares seeds and saves the picture."""
  torchax.enable_globally()
  start = time.perf_counter()
  data = load_data()
  compiled = _MODE.value == "jit"
  steps = _EPOCHS.value * (len(data.train_labels) // BATCH)
  trainer = Trainer(data, _SEED.value, steps, compiled)
  accuracies = train(trainer, _EPOCHS.value)
  losses = [loss.item() for loss in trainer.losses]
  print(f"test accuracy {accuracies[-1]:.4f} after {time.perf_counter() - start:.1f} s")

  seed, replay = _SEED.value, _REPLAY.value
  first = losses[:replay]
  again = replay_losses(Trainer(data, seed, steps, compiled), len(first))
  other = replay_losses(Trainer(data, seed + 1, steps, compiled), len(first))
  same = first == again
  print(f"seed {seed} again, {len(first)} steps: equal losses, bit for bit: {same}")
  print(f"seed {seed + 1}, {len(first)} steps: other losses: {first != other}")
  draw_curves(_PICTURE.value, losses, accuracies)
  print(f"curves in {_PICTURE.value}")
  if not same or first == other:
    raise SystemExit("the same seed must give the same losses, and another seed others")


if __name__ == "__main__":
  app.run(main)
