"""Comparison and replay of recorded draws; `ledger.py` records them."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from torchax.rng.ledger import (
  Draw,
  Explainer,
  Ledger,
  finish_plot,
  marker_area,
  plot_axes,
)

# Compared in this order, most informative first.
_FIELDS = ("key", "site", "shape", "distribution", "dtype", "op")


@dataclasses.dataclass(frozen=True)
class Difference:
  """First difference between two runs.

  Attributes:
    index: index of the draw in both ledgers, from 0.
    first: the draw of the first run; None if that run has ended.
    second: the draw of the second run; None if that run has ended.
    fields: differing attributes among key, site, shape, distribution, dtype and op;
      empty if one run has ended.
    draws: all draws of both runs.

  >>> env = torchax.default_env()
  >>> ledgers = []
  >>> for size in (2, 3):
  ...   with env.rng_scope(0), env.rng.record() as ledger:
  ...     x = torch.rand(size, device="jax")
  ...   ledgers.append(ledger)
  >>> diff(*ledgers).fields
  ('shape',)
  """

  index: int
  first: Draw | None
  second: Draw | None
  fields: tuple[str, ...]
  draws: tuple[tuple[Draw, ...], tuple[Draw, ...]] = dataclasses.field(repr=False)

  def __str__(self):
    if self.first is None:
      return f"draw {self.index}: only the second run makes it: {_words(self.second)}"
    if self.second is None:
      return f"draw {self.index}: only the first run makes it: {_words(self.first)}"
    lines = [
      f"{name}: {_value(self.first, name)} / {_value(self.second, name)}"
      for name in self.fields
    ]
    return (
      f"draw {self.index} differs in {', '.join(self.fields)}\n"
      f"  first run:  {_words(self.first)}\n"
      f"  second run: {_words(self.second)}\n  " + "\n  ".join(lines)
    )

  def plot(self, ax: Any = None) -> Any:
    """Plot the draws of both runs and their first difference.

    Args:
      ax: matplotlib axes; default: new ones.

    Returns:
      The axes.

    Raises:
      ImportError: matplotlib is not installed.

    >>> drop, sizes = torch.nn.Dropout(0.5), (2, 3)
    >>> runs = [torchax.rng.explain(drop, torch.ones(n, device="jax")) for n in sizes]
    >>> diff(*runs).plot().get_title(loc="left")
    'draw 0: shape'
    """
    longest = max(map(len, self.draws))
    ax = ax or plot_axes(longest, 2.6)
    for height, draws in enumerate(self.draws):
      for is_equal, color in ((True, "C0"), (False, "C3")):
        chosen = [n for n in range(len(draws)) if (n < self.index) == is_equal]
        areas = [marker_area(draws[n]) for n in chosen]
        label = "the same" if is_equal else "after they part"
        ax.scatter(chosen, [height] * len(chosen), s=areas, color=color, label=label)
    ax.axvline(self.index - 0.5, color="red", linestyle="--")
    reason = ", ".join(self.fields) or "one run ends"
    ax.set_title(f"draw {self.index}: {reason}", loc="left", fontsize="medium")
    ax.set_yticks([0, 1], ["first run", "second run"])
    ax.set_xlim(-0.8, longest - 0.2)
    ax.margins(y=0.5)
    return finish_plot(ax)


def diff(
  first: Ledger | Sequence[Draw], second: Ledger | Sequence[Draw]
) -> Difference | None:
  """Find the first draw in which two runs differ.

  Args:
    first, second: ledgers, for example from `env.rng.record()`.

  Returns:
    The difference; None if the runs make the same draws with the same keys. Lines of
    code and indices are not compared: the key identifies a draw.

  >>> import torch, torchax
  >>> env = torchax.default_env()
  >>> ledgers = []
  >>> for p in (0.5, 0.25):
  ...   with env, env.rng_scope(0), env.rng.record() as ledger:
  ...     x = torch.nn.functional.dropout(torch.ones(3, device="jax"), 0.5)
  ...     x = torch.nn.functional.dropout(x, p)
  ...   ledgers.append(ledger)
  >>> diff(*ledgers).index, diff(*ledgers).fields
  (1, ('distribution',))
  """
  for index, pair in enumerate(itertools.zip_longest(first, second)):
    if None in pair:
      return Difference(index, *pair, (), (tuple(first), tuple(second)))
    fields = tuple([f for f in _FIELDS if getattr(pair[0], f) != getattr(pair[1], f)])
    if fields:
      return Difference(index, *pair, fields, (tuple(first), tuple(second)))
  return None


def _words(draw: Draw | None) -> str:
  if draw is None:
    return "nothing"
  where = ", ".join(filter(None, (draw.site, draw.line.rpartition("/")[2])))
  return f"{draw.distribution or draw.op} of shape {list(draw.shape)} ({where})"


def _value(draw: Draw, name: str) -> str:
  value = getattr(draw, name)
  if name != "key" or not isinstance(value, tuple):
    return repr(value)
  if value[0] == "traced":
    return "a traced key"
  *words, count = value[1:]
  return f"{value[0]} {':'.join(f'{word:x}' for word in words)}, number {count}"


def replay(draw: Draw, *parameters: torch.Tensor) -> torch.Tensor:
  """Repeat a recorded draw; no stream advances.

  Args:
    draw: a draw of a ledger.
    *parameters: the tensors among the arguments of the operation, in order, for example
      the rates of a Poisson draw. They are optional if only their shapes and dtypes
      matter (`rand_like`, `uniform_`). The default input of a dropout is ones.

  Returns:
    The tensor that the operation returned or, for an in-place one, wrote.

  Raises:
    RngError: the key is from a scope inside a compiled function, or it was taken
      without a draw (`draw.prng_key` has the key).
    ValueError: parameters are missing, or have other shapes or dtypes.

  >>> import torch, torchax
  >>> env = torchax.default_env()
  >>> with env, env.rng.record() as ledger:
  ...   x = torch.randn(3, device="jax")
  >>> torch.equal(replay(ledger[0]), x)
  True
  """
  return Explainer.redraw(draw, parameters)
