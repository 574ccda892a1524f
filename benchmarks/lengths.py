"""Programs whose sizes change with every call, against torch on the CPU.

One is greedy generation with a tiny GPT-2, whose keys and values grow by one with each
token. The other is a training loop over a hundred lengths, eagerly, and compiled with
buckets. Times include compilation, except those of a second loop.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import torchax
from benchmarks.timing import Row, measure
from torchax.interop import jax_jit

WORDS, WIDTH, HEADS, LAYERS, MOST = 256, 64, 4, 2, 128
PROMPT, TOKENS, LENGTHS = 8, 64, 100
FIRST_SECONDS = 3.0


class Block(torch.nn.Module):
  """Block of GPT-2 that returns its keys and values for the next call."""

  def __init__(self):
    super().__init__()
    self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
    self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
    self.out = torch.nn.Linear(WIDTH, WIDTH)
    self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
    self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

  def forward(self, x, past=None):
    batch, length, _ = x.shape
    parts = self.qkv(self.norm1(x)).split(WIDTH, -1)
    query, key, value = (
      part.view(batch, length, HEADS, -1).transpose(1, 2) for part in parts
    )
    if past is not None:
      key, value = torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=past is None)
    x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
    hidden = F.gelu(self.up(self.norm2(x)), approximate="tanh")
    return x + self.down(hidden), (key, value)


class TinyGPT2(torch.nn.Module):
  """Two blocks with learned positions and a head tied to the embedding."""

  def __init__(self):
    super().__init__()
    self.words = torch.nn.Embedding(WORDS, WIDTH)
    self.positions = torch.nn.Embedding(MOST, WIDTH)
    self.blocks = torch.nn.ModuleList([Block() for _ in range(LAYERS)])
    self.norm = torch.nn.LayerNorm(WIDTH)

  def forward(self, tokens, past=None):
    start = 0 if past is None else past[0][0].shape[2]
    positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
    x = self.words(tokens) + self.positions(positions)
    kept = []
    for number, block in enumerate(self.blocks):
      x, pair = block(x, None if past is None else past[number])
      kept.append(pair)
    return self.norm(x) @ self.words.weight.T, kept

  @torch.no_grad()
  def generate(self, tokens):
    """Append `TOKENS` tokens, each the most likely one."""
    new, past = tokens, None
    for _ in range(TOKENS):
      logits, past = self(new, past)
      new = logits[:, -1:].argmax(-1)
      tokens = torch.cat((tokens, new), 1)
    return tokens


def _seconds(function: Callable) -> float:
  start = time.perf_counter()
  function()  # waits for its result
  return time.perf_counter() - start


def _generation() -> list[Row]:
  torch.manual_seed(0)
  plain = TinyGPT2().eval()
  ours = TinyGPT2().eval()
  ours.load_state_dict(plain.state_dict())
  ours.to("jax")
  prompt = torch.randint(WORDS, (1, PROMPT))
  on_jax = prompt.to("jax")
  torchax.clear_caches()
  first = _seconds(lambda: ours.generate(on_jax).cpu())
  if not torch.equal(ours.generate(on_jax).cpu(), plain.generate(prompt)):
    raise RuntimeError("The tokens differ from torch's: the rows would say nothing.")
  later = measure(lambda: ours.generate(on_jax).cpu())
  name = f"eager generate, {TOKENS} tokens, tiny GPT-2"
  return [
    Row(f"{name}, first call", "3 s", first * 1e6, FIRST_SECONDS * 1e6, 1.0),
    Row(name, "torch", later, measure(lambda: plain.generate(prompt)), 2.0),
  ]


def _loop(device: str, buckets: dict | None = None) -> Callable:
  torch.manual_seed(0)
  layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
  layer.to(device)
  optimizer = torch.optim.SGD(layer.parameters(), 0.01)

  def step(x):
    loss = layer(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()

  step = step if buckets is None else jax_jit(step, buckets=buckets)

  def run():
    for length in range(PROMPT, PROMPT + LENGTHS):
      loss = step(torch.ones(4, length, WIDTH).to(device))
    return loss.item()

  return run


def _training() -> list[Row]:
  torchax.clear_caches()
  name = f"training loop over {LENGTHS} lengths, one layer"
  plain = _loop("cpu")
  ours, theirs = _seconds(_loop("jax")) * 1e6, _seconds(plain) * 1e6
  torchax.clear_caches()
  padded = _loop("jax", {"x": {1: "pow2"}})
  first = _seconds(padded) * 1e6
  return [
    Row(f"eager {name}", "torch", ours, theirs, 5.0),
    Row(f"{name}, jax_jit with buckets, first loop", "torch", first, theirs, 5.0),
    Row(
      f"{name}, later loops",
      "torch",
      _seconds(padded) * 1e6,
      _seconds(plain) * 1e6,
      5.0,
    ),
  ]


def rows() -> list[Row]:
  """Return the rows of generation and training."""
  return [*_generation(), *_training()]
