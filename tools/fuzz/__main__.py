"""Run random programs and print the first differences, shrunk."""

import collections
import time

import jax
from absl import app, flags

from tools.fuzz import ways
from tools.fuzz.comparing import Comparison, Verdict, compare
from tools.fuzz.generator import generate
from tools.fuzz.program import Program
from tools.fuzz.shrinking import shrink

_SEED = flags.DEFINE_integer("seed", 0, "Seed of the first program.")
_COUNT = flags.DEFINE_integer("count", 1000, "Number of programs.")
_WAYS = flags.DEFINE_list(
  "ways",
  ["eager", "fused", "jit", "compile", "compile_on_jax"],
  "Ways to run each program.",
)
_MOST = flags.DEFINE_integer("most", 1, "Differences after which to stop.")
_SECONDS = flags.DEFINE_float("seconds", float("inf"), "Time after which to stop.")


def shrunk(program: Program, found: Comparison) -> Program:
  """Return the fewest lines that still differ in the same way of running."""

  def fails(candidate: Program) -> bool:
    return any(
      one.verdict is found.verdict and one.is_error == found.is_error
      for one in compare(candidate, [found.way])
    )

  return shrink(program, fails)


def main(argv) -> int:
  del argv
  ways.enable()
  counts: collections.Counter = collections.Counter()
  failed, end = 0, time.monotonic() + _SECONDS.value
  for seed in range(_SEED.value, _SEED.value + _COUNT.value):
    if time.monotonic() > end:
      break
    if seed % 200 == 0:
      jax.clear_caches()  # else memory grows by some 10 MB each program
    program = generate(seed)
    for found in compare(program, _WAYS.value):
      counts[found.way, found.verdict.value] += 1
      if found.verdict is Verdict.DIFFERS:
        report(seed, shrunk(program, found), found)
        failed += 1
    if failed >= _MOST.value:
      break
  for (way, verdict), count in sorted(counts.items()):
    print(f"{way:16} {verdict:28} {count:6}")
  return int(failed > 0)


def report(seed: int, program: Program, found: Comparison) -> None:
  """Print a program that differs."""
  again = [one for one in compare(program, [found.way]) if one.detail] or [found]
  print(f"# Seed {seed}, {found.way}: {again[0].detail}")
  way = ways.WAYS[found.way]
  print(program.script(way.source, way.device), flush=True)


if __name__ == "__main__":
  app.run(main)
