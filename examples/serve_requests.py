"""Serve concurrent requests, each with a random stream of its own.

A request names a seed. Its answer depends on that seed alone, not on concurrent
requests or their order. The model writes one character at a time and is compiled once
for all requests. Between two characters other requests run, as between two tokens of a
language model.

Prints three answers and the time for all requests. Then answers some requests alone,
compares the answers, and fails if they differ.

usage: python examples/serve_requests.py [--requests=200] [--length=24] [--checked=20]
"""

import asyncio
import string
import sys
import time

import torch
from absl import app, flags
from torch import nn

import torchax
from torchax.interop import jax_jit

_REQUESTS = flags.DEFINE_integer("requests", 200, "Concurrent requests.", 1)
_LENGTH = flags.DEFINE_integer("length", 24, "Characters in an answer.", 1)
_CHECKED = flags.DEFINE_integer("checked", 20, "Requests to repeat alone.", 1)

CHARACTERS = string.ascii_lowercase + " .,"
TEMPERATURE = 0.8


class Writer(nn.Module):
  """Recurrent network that writes characters; with random weights, they are noise."""

  def __init__(self, width=64):
    super().__init__()
    self.embed = nn.Embedding(len(CHARACTERS), width)
    self.cell = nn.GRUCell(width, width)
    self.dropout = nn.Dropout(0.1)
    self.head = nn.Linear(width, len(CHARACTERS))

  def forward(self, character, memory):
    """Draw the next character; return it and the new memory.

    Args:
      character: int64 (1,), an index into `CHARACTERS`.
      memory: float32 (1, width).
    """
    memory = self.cell(self.dropout(self.embed(character)), memory)
    probabilities = torch.softmax(self.head(memory) / TEMPERATURE, -1)
    return torch.multinomial(probabilities, 1)[:, 0], memory


async def answer(env, write, seed: int, length: int) -> str:
  """Answer one request, with draws from a scope of its seed."""
  character = torch.zeros(1, dtype=torch.int64, device="jax")
  memory = torch.zeros(1, 64, device="jax")
  written = []
  with env.rng_scope(seed):
    for _ in range(length):
      character, memory = write(character, memory)
      written.append(CHARACTERS[character.item()])
      # Other requests run here; the scope stays active in this task only.
      await asyncio.sleep(0)
  return "".join(written)


async def answer_all(env, write, seeds, length: int) -> list[str]:
  """Answer all requests concurrently."""
  return await asyncio.gather(*[answer(env, write, seed, length) for seed in seeds])


def main(_) -> None:
  """Entry point of `absl.app.run`."""
  env = torchax.default_env()
  torch.manual_seed(0)
  write = jax_jit(Writer().to("jax"))
  seeds, length = range(_REQUESTS.value), _LENGTH.value
  asyncio.run(answer_all(env, write, seeds[:1], length))  # compiles
  start = time.perf_counter()
  answers = asyncio.run(answer_all(env, write, seeds, length))
  seconds = time.perf_counter() - start
  for seed in seeds[:3]:
    print(f"request with seed {seed}: {answers[seed]!r}")
  print(f"{len(answers)} requests at once in {seconds:.2f} s")
  checked = seeds[:: max(1, len(seeds) // _CHECKED.value)]
  alone = [asyncio.run(answer(env, write, seed, length)) for seed in checked]
  is_equal = alone == [answers[seed] for seed in checked]
  print(f"{len(checked)} repeated alone: equal answers: {is_equal}")
  if not is_equal:
    sys.exit("a request has drawn from the stream of another one")


if __name__ == "__main__":
  app.run(main)
