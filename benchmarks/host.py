"""Programs on CPU tensors with torchax enabled, against a process without torchax.

The two processes time the same programs in turns.
"""

import importlib
import json
import statistics
import subprocess
import sys
import timeit

import torch
from torch.distributions import Categorical

from benchmarks.timing import Row

ROUNDS = 7
SECONDS_PER_ROUND = 0.05
# Goal by program: time with torchax enabled over time without torchax.
GOALS = {
  "a + a": 1.5,
  "a[0, 0].item()": 1.5,
  "a.shape": 1.5,
  "a.to(torch.float64)": 1.5,
  "torch.tensor(0.5)": 1.5,
  "Categorical(logits=a).sample()": 1.5,
  "step()": 1.1,
}


def rows() -> list[Row]:
  """Return a row for each program on CPU tensors."""
  with _start("on") as ours, _start("off") as plain:
    rounds = [(_measure(ours), _measure(plain)) for _ in range(ROUNDS)]
    for process in (ours, plain):
      process.stdin.close()
  found = []
  for name, goal in GOALS.items():
    on, off = (
      statistics.median(times[name] for times in side) for side in zip(*rounds)
    )
    found.append(Row(f"on the CPU: {name}", "torch", on, off, goal))
  return found


def _start(word: str) -> subprocess.Popen:
  command = [sys.executable, "-m", "benchmarks.host", word]
  pipe = subprocess.PIPE
  return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def _measure(process: subprocess.Popen) -> dict[str, float]:
  process.stdin.write("\n")
  process.stdin.flush()
  return json.loads(process.stdout.readline())


def _serve(is_on: bool) -> None:
  """Time all programs once for each line of the standard input."""
  if is_on:
    importlib.import_module("torchax").enable_globally()
  torch.set_num_threads(1)
  names = {"torch": torch, "Categorical": Categorical, "a": torch.ones(4, 4)}
  names["step"] = _training_step()
  timers = {name: timeit.Timer(name, globals=names) for name in GOALS}
  calls = {
    name: max(1, int(SECONDS_PER_ROUND / timer.timeit(20) * 20))
    for name, timer in timers.items()
  }
  for _ in sys.stdin:
    times = {
      name: timer.timeit(calls[name]) / calls[name] * 1e6
      for name, timer in timers.items()
    }
    print(json.dumps(times), flush=True)


def _training_step():
  model, points = torch.nn.Linear(8, 8), torch.ones(4, 8)
  optimizer = torch.optim.Adam(model.parameters())

  def step():
    optimizer.zero_grad()
    model(points).sum().backward()
    optimizer.step()

  return step


if __name__ == "__main__":
  _serve(sys.argv[1] == "on")
