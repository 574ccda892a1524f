"""What is on, in this thread and task: context variables that environments set.

Each is a tuple, innermost last; an environment is in it as often as it was turned on.
"""

import threading
from contextvars import ContextVar
from typing import Any

on: ContextVar[tuple] = ContextVar("on", default=())
"""Environments that are on in a block (`with env:`)."""


class _OnThread(threading.local):
  """Environments that are on for the rest of a thread, whatever task is running.

  A notebook may run each of its cells in a task of its own.
  """

  environments: tuple = ()


on_thread = _OnThread()

suspended: ContextVar[tuple] = ContextVar("suspended", default=())
"""Environments inside of which torch is plain for a while."""


def push(switch: ContextVar[tuple], value: Any) -> None:
  """Adds a value at the end."""
  switch.set((*switch.get(), value))


def drop(switch: ContextVar[tuple], value: Any) -> bool:
  """Takes the last of the values that are this one out; False where there is none."""
  values = switch.get()
  rest = without(values, value)
  switch.set(rest)
  return len(rest) < len(values)


def without(values: tuple, value: Any) -> tuple:
  """The values but for the last one that is this one."""
  for place in reversed(range(len(values))):
    if values[place] is value:
      return values[:place] + values[place + 1 :]
  return values
