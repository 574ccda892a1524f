"""Comparison of a program's run with the reference."""

import dataclasses
import enum

import torch

from tools.fuzz.program import Program
from tools.fuzz.ways import Outcome, run

RTOL, ATOL = 1e-4, 1e-5
RTOL_OF_HALVES = 2e-2


class Verdict(enum.Enum):
  """Result of a comparison."""

  AGREES = "agrees"
  REFUSED = "refused with a remedy"
  TORCH_DIFFERS = "torch differs from itself"
  INVALID = "torch refuses"
  DIFFERS = "differs"


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Verdict on a program run one way, and its first difference."""

  way: str
  verdict: Verdict
  detail: str = ""
  is_error: bool = False


def compare(program: Program, ways, outcomes: dict | None = None) -> list[Comparison]:
  """Compare ways of running a program with CPU torch, or with eager runs if it draws.

  Args:
    program: program to run.
    ways: names of ways.
    outcomes: dict that receives the outcome of each way.
  """
  outcomes = {} if outcomes is None else outcomes
  reference = outcomes["cpu"] = run(program, "cpu")
  if reference.error is not None:
    return [Comparison("cpu", Verdict.INVALID, _described(reference))]
  if program.draws:
    reference = outcomes["eager"] = run(program, "eager")
    if reference.error is not None:
      return [_of_error("eager", reference)]
  found = []
  for way in ways:
    if program.draws and way == "eager":
      continue
    outcome = outcomes[way] = run(program, way)
    found.append(_judged(program, way, reference, outcome))
  return found


def _judged(program, way: str, reference: Outcome, outcome: Outcome) -> Comparison:
  if outcome.error is not None:
    comparison = _of_error(way, outcome)
  else:
    detail = difference(reference, outcome, way)
    verdict = Verdict.DIFFERS if detail else Verdict.AGREES
    comparison = Comparison(way, verdict, detail)
  if comparison.verdict is Verdict.DIFFERS and way.startswith("compile"):
    theirs = run(program, "aot_eager")
    expected = run(program, "cpu")
    if theirs.error is not None or difference(expected, theirs, "aot_eager"):
      return dataclasses.replace(comparison, verdict=Verdict.TORCH_DIFFERS)
  return comparison


def _of_error(way: str, outcome: Outcome) -> Comparison:
  verdict = Verdict.REFUSED if outcome.is_refusal else Verdict.DIFFERS
  return Comparison(way, verdict, _described(outcome), is_error=True)


def _described(outcome: Outcome) -> str:
  error = outcome.error
  return f"{outcome.stage} raised {type(error).__name__}: {str(error)[:300]}"


def difference(reference: Outcome, outcome: Outcome, way: str) -> str:
  """Describe the first difference of two outcomes; return "" if there is none."""
  for name, expected in reference.values.items():
    if name == "next draw" and name not in outcome.values:
      continue
    if name not in outcome.values:
      return f"there is no {name}"
    found = outcome.values[name]
    if expected is None and way != "eager":
      continue  # torch refuses the write; results of compiled calls do not overlap
    if name.startswith("sees writes to") and way == "jit":  # results are copies
      if "result" in name:
        continue
      expected, found = map(_of_inputs, (expected, found))
    if text := _differs(expected, found):
      return f"{name}: {text}"
  extra = [name for name in outcome.values if name not in reference.values]
  return f"there is a {extra[0]}" if extra else ""


def _of_inputs(names: frozenset | None) -> frozenset:
  return frozenset(name for name in names or () if name.startswith("input"))


def _differs(expected, found) -> str:
  if not isinstance(expected, torch.Tensor):
    return (
      "" if expected == found else f"expected {_told(expected)}, got {_told(found)}"
    )
  if expected.dtype != found.dtype or expected.shape != found.shape:
    return (
      f"expected {expected.dtype} of {list(expected.shape)}, got {found.dtype} of "
      f"{list(found.shape)}"
    )
  if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
    is_close = torch.equal(expected, found)
  else:
    rtol = RTOL_OF_HALVES if expected.dtype.itemsize == 2 else RTOL
    scale = expected.abs().nan_to_num().max() if expected.numel() else 0
    atol = ATOL + rtol * float(scale) / 10
    is_close = torch.allclose(expected, found, rtol, atol, equal_nan=True)
  return "" if is_close else f"expected {expected.tolist()}, got {found.tolist()}"


def _told(value):
  return sorted(value) if isinstance(value, frozenset) else value
