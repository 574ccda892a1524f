"""Bessel functions against CPU torch, near zero, around the bounds and far out."""

import math

import pytest
import torch
from ops.harness import Case, check, floats, ints

special = torch.special
OSCILLATING = floats(40, low=0.05, high=40.0)
DECAYING = floats(40, low=0.05, high=10.0)
SIGNED = floats(20, low=-12.0, high=12.0)
BOUNDS = torch.tensor([2.0, 7.9999, 8.0, 8.0001, 1e-6, 2.0001])
SPECIAL = torch.tensor([0.0, -1.0, math.inf, math.nan])
INTS = ints(6, low=1, high=12)
PHASE = {"rtol": 2e-5, "atol": 2e-6, "why": "sine and cosine of large f32 arguments"}

CASES = (
  *(
    Case(function, values, **PHASE)
    for function in (
      special.bessel_j0,
      special.bessel_j1,
      special.bessel_y0,
      special.bessel_y1,
    )
    for values in (OSCILLATING, BOUNDS, SPECIAL, INTS)
  ),
  *(
    Case(function, values, **PHASE)
    for function in (special.bessel_j0, special.bessel_j1, special.spherical_bessel_j0)
    for values in (SIGNED,)
  ),
  *(
    Case(function, values, **PHASE)
    for function in (
      special.modified_bessel_k0,
      special.modified_bessel_k1,
      special.scaled_modified_bessel_k0,
      special.scaled_modified_bessel_k1,
    )
    for values in (DECAYING, BOUNDS, SPECIAL[[0, 1, 3]], INTS)
  ),
  *(
    Case(function, SIGNED, grad=True, **PHASE)
    for function in (special.i0, special.i0e, special.i1, special.i1e)
  ),
  *(
    Case(function, SIGNED, **PHASE)
    for function in (special.modified_bessel_i0, special.modified_bessel_i1)
  ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_gives_what_cpu_torch_gives(case):
  check(case)
