"""`torch.compile(backend="jax")` of plain CPU tensors, against torch itself.

A training step is forward, backward and SGD of the transformer blocks of
`train_step.py`, in a given width. The baselines are eager torch and, if a C++ compiler
is installed, torch's own compiler, Inductor.
"""

import copy
import functools
import pathlib
import shutil
import time

import jax
import numpy as np
import torch
import torch.nn.functional as F

import torchax
from benchmarks import train_step
from benchmarks.timing import Row, compare

BLOCKS, BATCH, LENGTH = 4, 8, 64
WIDTHS = (128, 256, 512)
DEEP = 12
PARAMETERS = 1 << 24


def _model(width: int, blocks: int) -> torch.nn.Module:
  torch.manual_seed(0)
  before, train_step.WIDTH = train_step.WIDTH, width
  try:
    return torch.nn.Sequential(*[train_step.Block() for _ in range(blocks)])
  finally:
    train_step.WIDTH = before


class Sized(torch.nn.Module):
  """Blocks of `train_step.py` in a given width."""

  def __init__(self, width: int, blocks: int):
    super().__init__()
    self.blocks, self.width = _model(width, blocks), width

  def forward(self, x):
    for block in self.blocks:
      x = self._block(block, x)
    return x

  def _block(self, block, x):
    batch, length, _ = x.shape
    heads = (batch, length, 3, train_step.HEADS, self.width // train_step.HEADS)
    query, key, value = block.qkv(block.norm1(x)).view(heads).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(query, key, value)
    mixed = mixed.transpose(1, 2).reshape(batch, length, self.width)
    x = x + F.dropout(block.out(mixed), train_step.RATE)
    hidden = F.dropout(F.gelu(block.up(block.norm2(x))), train_step.RATE)
    return x + F.dropout(block.down(hidden), train_step.RATE)


def _step(model, run, width):
  optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
  x, y = torch.randn(BATCH, LENGTH, width), torch.randn(BATCH, LENGTH, width)

  def step():
    optimizer.zero_grad()
    loss = F.mse_loss(run(x), y)
    loss.backward()
    optimizer.step()
    return np.asarray(loss.detach())

  return step


def _steps(width: int, *backends: str | None, blocks: int = BLOCKS):
  """Yield a step for each backend of `torch.compile`; None for eager torch."""
  first = Sized(width, blocks)
  for backend in backends:
    model = copy.deepcopy(first)
    run = model if backend is None else torch.compile(model, backend=backend)
    yield _step(model, run, width)


def _training() -> list[Row]:
  rows = []
  for width in WIDTHS:
    goal = 1.0 if width >= 256 else None
    name = f"torch.compile step on CPU tensors, width {width}"
    rows.append(compare(name, *_steps(width, "jax", None), goal, "torch"))
    if shutil.which("g++"):
      steps = _steps(width, "jax", "inductor")
      rows.append(compare(name, *steps, None, "inductor"))
  return rows


def _first_step(width: int) -> Row:
  """Measure the first step of a deep model against that of plain JAX, same depth."""
  times = []
  for _ in range(3):
    jax.clear_caches()
    torch.compiler.reset()
    (step,) = _steps(width, "jax", blocks=DEEP)
    start = time.perf_counter()
    step()
    ours = time.perf_counter() - start
    before, train_step.BLOCKS = train_step.BLOCKS, DEEP
    try:
      _, plain, _ = train_step._steps()
      start = time.perf_counter()
      jax.block_until_ready(plain())
    finally:
      train_step.BLOCKS = before
    times.append((ours * 1e6, (time.perf_counter() - start) * 1e6))
  ours_us, plain_us = (sorted(column)[1] for column in zip(*times))
  name = f"first torch.compile step of {DEEP} blocks (trace and compile)"
  return Row(name, "plain JAX", ours_us, plain_us, 1.0)


def _peak_mib(function) -> float:
  """Return the peak growth of this process's memory during a call; Linux only."""
  status, clear = (
    pathlib.Path("/proc/self/status"),
    pathlib.Path("/proc/self/clear_refs"),
  )
  clear.write_text("5")
  start = _kib(status, "VmRSS")
  function()
  return (_kib(status, "VmHWM") - start) / 1024


def _kib(status: pathlib.Path, name: str) -> int:
  lines = status.read_text().splitlines()
  return int(next(line for line in lines if line.startswith(name)).split()[1])


def _memory() -> list[Row]:
  """Measure the memory of a call against its parameters: no call copies them."""
  if not pathlib.Path("/proc/self/clear_refs").exists():
    return []
  layer = torch.nn.Linear(1 << 12, PARAMETERS >> 12, bias=False)
  run = torch.compile(layer, backend="jax")
  call = functools.partial(run, torch.ones(1, 1 << 12))
  with torch.no_grad():
    for _ in range(3):
      call()
    grown = _peak_mib(call)
  size = PARAMETERS * 4 / 2**20
  name = f"memory of a call beside {size:.0f} MiB of parameters (MiB)"
  return [Row(name, "parameters", max(grown, 0.01), size, 0.1)]


def rows() -> list[Row]:
  """Return the rows of steps by width, of a first step and of memory."""
  with torchax.disable_temporarily():
    return [*_training(), _first_step(train_step.WIDTH), *_memory()]
