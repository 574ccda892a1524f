"""Goodness of fit: decisions of the statistical tests, and their seeds.

A row draws `N` numbers from each of `SEEDS` seeds. For every seed, a Kolmogorov-Smirnov
test (continuous) or a chi-square test (discrete) gives a p-value. None may be below
1e-3 divided by the number of tests, and the p-values of a row must be uniform. One seed
would be no evidence. Seeds are fixed, so the result of a row is deterministic.

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
# Probability that a whole file rejects a true null hypothesis.
FALSE_ALARMS = 1e-3


class Cdf:
  """Continuous law that scipy does not have, defined by its distribution function."""

  def __init__(self, cdf: Callable):
    self.cdf = cdf


def least_p(rows: int) -> float:
  """Return the least p-value for `rows` rows: `SEEDS` tests and one of uniformity.

  >>> least_p(rows=1) < FALSE_ALARMS / 20
  True
  """
  return FALSE_ALARMS / ((SEEDS + 1) * rows)


def p_of_categories(drawn: np.ndarray, probabilities: np.ndarray) -> float:
  """Return the p-value of a chi-square test of categories 0, 1, …."""
  counts = np.bincount(drawn.astype(int), minlength=len(probabilities))
  assert len(counts) == len(probabilities) and not counts[probabilities == 0].any()
  possible = probabilities > 0
  return stats.chisquare(counts[possible], probabilities[possible] * len(drawn)).pvalue


def p_of_integers(drawn: np.ndarray, law) -> float:
  """Return the p-value of a chi-square test of integers, with rare ones pooled."""
  low = int(law.support()[0])
  values = np.arange(low, low + 256)
  likely = values[law.pmf(values) * len(drawn) >= 5]
  probabilities = law.pmf(likely)
  counts = np.array([(drawn == value).sum() for value in likely])
  rest, others = 1 - probabilities.sum(), len(drawn) - counts.sum()
  if rest * len(drawn) >= 5:
    probabilities, counts = np.append(probabilities, rest), np.append(counts, others)
  else:  # too rare for a bin of their own, so they share one
    rarest = probabilities.argmin()
    probabilities[rarest] += rest
    counts[rarest] += others
  assert drawn.min() >= low and np.array_equal(drawn, np.floor(drawn))
  expected = probabilities / probabilities.sum() * len(drawn)
  return stats.chisquare(counts, expected).pvalue


def p_of_grid(drawn: np.ndarray, law, grid: float) -> float:
  """Return the p-value of a chi-square test on 16 intervals between grid points."""
  counts = np.bincount(((law.cdf(drawn) + grid / 2) * 16).astype(int), minlength=16)
  return stats.chisquare(counts).pvalue


def p_value(drawn: np.ndarray, law, grid: float = 0.0) -> float:
  """Return the p-value of numbers of shape (n,) under a law.

  Args:
    drawn: the numbers.
    law: a frozen scipy distribution, a `Cdf`, or the probabilities of 0, 1, ….
    grid: the spacing of the underlying uniform numbers, for narrow floats.
  """
  if isinstance(law, np.ndarray):
    return p_of_categories(drawn, law)
  if hasattr(law, "pmf"):
    return p_of_integers(drawn, law)
  if grid:
    return p_of_grid(drawn, law, grid)
  return stats.kstest(drawn, law.cdf).pvalue


def require_good(p_values: Sequence[float], rows: int) -> None:
  """Assert that no p-value is too small, and that together they are uniform."""
  p_values = np.asarray(p_values)
  assert p_values.min() > least_p(rows), p_values
  uniformity = stats.kstest(p_values, "uniform").pvalue
  assert uniformity > least_p(rows), (uniformity, p_values)


def require_independent(masks) -> None:
  """Assert that no two rows of shape (n,), and no row and its shift, are correlated.

  The bound is 5 / sqrt(n), or more if so many pairs would exceed it by chance.
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
