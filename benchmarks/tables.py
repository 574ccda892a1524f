"""Tables of rows in Markdown."""

import jax
import torch

import torchax
from benchmarks.timing import Row


def table(rows: list[Row]) -> str:
  """Return the rows in Markdown, below a line with the devices and versions."""
  device = jax.devices()[0]
  lines = [
    f"{len(jax.devices())} × {device.device_kind} ({device.platform}), "
    f"torch {torch.__version__}, JAX {jax.__version__}, torchax {torchax.VERSION}",
    "",
    "| case | torchax, µs | baseline | µs | ratio |",
    "|---|---|---|---|---|",
  ]
  lines += [
    f"| {row.name} | {row.ours_us:,.1f} | {row.baseline} | {row.baseline_us:,.1f} "
    f"| {row.ratio:.2f} |"
    for row in rows
  ]
  return "\n".join(lines) + "\n"
