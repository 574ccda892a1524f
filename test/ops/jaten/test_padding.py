"""Padding: constant, reflected, replicated, circular, and cropping."""

import pytest
import torch
import torch.nn.functional as F
from ops.harness import Case, check, floats, ints

LINE, PLANE, SPACE = floats(2, 3, 4), floats(1, 2, 3, 4), floats(1, 2, 2, 3, 4)
MODES = ("reflect", "replicate", "circular")

CASES = (
  Case(F.pad, LINE, (1, -1, 0, 3), value=2.5, grad=True),
  Case(F.pad, ints(3, 4), (-1, 2)),
  *(Case(F.pad, LINE, (1, 2), mode=m, grad=True, name=f"pad1d-{m}") for m in MODES),
  *(
    Case(F.pad, PLANE, (1, 2, 0, 1), mode=m, grad=True, name=f"pad2d-{m}")
    for m in MODES
  ),
  *(
    Case(F.pad, SPACE, (2, 1, 0, 1, 1, 1), mode=m, grad=True, name=f"pad3d-{m}")
    for m in MODES
  ),
  Case(F.pad, LINE, (-1, 2), mode="reflect", grad=True, name="pad-crops"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_padding(case):
  check(case)


def test_reflection_wider_than_the_input_raises():
  with pytest.raises(RuntimeError, match="[Pp]adding"):
    F.pad(torch.ones(1, 2, 3, device="jax"), (3, 0), mode="reflect")
