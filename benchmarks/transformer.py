"""Transformer that several benchmarks train, in plain torch."""

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F

RATE, LEARNING_RATE = 0.1, 0.01


@dataclasses.dataclass(frozen=True)
class Size:
  """Shape of the model and of its input.

  Attributes:
    blocks, width, heads: shape of the model.
    batch, length: the input is (batch, length, width).
    dtype: dtype of parameters and input.
  """

  blocks: int = 4
  width: int = 128
  heads: int = 4
  batch: int = 16
  length: int = 64
  dtype: torch.dtype = torch.float32

  def model(self) -> torch.nn.Module:
    """Return new blocks on the CPU, with the weights of seed 0."""
    torch.manual_seed(0)
    blocks = [Block(self.width, self.heads) for _ in range(self.blocks)]
    return torch.nn.Sequential(*blocks).to(self.dtype)

  def data(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an input and a target."""
    shape = (self.batch, self.length, self.width)
    x, y = (torch.randn(shape, device=device, dtype=self.dtype) for _ in "xy")
    return x, y


def training_step(size: Size) -> Callable[[], torch.Tensor]:
  """Return a step on jax as users write it; its result is the loss."""
  model = size.model().to("jax")
  optimizer = torch.optim.AdamW(model.parameters())
  x, y = size.data("jax")

  def step():
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()

  return step


class Block(torch.nn.Module):
  """Pre-norm transformer block with three dropouts."""

  def __init__(self, width: int, heads: int):
    super().__init__()
    self.heads = heads
    self.norm1 = torch.nn.LayerNorm(width)
    self.qkv = torch.nn.Linear(width, 3 * width)
    self.out = torch.nn.Linear(width, width)
    self.norm2 = torch.nn.LayerNorm(width)
    self.up = torch.nn.Linear(width, 4 * width)
    self.down = torch.nn.Linear(4 * width, width)

  def forward(self, x):
    batch, length, width = x.shape
    heads = (batch, length, 3, self.heads, width // self.heads)
    query, key, value = self.qkv(self.norm1(x)).view(heads).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(query, key, value)
    mixed = mixed.transpose(1, 2).reshape(batch, length, width)
    x = x + F.dropout(self.out(mixed), RATE)
    hidden = F.dropout(F.gelu(self.up(self.norm2(x))), RATE)
    return x + F.dropout(self.down(hidden), RATE)
