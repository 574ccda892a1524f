"""Networks that the library lacks: images, recurrence, diffusion.

Like the library's models, they return a mapping of results with a "loss".
"""

import torch
import torch.nn.functional as F
from ops.harness import floats, ints
from torch import nn

CLASSES, CHANNELS, SIDE, BATCH = 4, 4, 8, 4
VOCABULARY, HIDDEN, LENGTH = 64, 16, 8
STEPS = 10


class Residual(nn.Module):
  """Two convolutions with a shortcut, which adapts to a change of the shape."""

  def __init__(self, inputs: int, outputs: int, stride: int):
    super().__init__()
    # No bias: BatchNorm would subtract it.
    self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    self.first_norm = nn.BatchNorm2d(outputs)
    self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
    self.second_norm = nn.BatchNorm2d(outputs)
    self.shortcut = nn.Identity()
    if (inputs, stride) != (outputs, 1):
      self.shortcut = nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
      )

  def forward(self, x):
    inner = F.relu(self.first_norm(self.first(x)))
    return F.relu(self.second_norm(self.second(inner)) + self.shortcut(x))


class ResNet(nn.Module):
  """Image classifier with running statistics that are changed in place."""

  def __init__(self, dropout: float):
    super().__init__()
    self.stem = nn.Sequential(
      nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False),
      nn.BatchNorm2d(CHANNELS),
      nn.ReLU(inplace=True),
      nn.MaxPool2d(3, stride=2, padding=1),
    )
    self.blocks = nn.Sequential(
      Residual(CHANNELS, CHANNELS, 1), Residual(CHANNELS, 2 * CHANNELS, 2)
    )
    self.dropout = nn.Dropout(dropout)
    self.head = nn.Linear(2 * CHANNELS, CLASSES)

  def forward(self, images, labels):
    pooled = F.adaptive_avg_pool2d(self.blocks(self.stem(images)), 1).flatten(1)
    logits = self.head(self.dropout(pooled))
    return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
  return nn.Sequential(
    nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU()
  )


class UNet(nn.Module):
  """U-Net of one lower level, with an embedding of time.

  Args:
    outputs: channels of the result.
    dropout: probability that a channel of the lower level is dropped.
  """

  def __init__(self, outputs: int, dropout: float):
    super().__init__()
    self.time = nn.Embedding(STEPS, CHANNELS)
    self.enter = _convolution(3, CHANNELS)
    self.down = nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1)
    self.middle = _convolution(2 * CHANNELS, 2 * CHANNELS)
    self.dropout = nn.Dropout2d(dropout)
    self.up = nn.ConvTranspose2d(2 * CHANNELS, CHANNELS, 2, stride=2)
    self.leave = nn.Conv2d(3 * CHANNELS, outputs, 1)

  def forward(self, images, times):
    high = self.enter(images) + self.time(times)[:, :, None, None]
    low = self.dropout(self.middle(self.down(high)))
    smooth = F.interpolate(low[:, :CHANNELS], scale_factor=2, mode="bilinear")
    return self.leave(torch.cat([high, self.up(low), smooth], dim=1))


class Segmentation(nn.Module):
  """U-Net that classifies each pixel."""

  def __init__(self, dropout: float):
    super().__init__()
    self.network = UNet(CLASSES, dropout)

  def forward(self, images, labels):
    logits = self.network(images, torch.zeros_like(labels[:, 0, 0]))
    return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Diffusion(nn.Module):
  """Training step of denoising diffusion.

  The noise and its scale are drawn unless they are given.
  """

  def __init__(self, dropout: float):
    super().__init__()
    self.network = UNet(3, dropout)
    kept = torch.cumprod(1 - torch.linspace(1e-2, 0.3, STEPS), 0)
    self.register_buffer("kept", kept)

  def forward(self, images, noise=None, times=None):
    if times is None:
      times = torch.randint(0, STEPS, images.shape[:1], device=images.device)
    if noise is None:
      noise = torch.randn(images.shape, device=images.device)
    kept = self.kept[times].view(-1, 1, 1, 1)
    predicted = self.network(kept.sqrt() * images + (1 - kept).sqrt() * noise, times)
    return {"loss": F.mse_loss(predicted, noise), "predicted": predicted}


class LanguageModel(nn.Module):
  """Two recurrent layers that predict the next word, with tied embeddings."""

  def __init__(self, dropout: float):
    super().__init__()
    self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
    self.lstm = nn.LSTM(HIDDEN, HIDDEN, num_layers=2, dropout=dropout, batch_first=True)
    self.dropout = nn.Dropout(dropout)
    self.head = nn.Linear(HIDDEN, VOCABULARY)
    self.head.weight = self.embedding.weight

  def forward(self, words):
    states, (hidden, cell) = self.lstm(self.dropout(self.embedding(words[:, :-1])))
    logits = self.head(self.dropout(states))
    loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
    return {"loss": loss, "logits": logits, "hidden": hidden, "cell": cell}


def images() -> torch.Tensor:
  """Return images of three channels."""
  return floats(BATCH, 3, SIDE, SIDE)


def labelled_images() -> dict[str, torch.Tensor]:
  """Return images with a class each."""
  return {"images": images(), "labels": ints(BATCH, high=CLASSES)}


def labelled_pixels() -> dict[str, torch.Tensor]:
  """Return images with a class for each pixel."""
  return {"images": images(), "labels": ints(BATCH, SIDE, SIDE, high=CLASSES)}


def noisy_images() -> dict[str, torch.Tensor]:
  """Return images with the noise and the times that are drawn otherwise."""
  return {
    "images": images(),
    "noise": floats(BATCH, 3, SIDE, SIDE, seed=1),
    "times": ints(BATCH, high=STEPS),
  }


def sentences() -> dict[str, torch.Tensor]:
  """Return word numbers."""
  return {"words": ints(BATCH, LENGTH, high=VOCABULARY)}
