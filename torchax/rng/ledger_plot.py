"""The picture of a ledger: who drew when, and how much."""

import math

from torchax.compat import extras


def plot(ledger, ax=None):
  """Draws from left to right, sites from top to bottom; see `Ledger.plot`."""
  # `print(ledger)` and `ledger.rows()` need nothing.
  pyplot = extras.load("matplotlib.pyplot", "The picture of a ledger")
  ticker = extras.load("matplotlib.ticker", "The picture of a ledger")
  rows = [draw.site or draw.line.rpartition("/")[2] or draw.op for draw in ledger]
  places = {name: place for place, name in enumerate(dict.fromkeys(rows))}
  if ax is None:
    size = (min(16, 4 + 0.25 * len(rows)), 1.5 + 0.3 * len(places))
    ax = pyplot.subplots(figsize=size, layout="constrained")[1]
  kinds = dict.fromkeys(draw.distribution.partition("(")[0] for draw in ledger)
  for number, kind in enumerate(kinds):
    chosen = [
      (place, draw)
      for place, draw in enumerate(ledger)
      if draw.distribution.partition("(")[0] == kind
    ]
    ax.scatter(
      [place for place, _ in chosen],
      [places[rows[place]] for place, _ in chosen],
      s=[_area(draw) for _, draw in chosen],
      color=f"C{number}",
      label=kind or "key",
    )
  for group in ledger.duplicates():
    shared = [place for place, draw in enumerate(ledger) if draw in group]
    heights = [places[rows[place]] for place in shared]
    ax.plot(shared, heights, color="red", zorder=0, label="one key")
  ax.set_yticks(range(len(places)), list(places))
  ax.invert_yaxis()
  ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  ax.set_xlabel("draw")
  ax.margins(y=0.1 + 0.4 / max(len(places), 1))
  if kinds:
    shown = dict(zip(*ax.get_legend_handles_labels()[::-1]))
    ax.legend(shown.values(), shown, loc="upper left", bbox_to_anchor=(1.01, 1))
  return ax


def _area(draw) -> float:
  """Marker area in square points: grows with the logarithm of the numbers drawn."""
  return 25 + 12 * math.log10(1 + math.prod(draw.shape))


def plot_difference(difference, ax=None):
  """Two runs, one below the other, and where they part; see `Difference.plot`."""
  pyplot = extras.load("matplotlib.pyplot", "The picture of a difference")
  ticker = extras.load("matplotlib.ticker", "The picture of a difference")
  runs = difference.draws
  longest = max(map(len, runs))
  if ax is None:
    size = (min(16, 4 + 0.25 * longest), 2.6)
    ax = pyplot.subplots(figsize=size, layout="constrained")[1]
  for height, draws in enumerate(runs):
    for is_equal, color in ((True, "C0"), (False, "C3")):
      places = [n for n in range(len(draws)) if (n < difference.place) == is_equal]
      areas = [_area(draws[n]) for n in places]
      label = "the same" if is_equal else "after they part"
      ax.scatter(places, [height] * len(places), s=areas, color=color, label=label)
  ax.axvline(difference.place - 0.5, color="red", linestyle="--")
  reason = ", ".join(difference.fields) or "one run ends"
  ax.set_title(f"draw {difference.place}: {reason}", loc="left", fontsize="medium")
  ax.set_yticks([0, 1], ["first run", "second run"])
  ax.invert_yaxis()
  ax.set_xlim(-0.8, longest - 0.2)
  ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  ax.set_xlabel("draw")
  ax.margins(y=0.5)
  shown = dict(zip(*ax.get_legend_handles_labels()[::-1]))
  ax.legend(shown.values(), shown, loc="upper left", bbox_to_anchor=(1.01, 1))
  return ax
