"""Tracebacks that end at the user's line: the frames of libraries are hidden.

An exception that leaves torchax loses its frames of torchax, JAX and torch. The frames
of the user's code, between and below them, stay. The environment variable
`TORCHAX_TRACEBACK=full`, or JAX's `jax_traceback_filtering="off"`, keeps all frames.

Only the outermost frame of torchax can hide itself. So each public function that runs
user code or an operation catches exceptions and calls `hide`. In Python 3.11 and later
a `try` costs nothing until an exception is raised.
"""

import functools
import os
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from torchax.compat import user_code

F = TypeVar("F", bound=Callable[..., Any])

VARIABLE = "TORCHAX_TRACEBACK"
NOTE = f"(Frames of torchax, JAX and torch are hidden; {VARIABLE}=full shows them.)"
# Text in the note that JAX adds when it has hidden frames.
_NOTE_OF_JAX = "JAX_TRACEBACK_FILTERING"
# JAX's annotations lack its flags.
_config: Any = jax.config


def hide(error: BaseException) -> None:
  """Remove the frames of libraries from the traceback of an exception and its causes.

  Do nothing if the user asked for all frames.
  """
  if os.environ.get(VARIABLE) == "full" or _config.jax_traceback_filtering == "off":
    return
  pending, seen = [error], set()
  while pending:
    one = pending.pop()
    seen.add(id(one))
    if _hide_frames(one) and one is error:
      notes = getattr(one, "__notes__", [])
      others = [n for n in notes if n != NOTE and _NOTE_OF_JAX not in n]
      one.__notes__ = [*others, NOTE]
    causes = (one.__cause__, one.__context__)
    pending += [c for c in causes if c is not None and id(c) not in seen]


def _hide_frames(error: BaseException) -> bool:
  """Remove the library frames of one exception; return True if there were any."""
  entries, entry, is_shorter = [], error.__traceback__, False
  for frame, _ in traceback.walk_tb(entry):
    if frame.f_code.co_filename.startswith(user_code.LIBRARIES):
      is_shorter = True
    elif entry is not None:
      entries.append(entry)
    entry = entry.tb_next if entry is not None else None
  for one, following in zip(entries, [*entries[1:], None]):
    one.tb_next = following
  error.__traceback__ = entries[0] if entries else None
  return is_shorter


def hide_library_frames(function: F) -> F:
  """Wrap a function so that its exceptions have no frames of libraries.

  For functions that take much longer than a call; others catch exceptions themselves.
  """

  @functools.wraps(function)
  def called(*args, **kwargs):
    try:
      return function(*args, **kwargs)
    except Exception as error:
      hide(error)
      raise

  # If `function` wraps the user's function, show that one.
  called.__wrapped__ = getattr(function, "__wrapped__", function)
  return called  # type: ignore[return-value]
