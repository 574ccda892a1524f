"""Record of draws: operation, site, order and key.

  with env.rng.record() as ledger:
    model(x)
  str(ledger)  # a line for each draw

A function records its draws while it is traced, and each call returns them (`Advance`).
So functions compiled before are recorded too. Without an open ledger, recording costs
one comparison per draw. `runs.py` compares and replays recorded draws.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, ClassVar

import jax
import numpy as np

from torchax.compat import extras, jax_compat, user_code
from torchax.compat.torch_compat import active_functions
from torchax.errors import RngError
from torchax.rng import paths
from torchax.rng import state as rng_state
from torchax.rng.counter import DrawOperands


@dataclasses.dataclass(frozen=True)
class Draw:
  """One recorded draw.

  Attributes:
    index: number of the draw in its stream, from 0.
    op: name of the operation.
    site: path of the module that drew; empty outside of modules.
    distribution: parameters of the operation, if they are numbers.
    shape: shape of the first result.
    dtype: name of the first result's dtype.
    stream: name of the stream; empty for the thread's current one.
    line: file and line of the code that drew; empty if unknown.
    key: identity of the key: implementation, words, and the number that is folded in;
      or "traced" and an identity of the traced key. None for the stream operand at
      `index`, whose key only the caller knows.
    turn: number of the draw at its site, if draws are addressed by site.
    environment: number of the stream's environment, in the log of a function being
      traced; else None.
    arguments: arguments of the operation, as plain data; None if a key was taken
      without a draw.

  >>> ledger = explain(torch.nn.Dropout(0.5), torch.ones(4, device="jax"))
  >>> ledger[0].op, ledger[0].shape, ledger[0].dtype
  ('torchax.dropout.default', (4,), 'float32')
  """

  index: int
  op: str
  site: str
  distribution: str
  shape: tuple[int, ...]
  dtype: str
  stream: str = ""
  line: str = ""
  key: tuple | None = None
  turn: int | None = None
  arguments: tuple | None = None
  environment: int | None = None

  @classmethod
  def of(cls, index: int, op, site: str, distribution: str, result, **where) -> "Draw":
    """Create the record of a draw by the running code; `result` is a tree of arrays."""
    leaf = next(iter(jax.tree.leaves(result)), None)
    shape, dtype = ((), "") if leaf is None else (leaf.shape, str(leaf.dtype))
    location = user_code.line()
    line = "" if location is None else "{}:{}".format(*location)
    return cls(index, str(op), site, distribution, shape, dtype, line=line, **where)

  def operands(self) -> tuple[jax.Array, int]:
    """Return the key of the stream and the number to fold in; see `prng_key`."""
    if self.key is None or self.key[0] == "traced":
      raise RngError(
        f"Draw {self.index} ({self.op}) took its key from a scope inside a compiled "
        "function, where the key has no value. Record the function as it runs eagerly."
      )
    impl, *words, count = self.key
    data = jax.numpy.asarray(words, np.uint32).reshape(rng_state.key_data_shape(impl))
    return jax.random.wrap_key_data(data, impl=impl), count

  @property
  def prng_key(self) -> jax.Array:
    """Typed key of the draw.

    Raises:
      RngError: the draw was made in a scope inside a compiled function.

    >>> with torchax.rng.rng_scope(7), torchax.rng.current().record() as ledger:
    ...   x = torch.rand(3, device="jax")
    >>> bool(ledger[0].prng_key == jax.random.fold_in(jax.random.key(7), 0))
    True
    """
    return rng_state.fold_in(*self.operands())


@dataclasses.dataclass(frozen=True)
class Repeated:
  """Draws repeated by the iterations of a loop or by the rows of a batch.

  Attributes:
    entries: the draws of one iteration.
    times: number of iterations.
    moves: advance of each stream per iteration: number of its environment, path of a
      site or None, and number of draws.
    label: name of the loop or batch.
  """

  entries: tuple
  times: int
  moves: tuple[tuple[int | None, str | None, int], ...]
  label: str


class Ledger:
  """Draws of a block of code, in order: a sequence of `Draw`.

  Args:
    draws: the draws, in order.
    find_faults: check of a traced program, for `require_sound`; None if recorded.

  >>> with torchax.rng.current().record() as ledger:
  ...   x = torch.rand(3, device="jax") + torch.randn(3, device="jax")
  >>> [draw.op for draw in ledger]
  ['aten.rand.default', 'aten.randn.default']
  """

  def __init__(
    self, draws: Iterable[Draw] = (), find_faults: Callable[[], list] | None = None
  ):
    self._draws = list(draws)
    # Checks the program traced by `explain`; None for a recorded ledger.
    self._find_faults = find_faults

  def __len__(self):
    return len(self._draws)

  def __iter__(self) -> Iterator[Draw]:
    return iter(self._draws)

  def __getitem__(self, index):
    return self._draws[index]

  def rows(self) -> list[dict[str, Any]]:
    """Return the draws as dicts, one per draw.

    >>> ledger = explain(torch.nn.Dropout(0.5), torch.ones(4, device="jax"))
    >>> ledger.rows()[0]["shape"]
    (4,)
    """
    return [{name: getattr(draw, name) for name in _COLUMNS} for draw in self._draws]

  def duplicates(self) -> list[list[Draw]]:
    """Return groups of two or more draws that used the same key.

    Traced keys, from scopes inside compiled functions, are compared within one call.

    >>> state = torchax.RngState.from_seed(0)
    >>> with torchax.rng.current().record() as ledger:
    ...   for _ in range(2):
    ...     with torchax.rng_scope(state):
    ...       x = torch.rand(3, device="jax")
    >>> [[draw.index for draw in group] for group in ledger.duplicates()]
    [[0, 0]]
    """
    groups = collections.defaultdict(list)
    for draw in self._draws:
      groups[draw.key].append(draw)
    return [group for group in groups.values() if len(group) > 1]

  def require_unique(self) -> None:
    """Raise AssertionError if two draws used the same key; for test suites.

    Raises:
      AssertionError: keys were used twice; the message names the draws.

    >>> explain(torch.nn.Dropout(0.5), torch.ones(4, device="jax")).require_unique()
    """
    groups = self.duplicates()
    if not groups:
      return
    shown = [
      " and ".join(f"{d.op} ({d.site or d.line}, draw {d.index})" for d in group)
      for group in groups[:5]
    ]
    raise AssertionError(
      f"{len(groups)} key(s) were used more than once, so these draws share their "
      "numbers: " + "; ".join(shown)
    )

  def require_sound(self) -> None:
    """Raise AssertionError if the call given to `explain` uses a key incorrectly.

    The check runs on the jaxpr of the call. No key may be a constant of the program or
    taken and not used. No key may be used twice, including in a loop or by JAX code.
    Branches of a choice may share a key. So may the shards of a `shard_map` and the
    rows of a `vmap`, whose policy is explicit.

    Raises:
      AssertionError: a key is used incorrectly; the message has the lines that draw.
      ValueError: the ledger was recorded, so there is no program to check.

    >>> import torch, torchax
    >>> drop = torch.nn.Dropout(0.5)
    >>> explain(drop, torch.ones(4, device="jax")).require_sound()
    """
    if self._find_faults is None:
      raise ValueError(
        "Only a ledger of `torchax.rng.explain(f, …)` has a program that can be looked "
        "at. For draws that were made there is `require_unique()`."
      )
    faults = self._find_faults()
    if faults:
      raise AssertionError("\n".join(map(str, faults)))

  def plot(self, ax: Any = None) -> Any:
    """Plot draws from left to right and sites from top to bottom.

    Args:
      ax: matplotlib axes; default: new ones.

    Returns:
      The axes.

    Raises:
      ImportError: matplotlib is not installed.

    >>> with torchax.default_env().rng.record() as ledger:
    ...   x = torch.rand(2, device="jax")
    >>> ledger.plot().get_xlabel()
    'draw'
    """
    rows = [draw.site or draw.line.rpartition("/")[2] or draw.op for draw in self]
    heights = {name: height for height, name in enumerate(dict.fromkeys(rows))}
    ax = ax or plot_axes(len(rows), 1.5 + 0.3 * len(heights))
    kinds = [draw.distribution.partition("(")[0] for draw in self]
    for number, kind in enumerate(dict.fromkeys(kinds)):
      chosen = [n for n, other in enumerate(kinds) if other == kind]
      ax.scatter(
        chosen,
        [heights[rows[n]] for n in chosen],
        s=[marker_area(self[n]) for n in chosen],
        color=f"C{number}",
        label=kind or "key",
      )
    for group in self.duplicates():
      shared = [n for n, draw in enumerate(self) if draw in group]
      shared_heights = [heights[rows[n]] for n in shared]
      ax.plot(shared, shared_heights, color="red", zorder=0, label="one key")
    ax.set_yticks(range(len(heights)), list(heights))
    ax.margins(y=0.1 + 0.4 / max(len(heights), 1))
    return finish_plot(ax)

  def __str__(self):
    rows = [[str(value) for value in row.values()] for row in self.rows()]
    rows = [[*row[:-1], row[-1].rpartition("/")[2]] for row in rows]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows)]
    rule = ["-" * width for width in widths]
    lines = [_COLUMNS, rule, *rows]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

  def __repr__(self):
    return f"<Ledger of {len(self)} draws>"


_COLUMNS = ("index", "op", "site", "distribution", "shape", "dtype", "stream", "line")


# Open ledgers of this thread or task.
_open: ContextVar[tuple[Ledger, ...]] = ContextVar("open", default=())
_lock = threading.Lock()
_calls = itertools.count()


class Recording:
  """Number of open ledgers in this process; draws are not recorded while it is 0."""

  count = 0


@contextlib.contextmanager
def recording() -> Iterator[Ledger]:
  """Yield a ledger that records the draws in the block, in this thread or task."""
  ledger = Ledger()
  with active_functions.following.hold():
    _open.set((*_open.get(), ledger))
    _count(1)
    try:
      yield ledger
    finally:
      # By identity: another task may run this exit, or other ledgers are still open.
      _open.set(tuple([each for each in _open.get() if each is not ledger]))
      _count(-1)


def _count(ledgers: int) -> None:
  with _lock:
    Recording.count += ledgers


def record(stream, op, distribution: str, result, arguments: tuple | None) -> None:
  """Record the current draw of an `RngStream`, before it advances.

  `dispatch/recorded_arguments.py` returns the `arguments`; see `Draw` for the others.
  """
  counter = stream.counter
  site, turn = counter.site()
  where = {"stream": stream.label, "turn": turn, "arguments": arguments}
  draw = Draw.of(counter.count, op, site, distribution, result, **where)
  draw = dataclasses.replace(draw, environment=stream.environment)
  if not counter.is_operand:  # else only the caller knows the key
    draw = _with_key(draw, counter.operands_of(draw.index, site, turn))
  _append(stream.log, [draw])


def record_generator(
  log: list | None, op, distribution: str, result, arguments, operands: DrawOperands
) -> None:
  """Record a draw with `generator=`; `log` is the traced function's, or None."""
  site = paths.path(from_boundary=log is not None)
  where = {"stream": "generator", "arguments": arguments}
  draw = Draw.of(0, op, site, distribution, result, **where)
  _append(log, [_with_key(draw, operands)])


def _append(log: list | None, draws: list) -> None:
  """Append draws to the log of the traced function, or to the open ledgers."""
  for each in [ledger._draws for ledger in _open.get()] if log is None else [log]:
    each += draws


def commit(log: list | None, entries: tuple, streams: dict) -> None:
  """Record the draws of a call of a compiled function, before the streams advance.

  Args:
    log: log of the enclosing traced function; None on the host.
    entries: records from the trace of the compiled function.
    streams: the caller's streams, by number of environment.
  """
  called = _of_caller(entries, streams)
  _append(log, called if log is not None else _with_keys(called, streams))


class Explainer:
  """Functions of higher layers, set by the composition root.

  Attributes:
    trace: `(function, args, kwargs) -> Ledger`.
    redraw: `(draw, parameters) -> tensor`.
  """

  trace: ClassVar[Callable]
  redraw: ClassVar[Callable]


def explain(torch_function: Callable, *args: Any, **kwargs: Any) -> Ledger:
  """List the draws of a call by tracing it; draw no number and advance no stream.

  Args:
    torch_function: function or module of tensors.
    args, kwargs: its arguments; only shapes and dtypes of tensors matter.

  Returns:
    The draws in order, numbered from the position of the current stream.

  >>> import torch, torchax
  >>> drop = torch.nn.Dropout(0.5)
  >>> [draw.shape for draw in explain(drop, torch.ones(4, device="jax"))]
  [(4,)]
  """
  return Explainer.trace(torch_function, args, kwargs)


def dry_run(entries: tuple, streams: dict, find_faults: Callable) -> Ledger:
  """Return the draws of a future call; see `commit` and `Ledger.require_sound`."""
  return Ledger(_with_keys(_of_caller(entries, streams), streams), find_faults)


def _of_caller(entries: tuple, streams: dict) -> list:
  """Shift a function's draws to the positions of its caller's streams."""
  call = next(_calls)
  prefix = next(iter(streams.values())).counter.path()

  def shift(draw: Draw) -> Draw:
    draw = dataclasses.replace(draw, site=join(prefix, draw.site))
    if draw.key is not None:
      is_traced = draw.key[0] == "traced"
      return dataclasses.replace(draw, key=(*draw.key, call)) if is_traced else draw
    counter = streams[draw.environment].counter
    turn = None if draw.turn is None else draw.turn + counter.progress(draw.site)
    return dataclasses.replace(draw, index=draw.index + counter.progress(), turn=turn)

  return _each(entries, shift, prefix)


def _each(entries: Iterable, change: Callable[[Draw], Draw], prefix: str = "") -> list:
  """Apply `change` to each draw, and prefix the paths of sites in `Repeated`."""
  changed = []
  for entry in entries:
    if isinstance(entry, Repeated):
      moves = [
        (number, None if path is None else join(prefix, path), n)
        for number, path, n in entry.moves
      ]
      inner = tuple(_each(entry.entries, change, prefix))
      entry = dataclasses.replace(entry, entries=inner, moves=tuple(moves))
    else:
      entry = change(entry)
    changed.append(entry)
  return changed


def _with_keys(entries, streams: dict) -> list[Draw]:
  """Expand the entries to draws, and add keys from the caller's streams."""
  draws = []
  for draw in expand(entries):
    if draw.key is None:
      counter = streams[draw.environment].counter
      draw = _with_key(draw, counter.operands_of(draw.index, draw.site, draw.turn))
    draws.append(dataclasses.replace(draw, environment=None))
  return draws


def as_child_draws(entries: Iterable, label: str) -> tuple:
  """Return the draws relabelled as draws of a child stream, with another key."""
  number = next(_calls)

  def derive(draw: Draw) -> Draw:
    stream = f"{label} {draw.stream}".rstrip()
    key = draw.key or ("traced", number, draw.site, draw.index, draw.turn)
    return dataclasses.replace(draw, stream=stream, key=key)

  return tuple(_each(entries, derive))


def expand(entries: Iterable) -> Iterator[Draw]:
  """Yield the draws of entries, with one draw per iteration of a loop."""
  for entry in entries:
    if isinstance(entry, Draw):
      yield entry
      continue
    inner = list(expand(entry.entries))
    moves = {(environment, path): n for environment, path, n in entry.moves}
    for turn in range(entry.times):
      for draw in inner:
        yield _in_turn(draw, entry.label, moves, turn)


def _in_turn(draw: Draw, label: str, moves: dict, number: int) -> Draw:
  stream = f"{label}[{number}] {draw.stream}".rstrip()
  if draw.key is None:
    turn = draw.turn
    if turn is not None:
      turn += moves.get((draw.environment, draw.site), 0) * number
    index = draw.index + moves.get((draw.environment, None), 0) * number
    return dataclasses.replace(draw, index=index, turn=turn, stream=stream)
  if draw.key[0] == "traced":
    return dataclasses.replace(draw, key=(*draw.key, number), stream=stream)
  return dataclasses.replace(draw, stream=stream)


def _with_key(draw: Draw, operands) -> Draw:
  key, count = operands
  if isinstance(key, jax.core.Tracer):
    return dataclasses.replace(draw, key=("traced", id(key), count))
  with jax_compat.outside_of_traces():  # an outer function may be traced
    words = np.asarray(jax.random.key_data(key)).ravel().tolist()
  return dataclasses.replace(draw, key=(str(jax.random.key_impl(key)), *words, count))


def join(prefix: str, path: str) -> str:
  """Join two paths of sites."""
  return f"{prefix}.{path}" if prefix and path else prefix or path


# Plots --------------------------------------------------------------------------------


def plot_axes(draws: int, height: float):
  pyplot = extras.load("matplotlib.pyplot", "The picture of a ledger")
  size = (min(16, 4 + 0.25 * draws), height)
  return pyplot.subplots(figsize=size, layout="constrained")[1]


def marker_area(draw) -> float:
  """Return a marker area in square points, logarithmic in the numbers drawn."""
  return 25 + 12 * math.log10(1 + math.prod(draw.shape))


def finish_plot(ax):
  ticker = extras.load("matplotlib.ticker", "The picture of a ledger")
  ax.invert_yaxis()
  ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  ax.set_xlabel("draw")
  labels = dict(zip(*ax.get_legend_handles_labels()[::-1]))
  if labels:
    ax.legend(labels.values(), labels, loc="upper left", bbox_to_anchor=(1.01, 1))
  return ax
