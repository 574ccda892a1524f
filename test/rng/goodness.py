"""Goodness of fit: how the statistical tests decide, and over how many seeds.

A row draws `N` numbers from each of `SEEDS` seeds. For every seed a Kolmogorov-Smirnov
test (continuous) or a chi-square test (discrete) gives a p-value; none may be below
1e-3 divided by the number of tests, and those of a row must look uniform themselves.
One seed would be no evidence. Seeds are fixed, so a row either always passes or never.

`make test-statistics` sets TORCHAX_SEEDS_FACTOR, which multiplies the number of seeds.
"""

import os
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

FACTOR = int(os.environ.get("TORCHAX_SEEDS_FACTOR", "1"))
SEEDS = 20 * FACTOR
N = 10_000
SIGMAS = 5
# Of a whole file: how often a true null hypothesis may be rejected.
FALSE_ALARMS = 1e-3


class Cdf:
  """A continuous law that scipy does not have, by its distribution function."""

  def __init__(self, cdf: Callable):
    self.cdf = cdf


def least_p(rows: int) -> float:
  """The least p-value for a file of `rows` rows: `SEEDS` tests and one of uniformity.

  >>> least_p(rows=1) < FALSE_ALARMS / 20
  True
  """
  return FALSE_ALARMS / ((SEEDS + 1) * rows)


def p_of_categories(drawn: np.ndarray, probabilities: np.ndarray) -> float:
  """Chi-square of the numbers 0, 1, … against their probabilities."""
  counts = np.bincount(drawn.astype(int), minlength=len(probabilities))
  assert len(counts) == len(probabilities) and not counts[probabilities == 0].any()
  possible = probabilities > 0
  return stats.chisquare(counts[possible], probabilities[possible] * len(drawn)).pvalue


def p_of_integers(drawn: np.ndarray, law) -> float:
  """Chi-square over the integers that are likely enough, and the rest beside them."""
  low = int(law.support()[0])
  values = np.arange(low, low + 256)
  likely = values[law.pmf(values) * len(drawn) >= 5]
  probabilities = law.pmf(likely)
  counts = np.array([(drawn == value).sum() for value in likely])
  rest, others = 1 - probabilities.sum(), len(drawn) - counts.sum()
  if rest * len(drawn) >= 5:
    probabilities, counts = np.append(probabilities, rest), np.append(counts, others)
  else:  # too few are expected for a test of their own, but they do count
    rarest = probabilities.argmin()
    probabilities[rarest] += rest
    counts[rarest] += others
  assert drawn.min() >= low and np.array_equal(drawn, np.floor(drawn))
  expected = probabilities / probabilities.sum() * len(drawn)
  return stats.chisquare(counts, expected).pvalue


def p_of_grid(drawn: np.ndarray, law, grid: float) -> float:
  """Chi-square of 16 intervals whose bounds lie between the points of the grid."""
  counts = np.bincount(((law.cdf(drawn) + grid / 2) * 16).astype(int), minlength=16)
  return stats.chisquare(counts).pvalue


def p_value(drawn: np.ndarray, law, grid: float = 0.0) -> float:
  """The p-value of numbers of shape (n,) under a law.

  Args:
    drawn: the numbers.
    law: a frozen scipy distribution, a `Cdf`, or the probabilities of 0, 1, ….
    grid: the spacing of the uniform numbers underneath, for narrow floats.
  """
  if isinstance(law, np.ndarray):
    return p_of_categories(drawn, law)
  if hasattr(law, "pmf"):
    return p_of_integers(drawn, law)
  if grid:
    return p_of_grid(drawn, law, grid)
  return stats.kstest(drawn, law.cdf).pvalue


def require_good(p_values: Sequence[float], rows: int) -> None:
  """No p-value is too small, and together they are uniform."""
  p_values = np.asarray(p_values)
  assert p_values.min() > least_p(rows), p_values
  uniformity = stats.kstest(p_values, "uniform").pvalue
  assert uniformity > least_p(rows), (uniformity, p_values)


def require_independent(masks) -> None:
  """No two rows of shape (n,) are correlated, nor any row with itself shifted.

  The bound is 5 / sqrt(n), or more where so many pairs would pass it by chance.
  """
  masks = np.asarray(masks, float)
  shifts = (1, 2, 7, 100)
  comparisons = len(masks) * ((len(masks) - 1) / 2 + len(shifts))
  sigmas = max(SIGMAS, stats.norm.isf(FALSE_ALARMS / comparisons / 2))
  bound = sigmas / np.sqrt(masks.shape[1])
  correlation = np.corrcoef(masks) - np.eye(len(masks))
  assert abs(correlation).max() < bound
  for shift in shifts:
    for mask in masks:
      assert abs(np.corrcoef(mask[shift:], mask[:-shift])[0, 1]) < bound
