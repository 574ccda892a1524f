"""`torch.compile(backend="jax")` of plain CPU tensors, against torch itself.

A training step is forward, backward and SGD of the transformer blocks of
`transformer.py`, in a given width. The baselines are eager torch and, if a C++ compiler
is installed, torch's own compiler, Inductor.
"""

import copy
import dataclasses
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
from benchmarks.transformer import Size

SIZE = Size(batch=8)
WIDTHS = (128, 256, 512)
DEEP = 12
PARAMETERS = 1 << 24


def _step(model, run, size):
  optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
  x, y = size.data("cpu")

  def step():
    optimizer.zero_grad()
    loss = F.mse_loss(run(x), y)
    loss.backward()
    optimizer.step()
    return np.asarray(loss.detach())

  return step


def _steps(size: Size, *backends: str | None):
  """Yield a step for each backend of `torch.compile`; None for eager torch."""
  first = size.model()
  for backend in backends:
    model = copy.deepcopy(first)
    run = model if backend is None else torch.compile(model, backend=backend)
    yield _step(model, run, size)


def _training() -> list[Row]:
  rows = []
  for width in WIDTHS:
    goal = 1.0 if width >= 256 else None
    size = dataclasses.replace(SIZE, width=width)
    name = f"torch.compile step on CPU tensors, width {width}"
    rows.append(compare(name, *_steps(size, "jax", None), goal, "torch"))
    if shutil.which("g++"):
      steps = _steps(size, "jax", "inductor")
      rows.append(compare(name, *steps, None, "inductor"))
  return rows


def _first_step() -> Row:
  """Measure the first step of a deep model against that of plain JAX, same depth."""
  times = []
  for _ in range(3):
    jax.clear_caches()
    torch.compiler.reset()
    (step,) = _steps(dataclasses.replace(SIZE, blocks=DEEP), "jax")
    start = time.perf_counter()
    step()
    ours = time.perf_counter() - start
    _, plain = train_step.steps(Size(blocks=DEEP))
    start = time.perf_counter()
    jax.block_until_ready(plain())
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
  name = f"memory of a `torch.compile` call, {size:.0f} MiB of parameters"
  return [Row(name, "parameters", max(grown, 0.01), size, 0.1, unit="MiB")]


def rows() -> list[Row]:
  """Return the rows of steps by width, of a first step and of memory."""
  with torchax.disable_temporarily():
    return [*_training(), _first_step(), *_memory()]
