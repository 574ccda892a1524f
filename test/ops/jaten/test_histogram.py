"""Histograms and counts against CPU torch."""

import pytest
import torch
from ops.harness import Case, check, floats, ints

import torchax
from torchax.interop import jax_jit

X = floats(3, 6)
INTS = ints(3, 4)
POINTS = floats(4, 5, 2)
EDGES = torch.tensor([-0.8, -0.1, 0.0, 0.5])
WEIGHTS = floats(4, 5, seed=1, low=0.0)
DATA_WHY = "the length of the result depends on data"


def histogram(values, *bins, **options):
  return Case(torch.histogram, values, *bins, name="histogram", **options)


def histogramdd(values, bins, **options):
  def call(values, bins, weight=None, **options):
    # A tuple of results, as torch's own type has no tree.
    counts, edges = torch.histogramdd(values, bins, weight=weight, **options)
    return counts, tuple(edges)

  return Case(call, values, bins, name="histogramdd", **options)


CASES = (
  histogram(X, 5),
  histogram(X, 4, range=(-0.5, 0.5)),
  histogram(X, 4, range=(-0.5, 0.5), weight=X * X, density=True),
  histogram(torch.ones(3), 3),
  histogram(torch.empty(0), 3),
  histogram(X, EDGES),
  histogram(X, EDGES, density=True),
  histogram(torch.tensor([0.5, -0.8, 0.6, 0.0]), EDGES),
  histogramdd(POINTS, [3, 4]),
  histogramdd(POINTS, [3, 4], range=[-0.5, 0.5, 0.0, 1.0], weight=WEIGHTS),
  histogramdd(POINTS, [EDGES, EDGES[1:]], density=True),
  Case(torch.histc, X, 5),
  Case(torch.histc, X, bins=4, min=-0.5, max=0.5),
  Case(torch.histc, torch.tensor([1.0, 1.0]), 3),
  Case(torch.bincount, INTS.flatten() + 3, jit=False, why=DATA_WHY),
  Case(torch.bincount, INTS[0] + 3, X[0, :4], jit=False, why=DATA_WHY),
  Case(torch.bincount, INTS[0] + 3, INTS[0], 12, jit=False, why=DATA_WHY),
)
ERRORS = (
  (torch.histogram, (X, 0), {}),
  (torch.histogram, (X, 3), {"range": (1.0, 0.0)}),
  (torch.histogram, (torch.tensor([1.0, float("inf")]), 3), {}),
  (torch.histogram, (X, EDGES.double()), {}),
  (torch.histogramdd, (POINTS, [3]), {}),
  (torch.histc, (X, 3, 2, 1), {}),
  (torch.bincount, (INTS[0] - 9,), {}),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_counts_equal_cpu_torch(case):
  check(case)


@pytest.mark.parametrize("function, args, kwargs", ERRORS)
def test_errors_equal_cpu_torch(function, args, kwargs):
  with pytest.raises(RuntimeError):
    function(*args, **kwargs)
  moved = [
    a.to("jax", torch.float16 if a.dtype == torch.float64 else a.dtype)
    if isinstance(a, torch.Tensor)
    else a
    for a in args
  ]
  with torchax.default_env(), pytest.raises(RuntimeError):
    function(*moved, **kwargs)


def test_out_receives_the_results():
  with torchax.default_env():
    given = (torch.empty(0, device="jax"), torch.empty(0, device="jax"))
    returned = torch.histogram(X.to("jax"), 4, out=given)
  for have, out, want in zip(returned, given, torch.histogram(X, 4)):
    assert have is out
    torch.testing.assert_close(out.cpu(), want)


def test_known_numbers_are_counted_inside_a_trace():
  numbers = INTS[0] + 3

  def count(x):
    return x * torch.bincount(numbers.to(x.device))

  expected = torch.bincount(numbers).float()
  torch.testing.assert_close(
    jax_jit(count)(torch.ones(1, device="jax")).cpu(), expected
  )
