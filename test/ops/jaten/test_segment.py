"""Segment reductions against CPU torch: values and gradients."""

import math

import pytest
import torch
from ops.harness import Case, check, floats

import torchax

ROW, ROWS, BLOCK = floats(7), floats(2, 7), floats(7, 3)
ZEROS = torch.tensor([0.0, 2.0, 3.0, 0.0, 0.0, 5.0, 7.0])
TIES = torch.tensor([1.0, 1.0, 3.0, 2.0, 2.0, 2.0, math.nan])
LENGTHS = torch.tensor([3, 0, 2, 2])
BATCH = torch.tensor([[3, 4], [7, 0]])
OFFSETS = torch.tensor([0, 3, 3, 5, 7])


def segment(data, reduce, **options):
  name = f"{reduce}-{'-'.join(options)}"
  return Case(torch.segment_reduce, data, reduce, grad=True, name=name, **options)


REDUCTIONS = ("sum", "mean", "prod", "max", "min")
CASES = (
  *(segment(ROW, reduce, lengths=LENGTHS) for reduce in REDUCTIONS),
  *(segment(BLOCK, reduce, lengths=LENGTHS, initial=0.5) for reduce in REDUCTIONS),
  *(segment(ROWS, reduce, lengths=BATCH, axis=1) for reduce in REDUCTIONS),
  segment(ROW, "sum", offsets=OFFSETS),
  segment(ZEROS, "prod", offsets=OFFSETS, initial=2),
  segment(TIES, "max", lengths=LENGTHS),
  segment(TIES, "min", lengths=LENGTHS),
  segment(ROW[:0], "sum", lengths=torch.tensor([0, 0]), unsafe=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_equal_torch_on_the_cpu(case):
  check(case)


@pytest.mark.parametrize(
  "arguments",
  [{"lengths": LENGTHS, "axis": 1}, {"lengths": BATCH}, {}],
)
def test_missing_or_invalid_segments_raise(arguments):
  with torchax.default_env(), pytest.raises((RuntimeError, IndexError)):
    moved = {
      key: value.to("jax") if isinstance(value, torch.Tensor) else value
      for key, value in arguments.items()
    }
    torch.segment_reduce(ROW.to("jax"), "sum", **moved)
