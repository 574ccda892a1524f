"""Run programs for an hour and check that the process does not keep growing.

usage: python -m tools.soak [--minutes=60] [--out=output/soak.json] [--picture=PATH]

Each round runs every workload once: training steps in every way to compile, numbers and
lengths that change with each call, errors, threads, files. Samples between rounds count
resident memory, arrays, compiled programs and Python's objects. Bounded caches fill and
are emptied, so a count rises and falls. Its peak must not rise: the peak of the second
half of the run may exceed that of the first half by at most `BOUND`.
"""

import dataclasses
import gc
import io
import json
import pathlib
import sys
import threading
import time
from collections.abc import Callable

import jax
import torch
from absl import app, flags

import torchax
from torchax.core import program_limit
from torchax.interop import jax_jit, jax_value_and_grad, scan

_MINUTES = flags.DEFINE_float("minutes", 60.0, "Minutes to run.")
_OUT = flags.DEFINE_string("out", "output/soak.json", "Path of the samples.")
_PICTURE = flags.DEFINE_string("picture", "", "Path of the curves; none by default.")

# Fraction of the run in which programs may still be compiled for the first time.
WARM_UP = 0.3
# Bound of the relative rise of a peak from the first half to the second. Half of it is
# noise, because a peak may occur between two samples. One array or object leaked in
# each round would exceed it many times over.
BOUND = 0.01
UNITS = {
  "memory": "resident memory, MB",
  "arrays": "live arrays",
  "programs": "compiled programs",
  "objects": "Python objects",
}
PAGE = "/proc/self/statm"


@dataclasses.dataclass(frozen=True)
class Sample:
  """Counts at one time.

  Attributes:
    hours: time since the start.
    memory: resident memory in MB.
    arrays: live JAX arrays.
    programs: compiled programs.
    objects: objects that Python's garbage collector tracks.
  """

  hours: float
  memory: float
  arrays: int
  programs: int
  objects: int


def sample(start: float) -> Sample:
  """Return the current counts, after a garbage collection."""
  gc.collect()
  pages = int(pathlib.Path(PAGE).read_text().split()[1])
  return Sample(
    hours=(time.monotonic() - start) / 3600,
    memory=pages * 4096 / 1e6,
    arrays=len(jax.live_arrays()),
    programs=program_limit.count(),
    objects=len(gc.get_objects()),
  )


def growth(samples: list[Sample]) -> dict[str, float]:
  """Return the relative rise of the peak of each count, after the warm-up.

  Args:
    samples: samples in order of time.

  Returns:
    (peak of the second half - peak of the first) / peak of the first, by count.

  Raises:
    ValueError: fewer than three samples are left after the warm-up.
  """
  begin = samples[0].hours + WARM_UP * (samples[-1].hours - samples[0].hours)
  steady = [s for s in samples if s.hours >= begin]
  if len(steady) < 3:
    raise ValueError(
      f"Expected at least three samples after the warm-up, but got {len(steady)}. Run "
      "for longer."
    )
  middle = (steady[0].hours + steady[-1].hours) / 2
  rises = {}
  for name in UNITS:
    earlier = max(getattr(s, name) for s in steady if s.hours <= middle)
    later = max(getattr(s, name) for s in steady if s.hours > middle)
    rises[name] = (later - earlier) / max(earlier, 1)
  return rises


def exceeded_limits(found: dict[str, float]) -> list[str]:
  """Return the counts whose peak rises by more than the bound."""
  return [name for name, rise in found.items() if rise > BOUND]


# Workloads ----------------------------------------------------------------------------


class _Model(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.table = torch.nn.Embedding(50, 32)
    self.layer = torch.nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
    self.head = torch.nn.Linear(32, 50)

  def forward(self, tokens):
    return self.head(self.layer(self.table(tokens)))


def _loss(model, tokens):
  logits = model(tokens[:, :-1]).flatten(0, 1)
  return torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def _tokens(length: int = 12):
  return torch.randint(50, (4, length), device="jax")


class Workloads:
  """Programs of a round; each is called with the number of the round."""

  def __init__(self):
    torch.manual_seed(0)
    self.model = _Model().to("jax")
    self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
    self.jitted = jax_jit(lambda tokens: _loss(self.model, tokens))
    self.compiled = torch.compile(self.model, backend="jax")

  def all(self) -> dict[str, Callable[[int], None]]:
    """Return the workloads by name."""
    return {
      name: getattr(self, name)
      for name, member in vars(type(self)).items()
      if callable(member) and not name.startswith("_") and name != "all"
    }

  def _step(self, loss) -> None:
    self.optimizer.zero_grad()
    loss.backward()
    self.optimizer.step()

  def eager_steps(self, round: int) -> None:
    self._step(_loss(self.model, _tokens()))

  def jitted_steps(self, round: int) -> None:
    self._step(self.jitted(_tokens()))

  def compiled_steps(self, round: int) -> None:
    logits = self.compiled(_tokens())
    self._step(logits.square().mean())

  def gradients_by_jax(self, round: int) -> None:
    scale = torch.ones((), device="jax")
    jax_value_and_grad(lambda s: _loss(self.model, _tokens()) * s)(scale)

  def loops(self, round: int) -> None:
    rows = torch.ones(5, 8, device="jax")
    scan(lambda carry, row: (carry + row.sum(), carry * row), rows[0, 0], rows)

  def changing_numbers(self, round: int) -> None:
    x = torch.ones(8, 8, device="jax")
    torch.randint(round, round + 10, (8,), device="jax")
    x.clone().random_(0, round + 1)
    (x ** (1 + round / 7)).sum()
    torch.nn.functional.dropout(x, 0.1 + (round % 80) / 100)
    torch.nn.functional.layer_norm(x, (8,), eps=1e-5 * (1 + round % 1000))
    x.add_(x, alpha=round / 3)
    torch.arange(round, round + 8, device="jax")
    x.roll(round % 8, 0)

  def changing_lengths(self, round: int) -> None:
    with torch.no_grad():
      self.model(_tokens(2 + round * 7 % 24))

  def errors(self, round: int) -> None:
    x = torch.ones(3, 4, device="jax")
    for wrong in (lambda: x @ x, lambda: x.view(5), lambda: self.jitted(x)):
      try:
        wrong()
      except (RuntimeError, TypeError, ValueError, IndexError):
        continue
      raise AssertionError("Expected an error, but there was none.")

  def threads(self, round: int) -> None:
    def draw():
      torch.nn.functional.dropout(torch.ones(16, 16, device="jax"), 0.5).sum().item()

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()

  def files(self, round: int) -> None:
    file = io.BytesIO()
    torch.save(self.model.state_dict(), file)
    file.seek(0)
    self.model.load_state_dict(torch.load(file))

  def views_and_writes(self, round: int) -> None:
    x = torch.zeros(16, 16, device="jax")
    x[round % 16] = 1.0
    x.t()[2:5].mul_(2)
    x[x > 0.5].sum().item()

  def functions_made_anew(self, round: int) -> None:
    x = torch.ones(4, device="jax")
    jax_jit(lambda x: x * 2)(x)


def run(minutes: float, workloads: dict[str, Callable]) -> list[Sample]:
  """Run the workloads repeatedly; take a sample at most every ten seconds.

  Args:
    minutes: duration, from the first sample to the last one.
    workloads: name -> workload; see `Workloads`.
  """
  start = time.monotonic()
  period = min(10.0, minutes * 60 / 20)
  samples, round = [sample(start)], 0
  end = time.monotonic() + minutes * 60
  while time.monotonic() < end:
    for workload in workloads.values():
      workload(round)
    round += 1
    if time.monotonic() - start - samples[-1].hours * 3600 >= period:
      samples.append(sample(start))
  samples.append(sample(start))
  return samples


def picture(samples: list[Sample], path: pathlib.Path) -> None:
  """Save a picture of the curves; needs the extra `plot`."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(2, 2, figsize=(9, 5.5), layout="constrained")
  minutes = [s.hours * 60 for s in samples]
  for axis, (name, label) in zip(axes.flat, UNITS.items()):
    axis.plot(minutes, [getattr(s, name) for s in samples])
    axis.axvspan(0, WARM_UP * minutes[-1], alpha=0.15, linewidth=0)
    axis.set(title=label, xlabel="minutes", ylim=(0, None))
  figure.savefig(path)
  pyplot.close(figure)


def main(_) -> None:
  """Entry point of `absl.app.run`."""
  torchax.enable_globally()
  samples = run(_MINUTES.value, Workloads().all())
  found = growth(samples)
  path = pathlib.Path(_OUT.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  rows = [dataclasses.asdict(s) for s in samples]
  path.write_text(json.dumps({"growth": found, "samples": rows}, indent=2) + "\n")
  if _PICTURE.value:
    picture(samples, pathlib.Path(_PICTURE.value))
  for name, rise in found.items():
    print(f"{UNITS[name]:<24} peak {rise:+.2%}, bound {BOUND:+.0%}")
  if exceeded_limits(found):
    sys.exit("grows without end: " + ", ".join(exceeded_limits(found)))


if __name__ == "__main__":
  app.run(main)
