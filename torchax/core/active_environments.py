"""Environments that are enabled in this thread and task, in context variables.

Each variable is a tuple, innermost last. It contains an environment once per time that
it was enabled. `torchax/environment.py` sets them.
"""

import threading
from contextvars import ContextVar
from typing import Any

on: ContextVar[tuple] = ContextVar("on", default=())
"""Environments enabled by a block (`with env:`)."""


class _OnThread(threading.local):
  """Environments enabled for the rest of a thread, in every task.

  A notebook may run each of its cells in a task of its own.
  """

  environments: tuple = ()


on_thread = _OnThread()

suspended: ContextVar[tuple] = ContextVar("suspended", default=())
"""Environments suspended by a block, in which torch runs unchanged."""


def push(switch: ContextVar[tuple], value: Any) -> None:
  """Append a value."""
  switch.set((*switch.get(), value))


def drop(switch: ContextVar[tuple], value: Any) -> bool:
  """Remove the last occurrence of a value; return False if there is none."""
  values = switch.get()
  remaining = without(values, value)
  switch.set(remaining)
  return len(remaining) < len(values)


def without(values: tuple, value: Any) -> tuple:
  """Return the values without the last occurrence of `value` (by identity)."""
  for index in reversed(range(len(values))):
    if values[index] is value:
      return values[:index] + values[index + 1 :]
  return values
