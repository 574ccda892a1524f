"""Run all benchmarks, print ratios and goals, and write them as JSON.

usage: python -m benchmarks.run [--out=output/benchmarks.json] [--only=eager,operators]
"""

import dataclasses
import datetime
import json
import os
import pathlib
import platform

import jax
import torch
from absl import app, flags

import torchax
from benchmarks import (
  calls,
  compiled,
  compiling,
  depth,
  eager,
  eager_modes,
  first_step,
  host,
  lengths,
  operators,
  sharding,
  train_step,
)
from benchmarks.timing import Row

_OUT = flags.DEFINE_string("out", "output/benchmarks.json", "Path of the JSON.")
_ONLY = flags.DEFINE_list(
  "only",
  [],
  "Groups to run: eager, eager_modes, host, operators, calls, train_step, first_step, "
  "compiled, compiling, lengths, sharding, depth.",
)
_GROUPS = {
  "eager": eager,
  "eager_modes": eager_modes,
  "host": host,
  "operators": operators,
  "calls": calls,
  "train_step": train_step,
  "first_step": first_step,
  "compiled": compiled,
  "compiling": compiling,
  "lengths": lengths,
  "sharding": sharding,
  "depth": depth,
}


def _line(row: Row) -> str:
  goal = "–" if row.goal is None else f"≤ {row.goal:.3g}"
  mark = "ok" if row.reached else "MISSED"
  return (
    f"{row.name:<52} {row.ours_us:>12.1f} {row.baseline_us:>12.1f} {row.baseline:<10}"
    f" {row.ratio:>6.2f} {goal:>7}  {mark}"
  )


def _environment() -> dict:
  return {
    "torchax": torchax.VERSION,
    "jax": jax.__version__,
    "torch": torch.__version__,
    "python": platform.python_version(),
    "date": datetime.date.today().isoformat(),
    "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
    "devices": [str(device) for device in jax.devices()],
  }


def main(_) -> None:
  """Entry point of `absl.app.run`."""
  torchax.enable_globally()
  print(f"{'case':<52} {'ours, us':>12} {'base, us':>12} {'base':<10}  ratio    goal")
  rows: list[tuple[str, Row]] = []
  for name in _ONLY.value or _GROUPS:
    for row in _GROUPS[name].rows():
      print(_line(row), flush=True)
      rows.append((name, row))
  missed = [row.name for _, row in rows if not row.reached]
  print(f"{len(rows) - len(missed)} of {len(rows)} goals reached")
  path = pathlib.Path(_OUT.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  records = [
    {"group": group, **dataclasses.asdict(row), "ratio": row.ratio}
    for group, row in rows
  ]
  report = {"environment": _environment(), "rows": records}
  path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
  print(f"written to {path}")


if __name__ == "__main__":
  app.run(main)
