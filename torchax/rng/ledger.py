"""A record of draws: who drew what, in what order, with which key.

  with env.rng.record() as ledger:
    model(x)
  str(ledger)  # a line for each draw

A function records its draws while it is traced, and they return with every call
(`Advance`), so a function that was compiled before shows them too. Off, recording
costs one comparison a draw.
"""

import collections
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, ClassVar

import jax
import numpy as np

from torchax.compat import jax_compat
from torchax.core import switches
from torchax.rng import active_functions, ledger_plot, soundness
from torchax.rng.counter import DrawOperands
from torchax.rng.draw import Draw, Repeated


class Ledger:
  """The draws of a block of code, in order: a sequence of `Draw`."""

  def __init__(self, draws: Iterable[Draw] = (), program=None):
    self._draws = list(draws)
    # The jaxpr of the call that `explain` has looked at.
    self._program = program

  def __len__(self):
    return len(self._draws)

  def __iter__(self) -> Iterator[Draw]:
    return iter(self._draws)

  def __getitem__(self, place):
    return self._draws[place]

  def rows(self) -> list[dict[str, Any]]:
    """The draws as dicts, one a row."""
    return [{name: getattr(draw, name) for name in _COLUMNS} for draw in self._draws]

  def duplicates(self) -> list[list[Draw]]:
    """Draws that used one key, in groups of two and more.

    Keys without a value yet, those of scopes inside compiled functions, are compared
    within one call.
    """
    groups = collections.defaultdict(list)
    for draw in self._draws:
      groups[draw.key].append(draw)
    return [group for group in groups.values() if len(group) > 1]

  def require_unique(self) -> None:
    """Raises AssertionError if two draws used one key; for test suites."""
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
    """Raises AssertionError unless the call that `explain` looked at draws soundly.

    It is proved on the jaxpr of the call: no key is a constant of the program, none is
    drawn with twice, also in the turns of a loop or by code of JAX, and none is taken
    and dropped. Branches of which one is run may share a key, and so may the shards of
    a `shard_map` and the rows of a `vmap`, whose policy is declared.

    Raises:
      AssertionError: with the lines that draw.
      ValueError: the ledger was recorded, so there is no program to look at.

    >>> import torch, torchax
    >>> drop = torch.nn.Dropout(0.5)
    >>> explain(drop, torch.ones(4, device="jax")).require_sound()
    """
    if self._program is None:
      raise ValueError(
        "Only a ledger of `torchax.rng.explain(f, …)` has a program that can be looked "
        "at. For draws that were made there is `require_unique()`."
      )
    found = soundness.faults(self._program)
    if found:
      raise AssertionError("\n".join(map(str, found)))

  def plot(self, ax=None):
    """A picture: draws from left to right, sites from top to bottom.

    Args:
      ax: matplotlib axes; by default new ones.

    Returns:
      The axes.

    Raises:
      ImportError: matplotlib is not installed.
    """
    return ledger_plot.plot(self, ax)

  def _cells(self) -> list[list[str]]:
    rows = [[str(value) for value in row.values()] for row in self.rows()]
    return [[*row[:-1], row[-1].rpartition("/")[2]] for row in rows]

  def __str__(self):
    rows = self._cells()
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows)]
    rule = ["-" * width for width in widths]
    lines = [_COLUMNS, rule, *rows]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

  def __repr__(self):
    return f"<Ledger of {len(self)} draws>"


_COLUMNS = ("index", "op", "site", "distribution", "shape", "dtype", "stream", "line")


# The ledgers that are open in this thread or task.
_open: ContextVar[tuple[Ledger, ...]] = ContextVar("open", default=())
_lock = threading.Lock()
_calls = itertools.count()


class Recording:
  """How many ledgers are open in this process; draws look at it and pass by."""

  count = 0


@contextlib.contextmanager
def recording() -> Iterator[Ledger]:
  """Yields a ledger that is open in the block, in this thread or task."""
  ledger = Ledger()
  with active_functions.following.hold():
    switches.push(_open, ledger)
    _count(1)
    try:
      yield ledger
    finally:
      switches.drop(_open, ledger)
      _count(-1)


def _count(ledgers: int) -> None:
  with _lock:
    Recording.count += ledgers


def record(stream, op, distribution: str, result, arguments: tuple | None) -> None:
  """Records the draw that a stream is making.

  Args:
    stream: an `RngStream`, before it advances.
    op: the operation.
    distribution: its parameters.
    result: array or arrays that were drawn.
    arguments: of the operation, as `arguments.noted` gives them.
  """
  counter = stream.counter
  site, turn = counter.site()
  where = {"stream": stream.label, "turn": turn, "arguments": arguments}
  draw = Draw.of(counter.count, op, site, distribution, result, **where)
  draw = dataclasses.replace(draw, environment=stream.environment)
  if not counter.is_operand:  # else its caller knows the key
    draw = _with_key(draw, counter.operands_of(draw.index, site, turn))
  _append(stream.log, [draw])


def record_generator(
  log: list | None, op, distribution: str, result, arguments, operands: DrawOperands
) -> None:
  """Records a draw with `generator=`.

  Args:
    log: of the function being traced; None on the host.
    op, distribution, result, arguments: of the draw, as in `record`.
    operands: its key and number.
  """
  site = active_functions.path(from_boundary=log is not None)
  where = {"stream": "generator", "arguments": arguments}
  draw = Draw.of(0, op, site, distribution, result, **where)
  _append(log, [_with_key(draw, operands)])


def _append(log: list | None, draws: list) -> None:
  """Adds draws to the log of the function being traced, or to the open ledgers."""
  for each in [ledger._draws for ledger in _open.get()] if log is None else [log]:
    each += draws


def commit(log: list | None, entries: tuple, streams: dict) -> None:
  """Records the draws of a compiled function that is being called.

  Args:
    log: of the function being traced around it; None on the host.
    entries: what it recorded when it was traced.
    streams: the caller's, before they advance, by the numbers of their environments.
  """
  called = _of_caller(entries, streams)
  _append(log, called if log is not None else _with_keys(called, streams))


class Explainer:
  """What the layers above do for a ledger; the composition root knows them.

  Attributes:
    trace: `(function, args, kwargs) -> Ledger`.
    redraw: `(draw, parameters) -> tensor`.
  """

  trace: ClassVar[Callable]
  redraw: ClassVar[Callable]


def explain(torch_function: Callable, *args, **kwargs) -> Ledger:
  """Lists the draws of a call without making it: no number is drawn, no state moves.

  Args:
    torch_function: function or module of tensors.
    args, kwargs: its arguments; of tensors only shapes and dtypes count.

  Returns:
    The draws in order, numbered from where the current stream stands.

  >>> import torch, torchax
  >>> drop = torch.nn.Dropout(0.5)
  >>> [draw.shape for draw in explain(drop, torch.ones(4, device="jax"))]
  [(4,)]
  """
  return Explainer.trace(torch_function, args, kwargs)


def replay(draw: Draw, *parameters):
  """Draws the numbers of a noted draw again; no stream moves.

  Args:
    draw: of a ledger, also of one that was loaded from a file.
    *parameters: the tensors among the arguments of the operation, in their order, such
      as the rates of a Poisson draw. They may be left out where the numbers depend on
      their shapes and dtypes alone (`rand_like`, `uniform_`). A dropout gives what it
      would make of ones, unless its input is given.

  Returns:
    The tensor that the operation gave, or for one that writes to a tensor, what it
    wrote.

  Raises:
    RngError: the key was taken in a scope inside a compiled function, or nothing was
      drawn with it (`draw.prng_key` has the key).
    ValueError: parameters are missing, or have other shapes or dtypes.

  >>> import torch, torchax
  >>> env = torchax.default_env()
  >>> with env, env.rng.record() as ledger:
  ...   x = torch.randn(3, device="jax")
  >>> torch.equal(replay(ledger[0]), x)
  True
  """
  return Explainer.redraw(draw, parameters)


def dry_run(entries: tuple, streams: dict, program) -> Ledger:
  """The draws that a function would make from where the streams stand.

  Args:
    entries: what it recorded when it was traced.
    streams: the caller's, by the numbers of their environments.
    program: its jaxpr.
  """
  return Ledger(_with_keys(_of_caller(entries, streams), streams), program)


def _of_caller(entries: tuple, streams: dict) -> list:
  call = next(_calls)
  prefix = next(iter(streams.values())).counter.path()
  return [_shifted(entry, streams, prefix, call) for entry in entries]


def _with_keys(entries, streams: dict) -> list[Draw]:
  """Single draws with the keys that the streams give them."""
  draws = []
  for draw in _expand(entries):
    if draw.key is None:
      counter = streams[draw.environment].counter
      draw = _with_key(draw, counter.operands_of(draw.index, draw.site, draw.turn))
    draws.append(dataclasses.replace(draw, environment=None))
  return draws


def _shifted(entry, streams: dict, prefix: str, call: int):
  """A draw of a function as one of its caller, whose streams have drawn before."""
  if isinstance(entry, Repeated):
    return dataclasses.replace(
      entry,
      entries=tuple([_shifted(e, streams, prefix, call) for e in entry.entries]),
      moves=tuple(
        (number, path if path is None else join(prefix, path), n)
        for number, path, n in entry.moves
      ),
    )
  draw = dataclasses.replace(entry, site=join(prefix, entry.site))
  if draw.key is None:
    counter = streams[draw.environment].counter
    turn = None if draw.turn is None else draw.turn + counter.progress(draw.site)
    return dataclasses.replace(draw, index=draw.index + counter.progress(), turn=turn)
  if draw.key[0] == "traced":
    return dataclasses.replace(draw, key=(*draw.key, call))
  return draw


def of_derived_stream(entries: Iterable, label: str) -> tuple:
  """Draws of a stream derived from the caller's, which has another key."""
  number = next(_calls)
  return tuple([_of_derived(entry, label, number) for entry in entries])


def _of_derived(entry, label: str, number: int):
  if isinstance(entry, Repeated):
    entries = tuple([_of_derived(inner, label, number) for inner in entry.entries])
    return dataclasses.replace(entry, entries=entries)
  stream = f"{label} {entry.stream}".rstrip()
  key = entry.key or ("traced", number, entry.site, entry.index, entry.turn)
  return dataclasses.replace(entry, stream=stream, key=key)


def _expand(entries: Iterable) -> Iterator[Draw]:
  """The single draws of entries, those of loops in each turn."""
  for entry in entries:
    if isinstance(entry, Draw):
      yield entry
      continue
    inner = list(_expand(entry.entries))
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
  return dataclasses.replace(draw, key=(*_identity(key), count))


def _identity(key) -> tuple:
  """What tells a key from others: its words, or which traced value it is."""
  if isinstance(key, jax.core.Tracer):
    return ("traced", id(key))
  with jax_compat.outside_of_traces():  # a function may be being traced
    words = np.asarray(jax.random.key_data(key)).ravel().tolist()
  return (str(jax.random.key_impl(key)), *words)


def join(prefix: str, path: str) -> str:
  """A path below another one."""
  return f"{prefix}.{path}" if prefix and path else prefix or path
