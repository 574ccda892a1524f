"""Eager loops in the fused mode, beside compiled and strict ones and CPU torch."""

import random
from collections.abc import Callable

import jax.numpy as jnp
import torch
import transformers

import torchax
from benchmarks.timing import Row, compare
from benchmarks.transformer import Size, training_step
from torchax.interop import jax_jit

SMALL, WIDE = Size(), Size(width=512)
OPERATIONS = 200


def _reading(step: Callable, mode: str) -> Callable:
  """Return a call of a step in a mode that reads its result."""

  def call():
    with torchax.eager_mode(mode):
      return step().item()

  return call


def _small_step(device: str) -> Callable:
  """Return forward and backward pass of a small network, with one gradient read."""
  layers = torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.1)
  model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 64)).to(device)
  x = torch.randn(8, 64).to(device)

  def step():
    model.zero_grad()
    model(x).square().mean().backward()
    return model[0].bias.grad[0]

  return step


def _random_operations() -> Callable:
  """Return a call that runs operations in an order that never repeats."""
  choices = random.Random(0)
  start = torch.ones(8, 8, device="jax")

  def run():
    x = y = start
    for choice in choices.choices(range(4), k=OPERATIONS):
      if choice < 2:
        x, y = (x * y, y) if choice else (x, x + y)
      else:
        x, y = (y.tanh(), y) if choice == 2 else (x, x.sigmoid())
    return x.sum()

  return run


def _generation(device: str) -> Callable:
  """Return a call of `generate` of a tiny GPT-2 for 24 tokens."""
  options = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64}
  ends = {"bos_token_id": None, "eos_token_id": None}
  torch.manual_seed(0)
  config = transformers.GPT2Config(n_positions=64, **options, **ends)
  model = transformers.GPT2LMHeadModel(config).eval().to(device)
  prompt = torch.arange(4)[None].to(device)
  mask = torch.ones_like(prompt)

  def run():
    with torch.no_grad():
      tokens = model.generate(
        prompt,
        attention_mask=mask,
        max_new_tokens=24,
        do_sample=False,
        pad_token_id=0,
      )
    return tokens[0, -1]

  return run


def rows() -> list[Row]:
  """Return a row for each loop."""
  found = []
  for size, goal in ((SMALL, 1.35), (WIDE, 1.15)):
    jitted = _reading(jax_jit(training_step(size)), "strict")
    name = f"training loop, 4 blocks, width {size.width}"
    for mode, own_goal in (("fused", goal), ("strict", None)):
      step = _reading(training_step(size), mode)
      found.append(compare(f"{name}, {mode}", step, jitted, own_goal, "jax_jit"))
  array = jnp.ones((8, 64))
  small = "Linear, GELU, Dropout, Linear with gradients"
  for mode in ("fused", "strict"):
    ours = _reading(_small_step("jax"), mode)
    add, plain = (lambda: jnp.add(array, array)), _reading(_small_step("cpu"), "strict")
    goals = (40, 1) if mode == "fused" else (None, None)
    found.append(compare(f"{small}, {mode}", ours, add, goals[0], "jnp.add"))
    found.append(compare(f"{small}, {mode}", ours, plain, goals[1], "CPU torch"))
  run = _random_operations()
  fused, strict = _reading(run, "fused"), _reading(run, "strict")
  name = f"{OPERATIONS} operations in random order, fused"
  found.append(compare(name, fused, strict, 1.05, "strict"))
  for mode, goal in (("fused", 1.5), ("strict", None)):
    ours, plain = _generation("jax"), _reading(_generation("cpu"), "strict")
    name = f"generate, tiny GPT-2, 24 tokens, {mode}"
    found.append(compare(name, _reading(ours, mode), plain, goal, "CPU torch"))
  return found
