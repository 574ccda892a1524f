"""Run one program on the CPU and on jax, twice each, and print the values and times.

usage: python -m ecosystem.programs.run NAME
"""

import json
import sys
import time

import torch
from ecosystem.programs import load

import torchax


def _plain(value):
  """Convert a value for JSON; tensors become nested lists."""
  if isinstance(value, torch.Tensor):
    return value.detach().cpu().double().tolist()
  return value


def _timed(run, device: str):
  torch.manual_seed(0)
  start = time.perf_counter()
  values = {name: _plain(value) for name, value in run(device).items()}
  return values, time.perf_counter() - start


def main(name: str) -> None:
  """Run the program named on the command line."""
  run = load()[name].run
  report = {}
  for device in ("cpu", "jax"):
    if device == "jax":
      torchax.enable_globally()
    (values, first), (_, later) = _timed(run, device), _timed(run, device)
    report[device] = {"values": values, "first": first, "later": later}
  json.dump(report, sys.stdout)


if __name__ == "__main__":
  main(sys.argv[1])
