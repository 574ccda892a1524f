"""Key and number of draws of a stream, and of each of its sites.

A site is the path of the modules that draw ("layers.0.dropout"), as `paths.py` returns
it. It is a stream of its own, with a key derived from the path.
"""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from torchax.compat import jax_compat
from torchax.compat.torch_compat import active_functions
from torchax.rng import paths
from torchax.rng import state as rng_state
from torchax.rng.state import RngState

DrawOperands = tuple[jax.Array, Any]
"""Key of a stream and number of a draw; a fused sampler folds the number in."""


class Counter:
  """Key and number of draws made with it.

  On the host it switches to a new key after 2**30 draws.

  Attributes:
    key: typed key.
    base: traced number of draws before the trace; None on the host.
    count: number of draws, a Python int; in a trace, draws since `base`.
    is_operand: key and count are operands of the function being traced. Paths of
      modules then start at the function, and only its caller knows the key.
    replayed: part of a forward pass that is being recomputed; see `paths.replay`.
  """

  __slots__ = ("base", "count", "is_operand", "key", "replayed")
  by_site = False

  def __init__(self, key: jax.Array, count: Any = 0, is_operand: bool = False):
    self.is_operand = is_operand
    self.replayed: paths.Replay | None = None
    if isinstance(count, int):
      self.base = None
      self.key, self.count = rng_state.rekey_if_due(key, count)
    else:
      self.key, self.base, self.count = key, count, 0

  def position(self) -> DrawOperands:
    """Return the key and the number of draws."""
    return self.key, self.count if self.base is None else self.base + self.count

  @property
  def is_traced(self) -> bool:
    """True if the key or the count is traced."""
    return isinstance(self.key, jax.core.Tracer) or self.base is not None

  @property
  def has_counted(self) -> bool:
    """True if there may have been draws."""
    return self.count > 0 or self.base is not None

  def next(self) -> DrawOperands:
    """Return the operands of the next draw; the caller then calls `advance`."""
    return self.position()

  def operands_of(self, index: int, site: str, turn: int | None) -> DrawOperands:
    """Return the operands of a draw, found by its number or by its number at a site."""
    return self.key, index

  @property
  def state(self) -> RngState:
    """State before the next draw."""
    return RngState(*self.position())

  def progress(self, path: str | None = None) -> int:
    """Return the draws since the key was set or became an operand, of all or a site."""
    return self.count

  def site(self) -> tuple[str, int | None]:
    """Return the path of the current draw, and its number there or None."""
    return self.path(), None

  def path(self) -> str:
    """Return the path of the running modules: the prefix of a callee's sites."""
    return paths.path(self.replayed, self.is_operand)

  def advance(self, draws: int) -> None:
    """Count draws made with the operands of `next`."""
    self.count += draws
    if self.count >= rng_state.REKEY_AT and self.base is None:
      self.key, self.count = rng_state.rekey_if_due(self.key, self.count)

  def advance_past(self, draws: int, path: str | None = None) -> None:
    """Count draws of a compiled call; with `path`, those of one site only."""
    if path is None:
      self.advance(draws)

  def skip(self, turns, draws: dict[str | None, int]) -> None:
    """Advance past iterations of a loop, whose number `turns` may be traced.

    `draws` has the draws of one iteration: of all with the key None, and per site.
    """
    self.base = (0 if self.base is None else self.base) + turns * draws.get(None, 0)

  def copy(self) -> "Counter":
    """Return an independent copy."""
    return copy.copy(self)


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

  def skip(self, turns, draws: dict[str | None, int]) -> None:
    super().skip(turns, draws)
    for path, n in draws.items():
      if path is not None:
        self.at(path).skip(turns, {None: n})

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
  each = [draws_between(stream, branch) for branch in branches]
  for path in dict.fromkeys(path for draws in each for path in draws):
    stream.advance_past(max(draws.get(path, 0) for draws in each), path)


def draws_between(before, after) -> dict[str | None, int]:
  """Return the draws of a `nested` copy of a stream: per site, and of all (None)."""
  sites = after.counter.draws if after.by_site else {}
  earlier = before.counter.draws if before.by_site else {}
  draws = {path: n - earlier.get(path, 0) for path, n in sites.items()}
  return {**draws, None: after.draws - before.draws}
