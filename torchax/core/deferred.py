"""Modes of eager operations: strict, fused and debug.

`run` calls the compiled program of an operation in the mode of the thread. In the fused
mode a `Recorder` may defer it (`recorder.py`). A tensor whose values are pending has a
`Deferred` storage (`storage.py`). Reading its array ends the segment, so code that does
not know of the modes gets arrays.
"""

import os
import threading
from collections.abc import Sequence
from typing import Any

import jax

from torchax.compat import jax_compat
from torchax.config import EAGER_MODES
from torchax.core.recorder import PLAIN, Recorder, read_values

VARIABLE = "TORCHAX_EAGER"


class _Active(threading.local):
  boundary: Any = None  # a `Boundary`, while a function is traced


active = _Active()


class Use:
  """`is_on`: a thread of this process has left the strict mode."""

  is_on = False


class _Thread(threading.local):
  """Mode of a thread; `recorder` is None unless the mode is fused."""

  def __init__(self):
    self.recorder: Recorder | None = None
    self._kept: Recorder | None = None
    self.switch(os.environ.get(VARIABLE) or "strict")

  def switch(self, mode: str) -> None:
    """Change the mode; end the segment.

    Raises:
      ValueError: there is no such mode.
    """
    if mode not in EAGER_MODES:
      words = ", ".join(map(repr, EAGER_MODES))
      raise ValueError(
        f"eager_mode and {VARIABLE} expect one of {words}, but got {mode!r}."
      )
    if self.recorder is not None:
      self.recorder.end()
    self.mode = mode
    Use.is_on = Use.is_on or mode != "strict"
    self._kept = self._kept or (Recorder() if mode == "fused" else None)
    self.recorder = self._kept if mode == "fused" else None


_thread = _Thread()


class eager_mode:
  """Mode of the eager operations of this thread; also a context manager.

  "strict" (the default) runs each operation when it is called. "fused" runs sequences
  of operations that repeat, such as the steps of a training loop, as one compiled
  program; see Performance. "debug" waits for each operation, so that an error of the
  device is raised at its line. The environment variable `TORCHAX_EAGER` sets the mode
  of all threads.

  Args:
    mode: "strict", "fused" or "debug".

  Raises:
    ValueError: there is no such mode.

  >>> x = torch.ones(2, device="jax")
  >>> with torchax.eager_mode("fused"):
  ...   for _ in range(3):
  ...     x = x * 2 + 1
  >>> x
  tensor([15., 15.], device='jax:0')
  """

  def __init__(self, mode: str):
    self._before = _thread.mode
    _thread.switch(mode)

  def __enter__(self) -> "eager_mode":
    return self

  def __exit__(self, *exc: Any) -> None:
    _thread.switch(self._before)


def end() -> None:
  """Run what this thread has deferred."""
  if Use.is_on and _thread.recorder is not None:
    _thread.recorder.end()


def is_recording() -> bool:
  """Return True if operands may be `Pending`: in the fused mode, outside of traces."""
  is_inside = active.boundary is not None or not jax_compat.is_top_level()
  return _thread.recorder is not None and not is_inside


def run(program, operands: Sequence):
  """Call a program in the mode of this thread; see `Recorder.call`."""
  if not Use.is_on:
    return program(*operands)
  recorder = _thread.recorder
  if recorder is None or active.boundary is not None:
    return run_at_once(program, operands)
  return recorder.call(program, operands)


def run_at_once(program, operands: Sequence):
  """Call a program that may not be recorded."""
  if not PLAIN.issuperset(map(type, operands)):
    operands = values(operands)
  results = program(*operands)
  return jax.block_until_ready(results) if _thread.mode == "debug" else results


def values(tree):
  """Return a tree with arrays for its `Pending` leaves."""
  return read_values(tree) if Use.is_on else tree
