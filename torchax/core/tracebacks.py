"""Tracebacks that end at the user's line: the frames of libraries are hidden.

An exception that leaves torchax loses the frames of torchax, JAX and torch that it
went through; those of the user's code, between and below them, stay.
`TORCHAX_TRACEBACK=full` in the environment of the process, or JAX's own
`jax_traceback_filtering="off"`, keeps all of them.

Only the outermost frame of torchax can hide itself, so each public function that runs
the user's code, or an operation, catches what passes. In Python 3.11 and later a `try`
costs nothing until something is raised.
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
# In the note by which JAX says that it has done the same.
_NOTE_OF_JAX = "JAX_TRACEBACK_FILTERING"
# JAX's annotations lack its flags.
_config: Any = jax.config


def are_full() -> bool:
  """True where all frames were asked for."""
  asked = os.environ.get(VARIABLE) == "full"
  return asked or _config.jax_traceback_filtering == "off"


def hide(error: BaseException) -> None:
  """Takes the frames of libraries out of the traceback of an exception.

  Those of its causes lose them too. Nothing is done where all frames were asked for.
  """
  if are_full():
    return
  pending, seen = [error], set()
  while pending:
    one = pending.pop()
    seen.add(id(one))
    if _hide_frames(one) and one is error:
      notes = [n for n in getattr(one, "__notes__", []) if not _is_of_frames(n)]
      one.__notes__ = [*notes, NOTE]
    causes = (one.__cause__, one.__context__)
    pending += [c for c in causes if c is not None and id(c) not in seen]


def _is_of_frames(note: str) -> bool:
  return note == NOTE or _NOTE_OF_JAX in note


def _hide_frames(error: BaseException) -> bool:
  """Hides the frames of one exception; says whether there were any."""
  kept, entry, is_shorter = [], error.__traceback__, False
  for frame, _ in traceback.walk_tb(entry):
    if frame.f_code.co_filename.startswith(user_code.LIBRARIES):
      is_shorter = True
    elif entry is not None:
      kept.append(entry)
    entry = entry.tb_next if entry is not None else None
  for one, following in zip(kept, [*kept[1:], None]):
    one.tb_next = following
  error.__traceback__ = kept[0] if kept else None
  return is_shorter


def ending_at_the_user(function: F) -> F:
  """A function whose exceptions come without the frames of libraries.

  It is for functions that take many times as long as a call; others catch what passes
  themselves.
  """

  @functools.wraps(function)
  def called(*args, **kwargs):
    try:
      return function(*args, **kwargs)
    except Exception as error:
      hide(error)
      raise

  # A wrapper of the user's function shows that one, not itself.
  called.__wrapped__ = getattr(function, "__wrapped__", function)
  return called  # type: ignore[return-value]
