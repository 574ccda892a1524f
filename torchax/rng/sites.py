"""Draws addressed by site, the path of the modules that draw.

A site is a stream of its own, with a key derived from the path ("layers.0.dropout").
`paths.py` returns the path of the running modules.
"""

import contextlib
from collections.abc import Callable

import jax
import numpy as np

from torchax.compat import jax_compat
from torchax.compat.torch_compat import active_functions
from torchax.rng import state as rng_state
from torchax.rng.counter import Counter, DrawOperands
from torchax.rng.state import RngState


class SiteCounter(Counter):
  """Counter of a stream whose draws are addressed by site.

  Args:
    state: the initial state; its `sites` are the earlier draws per path, maybe traced.
    is_operand: see `Counter`.

  Attributes:
    draws: draws per site since the initial state.
    meet: callback for the path of a site that is no operand of the trace; None on the
      host.
  """

  __slots__ = ("__weakref__", "_before", "_counters", "_site", "draws", "meet")
  by_site = True

  def __init__(self, state: RngState, is_operand: bool = False):
    super().__init__(state.key, state.count, is_operand)
    # Counts of all draws of a site, with all its keys.
    self._before = dict(state.sites or {})
    self._counters: dict[str, Counter] = {}
    self._site = ""
    self.draws: dict[str, int] = {}
    self.meet: Callable[[str], None] | None = None
    active_functions.following.hold_for(self)

  def next(self) -> DrawOperands:
    self._site = self.path()
    return self.at(self._site).next()

  def at(self, path: str) -> Counter:
    """Return the counter of a site."""
    counter = self._counters.get(path)
    if counter is None:
      # Keys derived from a concrete key stay concrete, even inside a trace.
      is_traced = isinstance(self.key, jax.core.Tracer)
      with contextlib.nullcontext() if is_traced else jax_compat.outside_of_traces():
        key = rng_state.named_key(self.key, path)
      if self.meet is not None:
        self.meet(path)  # the count is a placeholder: the function will be retraced
        self._before[path] = np.uint32(0)
      counter = self._counters[path] = Counter(key, self._total(path))
    return counter

  def add(self, path: str, key: jax.Array, count) -> None:
    """Add a site whose key and count are operands."""
    self._before[path] = count
    self._counters[path] = Counter(key, count)

  def _total(self, path: str):
    return self._before.get(path, 0) + self.draws.get(path, 0)

  def operands_of(self, index: int, site: str, turn: int | None) -> DrawOperands:
    if turn is None:
      return self.key, index
    (key, count), total = self.at(site).next(), self._total(site)
    return key, turn - (total - count) if isinstance(total, int) else turn

  @property
  def state(self) -> RngState:
    paths = {**self._before, **self.draws}
    return RngState(*self.position(), {path: self._total(path) for path in paths})

  def progress(self, path: str | None = None) -> int:
    if path is None:
      return self.count
    total = self._total(path)
    return total if isinstance(total, int) else self.draws.get(path, 0)

  def site(self) -> tuple[str, int | None]:
    return self._site, self.progress(self._site)

  def advance(self, draws: int) -> None:
    self.advance_past(draws, self._site)
    self.advance_past(draws)

  def advance_past(self, draws: int, path: str | None = None) -> None:
    if path is not None:
      self.at(path).advance(draws)
      self.draws[path] = self.draws.get(path, 0) + draws
    elif draws:  # the count only has to be positive after a draw
      self.count = (self.count + draws - 1) % (rng_state.REKEY_AT - 1) + 1

  def copy(self) -> "SiteCounter":
    other = SiteCounter(RngState(self.key, 0, self._before), self.is_operand)
    other.base, other.count, other.replayed = self.base, self.count, self.replayed
    other._counters = {path: each.copy() for path, each in self._counters.items()}
    other.draws, other.meet, other._site = dict(self.draws), self.meet, self._site
    return other


def counter_of(state: RngState) -> Counter:
  """Create the counter of a state."""
  return Counter(state.key, state.count) if state.sites is None else SiteCounter(state)


def advance_past_branches(stream, branches: list) -> None:
  """Advance a stream past a choice of branches, by the largest number of draws.

  `branches` has the `nested` copies of the stream, after the draws of each branch.
  """
  before = _draws(stream)
  for path in dict.fromkeys(path for branch in branches for path in _draws(branch)):
    most = max(_draws(branch).get(path, 0) for branch in branches)
    stream.advance_past(max(most - before.get(path, 0), 0), path)
  stream.advance_past(max(branch.draws for branch in branches) - stream.draws)


def _draws(stream) -> dict[str, int]:
  return dict(stream.counter.draws) if stream.by_site else {}
