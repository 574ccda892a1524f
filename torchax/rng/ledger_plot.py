"""Plots of ledgers (`ledger.py`) and of differences between two runs (`runs.py`)."""

import math

from torchax.compat import extras


def plot(ledger, ax=None):
  """Plot draws from left to right, sites from top to bottom; see `Ledger.plot`."""
  rows = [draw.site or draw.line.rpartition("/")[2] or draw.op for draw in ledger]
  heights = {name: height for height, name in enumerate(dict.fromkeys(rows))}
  ax = ax or _axes(len(rows), 1.5 + 0.3 * len(heights))
  kinds = [draw.distribution.partition("(")[0] for draw in ledger]
  for number, kind in enumerate(dict.fromkeys(kinds)):
    chosen = [n for n, found in enumerate(kinds) if found == kind]
    ax.scatter(
      chosen,
      [heights[rows[n]] for n in chosen],
      s=[_area(ledger[n]) for n in chosen],
      color=f"C{number}",
      label=kind or "key",
    )
  for group in ledger.duplicates():
    shared = [n for n, draw in enumerate(ledger) if draw in group]
    shared_heights = [heights[rows[n]] for n in shared]
    ax.plot(shared, shared_heights, color="red", zorder=0, label="one key")
  ax.set_yticks(range(len(heights)), list(heights))
  ax.margins(y=0.1 + 0.4 / max(len(heights), 1))
  return _finished(ax)


def plot_difference(difference, ax=None):
  """Plot two runs, one below the other; see `Difference.plot`."""
  longest = max(map(len, difference.draws))
  ax = ax or _axes(longest, 2.6)
  for height, draws in enumerate(difference.draws):
    for is_equal, color in ((True, "C0"), (False, "C3")):
      chosen = [n for n in range(len(draws)) if (n < difference.place) == is_equal]
      areas = [_area(draws[n]) for n in chosen]
      label = "the same" if is_equal else "after they part"
      ax.scatter(chosen, [height] * len(chosen), s=areas, color=color, label=label)
  ax.axvline(difference.place - 0.5, color="red", linestyle="--")
  reason = ", ".join(difference.fields) or "one run ends"
  ax.set_title(f"draw {difference.place}: {reason}", loc="left", fontsize="medium")
  ax.set_yticks([0, 1], ["first run", "second run"])
  ax.set_xlim(-0.8, longest - 0.2)
  ax.margins(y=0.5)
  return _finished(ax)


def _axes(draws: int, height: float):
  pyplot = extras.load("matplotlib.pyplot", "The picture of a ledger")
  size = (min(16, 4 + 0.25 * draws), height)
  return pyplot.subplots(figsize=size, layout="constrained")[1]


def _area(draw) -> float:
  """Return a marker area in square points, logarithmic in the numbers drawn."""
  return 25 + 12 * math.log10(1 + math.prod(draw.shape))


def _finished(ax):
  ticker = extras.load("matplotlib.ticker", "The picture of a ledger")
  ax.invert_yaxis()
  ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  ax.set_xlabel("draw")
  labels = dict(zip(*ax.get_legend_handles_labels()[::-1]))
  if labels:
    ax.legend(labels.values(), labels, loc="upper left", bbox_to_anchor=(1.01, 1))
  return ax
