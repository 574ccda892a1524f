"""Programs of torch that are measured on jax and, in a process of their own, on CUDA.

usage: python -m benchmarks.programs ["train step"]

Measures the programs whose names begin with the given words. Prints the times on CUDA
as JSON: program -> {"eager": µs}, for training steps with the times of a CUDA graph and
of Inductor. torchax is not imported here, since torch runs no backward pass on CUDA
beside the device of another backend (https://github.com/pytorch/pytorch/issues/161129).
"""

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.transformer import LEARNING_RATE, Size

ROUNDS, CALLS = 9, 20
LARGE = Size(
  blocks=8, width=1024, heads=16, batch=16, length=1024, dtype=torch.bfloat16
)


def attention(device: str, shape: tuple, dtype, backward: bool, dropout: float):
  """Return causal attention of random inputs, with their gradients if asked.

  Args:
    device: device of the inputs.
    shape: (batch, heads, length, width) of query, key and value.
    dtype: their dtype.
    backward: compute gradients too.
    dropout: probability of dropout.
  """
  parts = [torch.randn(shape, device=device, dtype=dtype) for _ in "qkv"]
  query, key, value = (part.requires_grad_(backward) for part in parts)

  def run():
    mixed = F.scaled_dot_product_attention(
      query, key, value, is_causal=True, dropout_p=dropout
    )
    if not backward:
      return mixed
    query.grad = key.grad = value.grad = None
    mixed.sum().backward()
    return query.grad

  return run


def _of_one(function: Callable, *shape: int):
  def make(device):
    x = torch.ones(shape, device=device)
    return lambda: function(x)

  return make


def training_step(size: Size, device: str) -> Callable:
  """Return a step of SGD as people write it."""
  model = size.model().to(device)
  x, y = size.data(device)
  optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

  def step():
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss

  return step


def attention_shape(is_large: bool) -> tuple[int, ...]:
  """Return (batch, heads, length, width) of the attention that is measured."""
  return (8, 16, 2048, 64) if is_large else (1, 4, 128, 32)


def training_sizes(is_large: bool) -> tuple[Size, ...]:
  """Return the sizes of the models that are trained."""
  return (Size(), Size(width=512), LARGE) if is_large else (Size(),)


def programs(is_large: bool = True) -> dict[str, Callable]:
  """Return name -> (device -> function without arguments)."""
  count = 1 << (26 if is_large else 18)
  shape = attention_shape(is_large)
  dtype = torch.bfloat16 if is_large else torch.float32
  made = {
    "x + x, 1024×1024": _of_one(lambda x: x + x, 1024, 1024),
    "x @ x": _of_one(lambda x: x @ x, 1024, 1024),
    "softmax": _of_one(lambda x: torch.softmax(x, -1), 1024, 1024),
    "layer_norm": _of_one(lambda x: F.layer_norm(x, (1024,)), 1024, 1024),
    f"rand, {count:,} numbers": _of_one(torch.rand_like, count),
    f"randn, {count:,} numbers": _of_one(torch.randn_like, count),
    f"dropout, {count:,} numbers": _of_one(lambda x: F.dropout(x, 0.1), count),
  }
  for backward in (False, True):
    for dropout in (0.0, 0.1):
      name = "attention, forward and backward" if backward else "attention"
      made[f"{name}, dropout {dropout}"] = functools.partial(
        attention, shape=shape, dtype=dtype, backward=backward, dropout=dropout
      )
  return made | {
    f"train step, width {size.width}": functools.partial(training_step, size)
    for size in training_sizes(is_large)
  }


def _time(function: Callable) -> float:
  """Return the median time of a call on CUDA in microseconds."""
  for _ in range(3):
    function()
  torch.cuda.synchronize()
  times = []
  for _ in range(ROUNDS):
    start = time.perf_counter()
    for _ in range(CALLS):
      function()
    torch.cuda.synchronize()
    times.append((time.perf_counter() - start) / CALLS * 1e6)
  return statistics.median(times)


def _graphed(function: Callable) -> Callable:
  """Return a call that replays the function's kernels as a CUDA graph."""
  stream = torch.cuda.Stream()  # a capture needs warm-up calls on a stream of their own
  stream.wait_stream(torch.cuda.current_stream())
  with torch.cuda.stream(stream):
    for _ in range(3):
      function()
  torch.cuda.current_stream().wait_stream(stream)
  graph = torch.cuda.CUDAGraph()
  with torch.cuda.graph(graph):
    function()
  return graph.replay


def main(beginning: str = "") -> None:
  """Measure programs on CUDA, and training steps in torch's other forms too."""
  times = {}
  for name, make in programs().items():
    if not name.startswith(beginning):
      continue
    times[name] = {"eager": _time(make("cuda"))}
    if name.startswith("train step"):
      times[name]["CUDA graph"] = _time(_graphed(make("cuda")))
      torch.compiler.reset()
      times[name]["Inductor"] = _time(torch.compile(make("cuda")))
  print(json.dumps(times))


if __name__ == "__main__":
  main(*sys.argv[1:])
