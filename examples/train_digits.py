"""Train a small vision transformer on the digits images of scikit-learn.

Model, loss, optimizer and schedule are plain PyTorch on device="jax"; `jax_jit`
compiles the training step. The step closes over the model and the optimizer: their
tensors become operands of the compiled step. So does the random state of dropout and of
the noise on the images.

Prints the progress, the test accuracy and the time. Then trains the first steps again
with the same seed and with another one, and compares the losses. Saves a picture of the
loss and the accuracy.

usage: python examples/train_digits.py [--seed=0] [--epochs=50] [--mode=jit|eager]
         [--replay=20] [--picture=output/train_digits.png]
"""

import dataclasses
import itertools
import pathlib
import sys
import time

import matplotlib
import torch
import torch.nn.functional as F
from absl import app, flags, logging
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import torchax
from torchax.interop import JittableModule, jax_jit

matplotlib.use("Agg")
from matplotlib import pyplot

_SEED = flags.DEFINE_integer("seed", 0, "Seed of weights, dropout and batch order.")
_EPOCHS = flags.DEFINE_integer("epochs", 50, "Passes over the training images.", 1)
_MODE = flags.DEFINE_enum("mode", "jit", ["jit", "eager"], "Compiled or eager steps.")
_PICTURE = flags.DEFINE_string("picture", "output/train_digits.png", "Path of curves.")
_REPLAY = flags.DEFINE_integer("replay", 20, "Steps to repeat for comparison.", 1)

BATCH = 96
CLASSES = 10
PEAK_LEARNING_RATE = 3e-3
# Standard deviation of the noise on the pixels, which are in [0, 1].
NOISE = 0.2


class VisionTransformer(nn.Module):
  """Transformer of pre-norm blocks on patches of 2×2 pixels, with a class token."""

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
    """Return logits (batch, 10) of images (batch, 8, 8) in [0, 1]."""
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
  """Load the 1,797 digits that scikit-learn ships; a fifth of them is for testing."""
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
  """Model, optimizer and training step, initialized from one seed."""

  def __init__(self, data: Data, seed: int, total_steps: int, compiled: bool):
    torch.manual_seed(seed)
    self.data = data
    self.batches = torch.Generator().manual_seed(seed)
    self.model = VisionTransformer().to("jax")
    self.optimizer = torch.optim.AdamW(
      self.model.parameters(),
      # A tensor becomes an operand of the compiled step, so the schedule can change it.
      lr=torch.tensor(PEAK_LEARNING_RATE, device="jax"),
      weight_decay=0.05,
      capturable=True,
    )
    self.schedule = torch.optim.lr_scheduler.OneCycleLR(
      self.optimizer, PEAK_LEARNING_RATE, total_steps=total_steps
    )
    self.predict = JittableModule(self.model)
    self.losses: list[float] = []
    self.step = jax_jit(self._step) if compiled else self._step

  def _step(self, images, labels):
    images = images + NOISE * torch.randn_like(images)
    loss = F.cross_entropy(self.model(images), labels, label_smoothing=0.05)
    loss.backward()
    self.optimizer.step()
    self.optimizer.zero_grad()
    return loss.detach()

  def epoch(self):
    """Yield the row indices of each batch of one epoch, in random order."""
    order = torch.randperm(len(self.data.train_labels), generator=self.batches)
    yield from order.split(BATCH)[: len(order) // BATCH]

  def train_on(self, rows: torch.Tensor) -> torch.Tensor:
    """Run one training step on these rows; return the loss."""
    rows = rows.to("jax")
    loss = self.step(self.data.train_images[rows], self.data.train_labels[rows])
    self.schedule.step()
    self.losses.append(loss)
    return loss

  def accuracy(self) -> float:
    """Return the fraction of test images that are classified correctly."""
    self.model.eval()
    with torch.no_grad():
      classes = self.predict(self.data.test_images).argmax(dim=-1)
    self.model.train()
    return (classes == self.data.test_labels).float().mean().item()


def replay_losses(trainer: Trainer, steps: int) -> list[float]:
  """Train until `steps` losses are recorded; return those of the first `steps`."""
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
  """Train for some epochs; return the test accuracy after each."""
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
  """Save a picture of the training loss by step and the test accuracy by epoch."""
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
  """Train, report, compare seeds and save the picture."""
  logging.set_verbosity(logging.WARNING)
  torchax.enable_globally()
  start = time.perf_counter()
  data = load_data()
  device = data.train_images.jax().device
  print(f"{len(data.train_images)} images for training, on {device}")
  compiled = _MODE.value == "jit"
  steps = _EPOCHS.value * (len(data.train_labels) // BATCH)
  trainer = Trainer(data, _SEED.value, steps, compiled)
  print("first epoch: it compiles the step" if compiled else "first epoch")
  accuracies = train(trainer, _EPOCHS.value)
  losses = [loss.item() for loss in trainer.losses]
  print(f"test accuracy {accuracies[-1]:.4f} after {time.perf_counter() - start:.1f} s")

  seed, replay = _SEED.value, _REPLAY.value
  first = losses[:replay]
  print(f"the first {len(first)} steps again, with two seeds")
  again = replay_losses(Trainer(data, seed, steps, compiled), len(first))
  other = replay_losses(Trainer(data, seed + 1, steps, compiled), len(first))
  same = first == again
  print(f"seed {seed} again, {len(first)} steps: equal losses, bit for bit: {same}")
  print(f"seed {seed + 1}, {len(first)} steps: different losses: {first != other}")
  draw_curves(_PICTURE.value, losses, accuracies)
  print(f"curves saved to {_PICTURE.value}")
  print("Next: --mode=eager, another --seed, or docs/get-started.md")
  if not same or first == other:
    raise SystemExit("equal seeds must give equal losses, other seeds different ones")


if __name__ == "__main__":
  app.run(main)
